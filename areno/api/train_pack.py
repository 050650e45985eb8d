"""Train packs: the tensors of one micro-batch, in the two layouts that loss functions know.

Axes: B rows, P prompt and R response tokens of a row, L padded length, S tokens of the concatenated rows, A action sites
(len-1 of each row).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    # Each row is a run of prompt, one of response and one of padding.
    runs_B3 = np.zeros((len(rows), 3), dtype=np.int64)
    runs_B3[:, :2] = _lens(rows)
    lengths_B = runs_B3.sum(axis=1)
    longest = int(lengths_B.max(initial=0))
    runs_B3[:, 2] = longest - lengths_B
    pads_L, zeros = np.full(longest, pad_id, dtype=np.int64), np.zeros(2 * longest, dtype=np.float32)
    tokens: list[npt.NDArray[Any]] = []
    logprobs: list[npt.NDArray[Any]] = []
    gap = 0
    for row, (prompt, _, padding) in zip(rows, runs_B3.tolist(), strict=True):
        logprobs += (zeros[: gap + prompt], row.logprobs_R)
        gap = padding
        tokens += (row.prompt_P, row.response_R, pads_L[:gap])
    logprobs.append(zeros[:gap])
    shape = (len(rows), longest)
    input_ids_BL = _concat(tokens, np.int64).reshape(shape)
    prompt_mask_BL = np.tile([True, False, True], len(rows)).repeat(runs_B3.reshape(-1)).reshape(shape)
    advantages_BL = _on_responses(rows, runs_B3).reshape(shape)
    for b, row in enumerate(rows):
        if row.prompt_mask_R is not None or isinstance(row.advantage, np.ndarray):
            response = slice(row.prompt_P.size, row.prompt_P.size + row.response_R.size)
            prompt_mask_BL[b, response], advantages_BL[b, response] = _by_token(row)
    pack: TrainPack = {
        "input_ids": torch.from_numpy(input_ids_BL),
        "labels": torch.from_numpy(input_ids_BL.copy()),
        "lengths": torch.from_numpy(lengths_B.astype(np.int32)),
        "prompt_mask": torch.from_numpy(prompt_mask_BL),
        "logprobs": torch.from_numpy(_concat(logprobs, np.float32).reshape(shape)),
        "advantages": torch.from_numpy(advantages_BL),
    }
    if any(row.loss_mask_R is not None for row in rows):
        loss_mask_BL = ~prompt_mask_BL
        for b, row in enumerate(rows):
            if row.loss_mask_R is not None:
                loss_mask_BL[b, row.prompt_P.size : row.prompt_P.size + row.response_R.size] = row.loss_mask_R
        pack["loss_mask"] = torch.from_numpy(loss_mask_BL)
    return pack


def packed_pack(rows: Sequence[TrainRow]) -> TrainPack:
    """Rows laid end to end without padding.

    Returns:
        input_ids, position_ids int64 [1,S], positions restarting in each row; train_cu_seqlens int32 [B+1];
        train_max_seqlen int; packed_num_sequences int = B; packed_response_mask bool [A], packed_seq_ids int64 [A],
        packed_advantages, packed_logprobs float32 [A] at the positions of `sites.predicted_positions`.
    """
    lens_B2 = _lens(rows)
    lens_B = lens_B2.sum(axis=1)
    longest = int(lens_B.max(initial=0))
    cu_seqlens_B1 = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lens_B, out=cu_seqlens_B1[1:])
    # The first token of a row is predicted by no site: every per-site value is that of a token from 1 on.
    sites_B = np.maximum(lens_B - 1, 0)
    # Each row has a run of sites that predict the prompt and one of those that predict the response.
    runs_B2 = np.empty_like(lens_B2)
    runs_B2[:, 0] = np.maximum(lens_B2[:, 0] - 1, 0)
    runs_B2[:, 1] = sites_B - runs_B2[:, 0]
    mask_A, advantages_A = _site_values(rows, runs_B2)
    ramp, zeros = np.arange(longest, dtype=np.int64), np.zeros(longest, dtype=np.float32)
    logprobs = [
        part
        for row, (prompt, response) in zip(rows, runs_B2.tolist(), strict=True)
        for part in (zeros[:prompt], row.logprobs_R[row.logprobs_R.size - response :])
    ]
    tokens = [part for row in rows for part in (row.prompt_P, row.response_R)]
    return {
        "input_ids": torch.from_numpy(_concat(tokens, np.int64)).unsqueeze(0),
        "position_ids": torch.from_numpy(_concat([ramp[:n] for n in lens_B.tolist()], np.int64)).unsqueeze(0),
        "train_cu_seqlens": torch.from_numpy(cu_seqlens_B1),
        "train_max_seqlen": longest,
        "packed_num_sequences": len(rows),
        "packed_response_mask": torch.from_numpy(mask_A),
        "packed_seq_ids": torch.from_numpy(np.arange(len(rows)).repeat(sites_B)),
        "packed_advantages": torch.from_numpy(advantages_A),
        "packed_logprobs": torch.from_numpy(_concat(logprobs, np.float32)),
    }


def _site_values(
    rows: Sequence[TrainRow], runs_B2: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """bool [A] and float32 [A]: which sites predict a token to learn from, and the advantage of each."""
    advantages_A = _on_responses(rows, runs_B2)
    mask_A = np.tile([False, True], len(rows)).repeat(runs_B2.reshape(-1))
    stop = 0
    for row, (before, sites) in zip(rows, runs_B2.tolist(), strict=True):
        start = stop + before
        stop = start + sites
        first = row.response_R.size - sites  # 1 where the row begins with its response, else 0
        if row.prompt_mask_R is not None or isinstance(row.advantage, np.ndarray):
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


def _lens(rows: Sequence[TrainRow]) -> npt.NDArray[np.int64]:
    """int64 [B,2]: prompt and response tokens of each row."""
    lens = [size for row in rows for size in (row.prompt_P.size, row.response_R.size)]
    return np.array(lens, dtype=np.int64).reshape(-1, 2)


def _on_responses(rows: Sequence[TrainRow], runs_BR: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """float32: each row's advantage on its second run, 0 on the others; 0 for a row whose advantages are an array."""
    values_BR = np.zeros(runs_BR.shape, dtype=np.float32)
    values_BR[:, 1] = [0.0 if isinstance(row.advantage, np.ndarray) else row.advantage for row in rows]
    return values_BR.reshape(-1).repeat(runs_BR.reshape(-1))


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
