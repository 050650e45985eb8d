"""Per-completion statistics of a rollout, in one pass and without a copy of the tokens.

They are per completion so that a batch's totals do not depend on how it was cut into shards: float64 sums of the same
N numbers in the same order give the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from areno.errors import RunError
from areno.materialize.rollout_batch import Float64, Int64, RolloutBatch


def segment_sums(values_T: npt.NDArray[Any], offsets_N1: Int64, dtype: Any) -> npt.NDArray[Any]:
    """[N]: the sum of each segment `values_T[o[i]:o[i+1]]`, accumulated in `dtype`; 0 for an empty one."""
    sums_N = np.zeros(offsets_N1.size - 1, dtype=dtype)
    filled_N = np.diff(offsets_N1) > 0
    if filled_N.any():
        sums_N[filled_N] = np.add.reduceat(values_T, offsets_N1[:-1][filled_N], dtype=dtype)
    return sums_N


def logprob_sums(rollout: RolloutBatch) -> tuple[Float64, Int64]:
    """float64 [N] and int64 [N]: sum and number of the logprobs of each completion's own tokens (`loss_mask_T`)."""
    if rollout.loss_mask_T is None:
        sums_N = segment_sums(rollout.response_logprobs_T, rollout.response_offsets_N1, np.float64)
        return sums_N, rollout.response_lens_N
    own_T = np.where(rollout.loss_mask_T, rollout.response_logprobs_T, np.float32(0))
    counts_N = segment_sums(rollout.loss_mask_T, rollout.response_offsets_N1, np.int64)
    return segment_sums(own_T, rollout.response_offsets_N1, np.float64), counts_N


def check_logprobs(sums_N: Float64, rollout: RolloutBatch, first_group: int) -> None:
    """Refuse a rollout with a NaN or infinite logprob before anything is learned from it.

    Raises:
        RunError: names prompt index and sample index of the first such completion.
    """
    finite_N = np.isfinite(sums_N)
    if finite_N.all():
        return
    row = int(np.argmin(finite_N))
    group = int(rollout.group_of_row_N[row])
    sample = row - int(rollout.group_offsets_G1[group])
    raise RunError(
        f"rollout logprobs of prompt {first_group + group}, sample {sample} are not finite: the sampling model is "
        "broken (diverged weights, or an overflow in its compute type); the step was refused, weights are unchanged."
    )


def trainable_counts(rollout: RolloutBatch) -> Int64:
    """int64 [N]: tokens of each row that an action site predicts and the loss learns from.

    That is its own response tokens; where a prompt is empty, the first response token is predicted by no site.
    """
    if rollout.loss_mask_T is None:
        counts_N = rollout.response_lens_N
    else:
        counts_N = segment_sums(rollout.loss_mask_T, rollout.response_offsets_N1, np.int64)
    unpredicted_N = (rollout.prompt_lens_G[rollout.group_of_row_N] == 0) & (rollout.response_lens_N > 0)
    if not unpredicted_N.any():
        return counts_N
    first_own_N = np.ones(counts_N.size, dtype=np.int64)
    if rollout.loss_mask_T is not None:
        first_own_N[unpredicted_N] = rollout.loss_mask_T[rollout.response_offsets_N1[:-1][unpredicted_N]]
    return counts_N - np.where(unpredicted_N, first_own_N, 0)
