"""The completions of a step as flat, ragged arrays.

Axes: G groups, N completions, P prompt tokens, T response tokens. `X_offsets_Y1` has one more entry than Y.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

STOPPED, LENGTH, ABORTED = 0, 1, 2
"""How a completion ended: at an end token, at the length limit, or cut off from outside."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class RolloutBatch:
    """All completions of a step (or of a chunk of it). Validated once, here; the arrays are never written to again.

    prompt_tokens_P       int32 [P]    prompts, concatenated
    prompt_offsets_G1     int64 [G+1]  group g's prompt is prompt_tokens_P[o[g]:o[g+1]]
    group_offsets_G1      int64 [G+1]  group g's completions are rows o[g]:o[g+1]; a group may be empty
    response_tokens_T     int32 [T]    sampled ids, concatenated
    response_logprobs_T   float32 [T]  their logprobs under the sampling policy
    response_offsets_N1   int64 [N+1]  completion i is tokens o[i]:o[i+1]; a completion may be empty
    finish_N              uint8 [N]    STOPPED, LENGTH or ABORTED
    loss_mask_T           bool [T]     False where a token is not the model's own; None is all True
    policy_version        int          which weights sampled it

    Raises:
        ValueError: an array's type, shape or content breaks this contract; the message names the field and the row.
    """

    prompt_tokens_P: Int32
    prompt_offsets_G1: Int64
    group_offsets_G1: Int64
    response_tokens_T: Int32
    response_logprobs_T: Float32
    response_offsets_N1: Int64
    finish_N: UInt8
    loss_mask_T: Bool | None = None
    policy_version: int = 0

    def __post_init__(self) -> None:
        dtypes: dict[str, Any] = {
            "prompt_tokens_P": np.int32, "prompt_offsets_G1": np.int64, "group_offsets_G1": np.int64,
            "response_tokens_T": np.int32, "response_logprobs_T": np.float32, "response_offsets_N1": np.int64,
            "finish_N": np.uint8, "loss_mask_T": np.bool_,
        }  # fmt: skip
        for name, dtype in dtypes.items():
            array = getattr(self, name)
            if array is not None:
                _check_array(name, array, dtype)
        _check_offsets("prompt_offsets_G1", self.prompt_offsets_G1, self.prompt_tokens_P.size)
        _check_offsets("response_offsets_N1", self.response_offsets_N1, self.response_tokens_T.size)
        _check_offsets("group_offsets_G1", self.group_offsets_G1, self.num_completions)
        if self.prompt_offsets_G1.size != self.group_offsets_G1.size:
            raise ValueError(
                f"{self.prompt_offsets_G1.size - 1} prompts but {self.num_groups} groups of completions: "
                "prompt_offsets_G1 and group_offsets_G1 must have the same length."
            )
        if self.finish_N.size != self.num_completions:
            raise ValueError(f"finish_N has {self.finish_N.size} entries for {self.num_completions} completions.")
        self._check_per_token("response_logprobs_T", self.response_logprobs_T)
        if self.loss_mask_T is not None:
            self._check_per_token("loss_mask_T", self.loss_mask_T)
        for name in ("prompt_tokens_P", "response_tokens_T"):
            tokens = getattr(self, name)
            if tokens.size and int(tokens.min()) < 0:
                raise ValueError(f"{name} holds a negative token id at position {int(tokens.argmin())}.")

    def _check_per_token(self, name: str, array: npt.NDArray[Any]) -> None:
        if array.size != self.response_tokens_T.size:
            raise ValueError(f"{name} has {array.size} entries for {self.response_tokens_T.size} response tokens.")

    @property
    def num_groups(self) -> int:
        return self.group_offsets_G1.size - 1

    @property
    def num_completions(self) -> int:
        return self.response_offsets_N1.size - 1

    @property
    def num_response_tokens(self) -> int:
        return self.response_tokens_T.size

    @property
    def group_sizes_G(self) -> Int64:
        return np.diff(self.group_offsets_G1)

    @property
    def response_lens_N(self) -> Int64:
        return np.diff(self.response_offsets_N1)

    @property
    def prompt_lens_G(self) -> Int64:
        return np.diff(self.prompt_offsets_G1)

    @property
    def group_of_row_N(self) -> Int64:
        """int64 [N]: the group that each completion belongs to."""
        return np.repeat(np.arange(self.num_groups, dtype=np.int64), self.group_sizes_G)

    @property
    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        arrays = (v for v in vars(self).values() if isinstance(v, np.ndarray))
        return sum(array.nbytes for array in arrays)

    def groups(self, start: int, stop: int) -> RolloutBatch:
        """Groups start..stop-1 as a batch of their own. Token arrays are views; only offsets are new."""
        p0, p1 = int(self.prompt_offsets_G1[start]), int(self.prompt_offsets_G1[stop])
        n0, n1 = int(self.group_offsets_G1[start]), int(self.group_offsets_G1[stop])
        t0, t1 = int(self.response_offsets_N1[n0]), int(self.response_offsets_N1[n1])
        return RolloutBatch(
            prompt_tokens_P=self.prompt_tokens_P[p0:p1],
            prompt_offsets_G1=self.prompt_offsets_G1[start : stop + 1] - p0,
            group_offsets_G1=self.group_offsets_G1[start : stop + 1] - n0,
            response_tokens_T=self.response_tokens_T[t0:t1],
            response_logprobs_T=self.response_logprobs_T[t0:t1],
            response_offsets_N1=self.response_offsets_N1[n0 : n1 + 1] - t0,
            finish_N=self.finish_N[n0:n1],
            loss_mask_T=None if self.loss_mask_T is None else self.loss_mask_T[t0:t1],
            policy_version=self.policy_version,
        )

    @classmethod
    def from_rows(
        cls,
        prompts: Sequence[Any],
        responses: Sequence[Sequence[Any]],
        logprobs: Sequence[Sequence[Any]],
        *,
        finish: Sequence[Sequence[int]] | None = None,
        loss_masks: Sequence[Sequence[Any]] | None = None,
        policy_version: int = 0,
    ) -> RolloutBatch:
        """Flatten rows given per group and per sample.

        Args:
            prompts: one row of token ids per group (a list or an array).
            responses: per group, per sample, the sampled ids.
            logprobs: per group, per sample, one logprob per id.
            finish: per group, per sample, how it ended; all STOPPED by default.
            loss_masks: per group, per sample, one bool per id; all True by default.

        Raises:
            ValueError: the nesting or a row's length does not match; the message names group and sample.
        """
        if not len(prompts) == len(responses) == len(logprobs):
            raise ValueError(
                f"{len(prompts)} prompts, {len(responses)} groups of responses and {len(logprobs)} of logprobs: "
                "give one of each per group."
            )
        _check_rows("logprobs", responses, logprobs)
        if loss_masks is not None:
            _check_rows("loss_masks", responses, loss_masks)
        if finish is not None and [len(g) for g in finish] != [len(g) for g in responses]:
            raise ValueError("finish must have one entry per sample of each group.")
        flat = [row for group in responses for row in group]
        finish_N = [f for group in finish for f in group] if finish is not None else [STOPPED] * len(flat)
        return cls(
            prompt_tokens_P=_join(prompts, np.int32),
            prompt_offsets_G1=offsets_of([len(p) for p in prompts]),
            group_offsets_G1=offsets_of([len(g) for g in responses]),
            response_tokens_T=_join(flat, np.int32),
            response_logprobs_T=_join([row for group in logprobs for row in group], np.float32),
            response_offsets_N1=offsets_of([len(row) for row in flat]),
            finish_N=np.asarray(finish_N, dtype=np.uint8),
            loss_mask_T=None if loss_masks is None else _join([m for g in loss_masks for m in g], np.bool_),
            policy_version=policy_version,
        )

    @classmethod
    def concatenate(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """Join batches group after group. A mask is kept if any of them has one."""
        if not batches:
            return cls.from_rows([], [], [])
        masked = any(b.loss_mask_T is not None for b in batches)
        return cls(
            prompt_tokens_P=np.concatenate([b.prompt_tokens_P for b in batches]),
            prompt_offsets_G1=offsets_of(np.concatenate([b.prompt_lens_G for b in batches])),
            group_offsets_G1=offsets_of(np.concatenate([b.group_sizes_G for b in batches])),
            response_tokens_T=np.concatenate([b.response_tokens_T for b in batches]),
            response_logprobs_T=np.concatenate([b.response_logprobs_T for b in batches]),
            response_offsets_N1=offsets_of(np.concatenate([b.response_lens_N for b in batches])),
            finish_N=np.concatenate([b.finish_N for b in batches]),
            loss_mask_T=np.concatenate([_mask_or_ones(b) for b in batches]) if masked else None,
            policy_version=min(b.policy_version for b in batches),
        )


def offsets_of(lengths: Sequence[int] | Int64) -> Int64:
    """int64 [len+1]: running start of each segment, and the end of the last."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _mask_or_ones(batch: RolloutBatch) -> Bool:
    return np.ones(batch.num_response_tokens, dtype=np.bool_) if batch.loss_mask_T is None else batch.loss_mask_T


def _join(rows: Iterable[Any], dtype: Any) -> npt.NDArray[Any]:
    arrays = [np.asarray(row) for row in rows]
    for i, array in enumerate(arrays):
        if array.ndim != 1:
            raise ValueError(f"row {i} must be one-dimensional, got shape {array.shape}.")
        if array.size and dtype is np.int32:
            _check_ids(i, array)
    return np.concatenate([a.astype(dtype) for a in arrays]) if arrays else np.zeros(0, dtype=dtype)


def _check_ids(index: int, array: npt.NDArray[Any]) -> None:
    if array.dtype.kind not in "iu":
        raise ValueError(f"row {index} must hold integer token ids, got {array.dtype}.")
    if int(array.max()) > np.iinfo(np.int32).max:
        raise ValueError(f"row {index} holds token id {int(array.max())}, which does not fit int32.")


def _check_rows(name: str, responses: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> None:
    if len(other) != len(responses):
        raise ValueError(f"{name} has {len(other)} groups for {len(responses)} groups of responses.")
    for g, (rows, others) in enumerate(zip(responses, other, strict=True)):
        if len(rows) != len(others):
            raise ValueError(f"group {g} has {len(rows)} responses but {len(others)} rows of {name}.")
        for i, (row, o) in enumerate(zip(rows, others, strict=True)):
            if len(row) != len(o):
                raise ValueError(f"group {g}, sample {i}: {len(row)} tokens but {len(o)} entries in {name}.")


def _check_array(name: str, array: Any, dtype: Any) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name} must be a one-dimensional numpy array of {np.dtype(dtype)}, got {got}.")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous: pass numpy.ascontiguousarray({name}).")


def _check_offsets(name: str, offsets: Int64, end: int) -> None:
    if offsets.size == 0 or offsets[0] != 0 or offsets[-1] != end:
        raise ValueError(f"{name} must start at 0 and end at {end}, got {offsets[:1]}..{offsets[-1:]}.")
    if bool((np.diff(offsets) < 0).any()):
        raise ValueError(f"{name} must not decrease; it does after entry {int(np.argmax(np.diff(offsets) < 0))}.")
