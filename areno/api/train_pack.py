"""Train packs: the tensors of one micro-batch, in the two layouts that loss functions know.

Axes: B rows, P prompt and R response tokens of a row, L padded length, S tokens of the concatenated rows, A action sites
(len-1 of each row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from areno.api.models import TrainSequence

TrainPack = dict[str, Any]
"""A plain mapping of tensors, as loss functions written for AReno expect it (keys: see `padded_pack`, `packed_pack`)."""

Layout = Literal["packed", "padded"]


class TrainRow(NamedTuple):
    """One row of P prompt and R response tokens, as views of flat arrays. A tuple, because steps make thousands of them.

    prompt_P       int [P]
    response_R     int [R]
    logprobs_R     float [R]   under the sampling policy
    advantage      one float for every response token, or float [R]
    loss_mask_R    bool [R]    False where a token must not be learned from; None learns from all of the response
    prompt_mask_R  bool [R]    True where the response holds a token of the prompt after all, as in rows built by hand
    """

    prompt_P: npt.NDArray[Any]
    response_R: npt.NDArray[Any]
    logprobs_R: npt.NDArray[Any]
    advantage: float | npt.NDArray[Any]
    loss_mask_R: npt.NDArray[np.bool_] | None = None
    prompt_mask_R: npt.NDArray[np.bool_] | None = None


def padded_pack(rows: Sequence[TrainRow], *, pad_id: int) -> TrainPack:
    """Right-padded tensors.

    Returns:
        input_ids, labels int64 [B,L]; lengths int32 [B]; prompt_mask bool [B,L], True on prompt and padding;
        logprobs, advantages float32 [B,L]; loss_mask bool [B,L] only if a row has one.
    """
    of = _columns(rows)
    # Each row is a run of prompt, one of response and one of padding.
    runs_B3 = np.zeros((len(rows), 3), dtype=np.int64)
    runs_B3[:, :2] = of.lens_B2
    lengths_B = runs_B3.sum(axis=1)
    longest = int(lengths_B.max(initial=0))
    runs_B3[:, 2] = longest - lengths_B
    shape = (len(rows), longest)
    pads_L = np.full(longest, pad_id, dtype=np.int64)
    tokens = _interleaved(of.prompts, of.responses, _beginnings(pads_L, runs_B3[:, 2]))
    # Without a logprob are the padding of the row before and the prompt, in one run, and the last padding.
    blank_B1 = np.zeros(len(rows) + 1, dtype=np.int64)
    blank_B1[:-1] = runs_B3[:, 0]
    blank_B1[1:] += runs_B3[:, 2]
    blanks = _beginnings(np.zeros(2 * longest, dtype=np.float32), blank_B1)
    logprobs = [*_interleaved(blanks[:-1], of.logprobs), blanks[-1]]
    input_ids_BL = _concat(tokens, np.int64).reshape(shape)
    prompt_mask, advantages = _on_runs(of, [True, False, True], runs_B3)
    prompt_mask_BL, advantages_BL = prompt_mask.reshape(shape), advantages.reshape(shape)
    for b in of.by_token:
        response = slice(rows[b].prompt_P.size, int(lengths_B[b]))
        prompt_mask_BL[b, response], advantages_BL[b, response] = _by_token(rows[b])
    pack: TrainPack = {
        "input_ids": torch.from_numpy(input_ids_BL),
        "labels": torch.from_numpy(input_ids_BL.copy()),
        "lengths": torch.from_numpy(lengths_B.astype(np.int32)),
        "prompt_mask": torch.from_numpy(prompt_mask_BL),
        "logprobs": torch.from_numpy(_concat(logprobs, np.float32).reshape(shape)),
        "advantages": torch.from_numpy(advantages_BL),
    }
    if of.masked:
        loss_mask_BL = ~prompt_mask_BL
        for b in of.masked:
            loss_mask_BL[b, rows[b].prompt_P.size : int(lengths_B[b])] = rows[b].loss_mask_R
        pack["loss_mask"] = torch.from_numpy(loss_mask_BL)
    return pack


def packed_pack(rows: Sequence[TrainRow]) -> TrainPack:
    """Rows laid end to end without padding.

    Returns:
        input_ids, position_ids int64 [1,S], positions restarting in each row; train_cu_seqlens int32 [B+1];
        train_max_seqlen int; packed_num_sequences int = B; packed_response_mask bool [A], packed_seq_ids int64 [A],
        packed_advantages, packed_logprobs float32 [A] at the positions of `sites.predicted_positions`.
    """
    of = _columns(rows)
    lens_B = of.lens_B2.sum(axis=1)
    longest = int(lens_B.max(initial=0))
    cu_seqlens_B1 = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lens_B, out=cu_seqlens_B1[1:])
    # The first token of a row is predicted by no site: every per-site value is that of a token from 1 on.
    sites_B = np.maximum(lens_B - 1, 0)
    # Each row has a run of sites that predict the prompt and one of those that predict the response.
    runs_B2 = np.empty_like(of.lens_B2)
    runs_B2[:, 0] = np.maximum(of.lens_B2[:, 0] - 1, 0)
    runs_B2[:, 1] = sites_B - runs_B2[:, 0]
    mask_A, advantages_A = _site_values(rows, of, runs_B2)
    blanks = _beginnings(np.zeros(longest, dtype=np.float32), runs_B2[:, 0])
    logprobs = [
        logprobs if prompt else logprobs[1:]
        for logprobs, prompt in zip(of.logprobs, of.lens_B2[:, 0].tolist(), strict=True)
    ]
    positions = _beginnings(np.arange(longest, dtype=np.int64), lens_B)
    return {
        "input_ids": torch.from_numpy(_concat(_interleaved(of.prompts, of.responses), np.int64)).unsqueeze(0),
        "position_ids": torch.from_numpy(_concat(positions, np.int64)).unsqueeze(0),
        "train_cu_seqlens": torch.from_numpy(cu_seqlens_B1),
        "train_max_seqlen": longest,
        "packed_num_sequences": len(rows),
        "packed_response_mask": torch.from_numpy(mask_A),
        "packed_seq_ids": torch.from_numpy(np.arange(len(rows)).repeat(sites_B)),
        "packed_advantages": torch.from_numpy(advantages_A),
        "packed_logprobs": torch.from_numpy(_concat(_interleaved(blanks, logprobs), np.float32)),
    }


@dataclass(frozen=True)
class _Columns:
    """The parts of rows, each kind for itself. lens_B2 int64 [B,2]: prompt and response tokens. advantages_B float32 [B],
    0 where they are an array. `by_token` are the rows whose prompt or advantage is given token by token, `masked` those
    with a loss mask."""

    prompts: Sequence[npt.NDArray[Any]]
    responses: Sequence[npt.NDArray[Any]]
    logprobs: Sequence[npt.NDArray[Any]]
    lens_B2: npt.NDArray[np.int64]
    advantages_B: npt.NDArray[np.float32]
    by_token: list[int]
    masked: list[int]


def _columns(rows: Sequence[TrainRow]) -> _Columns:
    prompts, responses, logprobs, advantages, loss_masks, prompt_masks = zip(*rows, strict=True) if rows else [()] * 6
    lens_B2 = np.empty((len(rows), 2), dtype=np.int64)
    lens_B2[:, 0] = [prompt.size for prompt in prompts]
    lens_B2[:, 1] = [response.size for response in responses]
    tokenwise = [
        b
        for b, (mask, advantage) in enumerate(zip(prompt_masks, advantages, strict=True))
        if mask is not None or isinstance(advantage, np.ndarray)
    ]
    masked = [b for b, mask in enumerate(loss_masks) if mask is not None]
    values_B = np.array([0.0 if isinstance(a, np.ndarray) else a for a in advantages], dtype=np.float32)
    return _Columns(prompts, responses, logprobs, lens_B2, values_B, tokenwise, masked)


def _site_values(
    rows: Sequence[TrainRow], of: _Columns, runs_B2: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """bool [A] and float32 [A]: which sites predict a token to learn from, and the advantage of each."""
    prompt_mask_A, advantages_A = _on_runs(of, [True, False], runs_B2)
    mask_A = ~prompt_mask_A
    ends_B2 = np.cumsum(runs_B2).reshape(-1, 2).tolist()
    for b in sorted({*of.by_token, *of.masked}):
        row, (start, stop) = rows[b], ends_B2[b]
        first = row.response_R.size - (stop - start)  # 1 where the row begins with its response, else 0
        if b in of.by_token:
            prompt_mask_R, advantages_R = _by_token(row)
            mask_A[start:stop] = ~prompt_mask_R[first:]
            advantages_A[start:stop] = advantages_R[first:]
        if row.loss_mask_R is not None:
            mask_A[start:stop] &= row.loss_mask_R[first:]
    return mask_A, advantages_A


def _by_token(row: TrainRow) -> tuple[npt.NDArray[np.bool_], npt.NDArray[Any]]:
    """bool [R] and float [R]: which tokens of the response are prompt after all, and the advantage of each, 0 on those."""
    mask_R = np.zeros(row.response_R.size, dtype=np.bool_) if row.prompt_mask_R is None else row.prompt_mask_R
    return mask_R, np.where(mask_R, 0.0, row.advantage)


def _on_runs(
    of: _Columns, is_prompt_R: Sequence[bool], runs_BR: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """bool and float32: for each token of the runs of each row, whether it is of a prompt run (or of padding), and the
    row's advantage on its second run, that of the response, 0 on the others."""
    values_BR = np.zeros(runs_BR.shape, dtype=np.float32)
    values_BR[:, 1] = of.advantages_B
    lens = runs_BR.reshape(-1)
    return np.tile(is_prompt_R, len(runs_BR)).repeat(lens), values_BR.reshape(-1).repeat(lens)


def _beginnings(array: npt.NDArray[Any], lens_B: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """The array's beginnings of these lengths."""
    return [array[:n] for n in lens_B.tolist()]


def _interleaved(*columns: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """The first of each column, the second of each, and so on."""
    return [part for parts in zip(*columns, strict=True) for part in parts]


def _concat(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    """The parts end to end, converted while they are copied."""
    if not parts:
        return np.zeros(0, dtype=dtype)
    return np.concatenate(parts, dtype=dtype, casting="unsafe")


def make_train_pack(sequences: Sequence[TrainSequence], layout: Layout = "padded") -> TrainPack:
    """Lay out rows that were built by hand. Padding takes the first row's `eos_token_id`.

    Raises:
        ValueError: no rows, or a per-token field whose length is not that of `tokens` (row and lengths are named).
    """
    if not sequences:
        raise ValueError("make_train_pack needs at least one TrainSequence.")
    rows = [_row_of(i, seq) for i, seq in enumerate(sequences)]
    return packed_pack(rows) if layout == "packed" else padded_pack(rows, pad_id=sequences[0].eos_token_id)


def _row_of(index: int, seq: TrainSequence) -> TrainRow:
    tokens_L = _array(seq.tokens, np.int64)
    fields = {
        name: _array(getattr(seq, name), dtype)
        for name, dtype in (("prompt_mask", np.bool_), ("logprobs", np.float32), ("advantages", np.float32))
    }
    loss_mask_L = _array(seq.loss_mask, np.bool_)
    has_mask = loss_mask_L.size > 0 or tokens_L.size == 0
    for name, array in {**fields, **({"loss_mask": loss_mask_L} if has_mask else {})}.items():
        if array.shape != tokens_L.shape:
            raise ValueError(f"row {index}: {name} has {array.size} entries for {tokens_L.size} tokens.")
    return TrainRow(
        prompt_P=tokens_L[:0],
        response_R=tokens_L,
        logprobs_R=fields["logprobs"],
        advantage=fields["advantages"],
        loss_mask_R=loss_mask_L if has_mask else None,
        prompt_mask_R=fields["prompt_mask"],
    )


def _array(values: Any, dtype: Any) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        # bfloat16 has no numpy type; the target type of every field holds its values.
        values = values.detach().cpu()
        values = values.float().numpy() if values.is_floating_point() else values.numpy()
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, dtype=dtype)
    return array.astype(dtype, copy=False)
