"""Group-relative advantages, for all prompt groups of a batch in one vectorized float64 pass.

Formula: DeepSeekMath (GRPO), arXiv 2402.03300, section 4.1.2; leave-one-out baseline: RLOO, arXiv 2402.14740.
Axes: N completions, G groups, K kept completions (those that `mask` leaves in).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave-one-out"]

# Squares of larger rewards may overflow float64: such a batch is first scaled down by an exact power of two.
_SQUARABLE = 2.0**480
_SCALE_DOWN = 2.0**-560

# Summing n equal numbers and dividing by n is off by less than n times this, relative to them. Where all groups have a
# larger deviation none is constant, and none need be looked at again.
_ROUNDING = 2.0**-51


def compute_batch_group_advantages(
    rewards: Any,
    group_sizes: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    eps: float = 1e-8,
    scale: Scale = "group",
    baseline: Baseline = "mean",
    mask: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
) -> Float64:
    """`A = (r - baseline) / (std + eps)` within each prompt group.

    A group of equal rewards, and so a group of one, gives exactly 0.0. Variances are two-pass.

    Args:
        rewards: [N] numbers of any kind (lists, numpy arrays, tensors, 0-d tensors), group after group.
        group_sizes: [G] completions per group; zeros are allowed.
        eps: added to the standard deviation.
        scale: divide by the population standard deviation of the group, of the whole batch, or by nothing.
        baseline: the group's mean, or for each row the mean of the others. With `scale="group"` the latter divides by
            the standard deviation of the others, and not at all where the others are all equal.
        mask: [N] False leaves a row out: it takes no part in any mean or deviation and gets 0.

    Returns:
        float64 [N].

    Raises:
        ValueError: the sizes do not add up, or a reward that takes part is NaN or infinite.
    """
    rewards_N = as_float64(rewards)
    sizes_G = np.asarray(group_sizes, dtype=np.int64)
    total = int(np.add.reduce(sizes_G))
    smallest = int(np.minimum.reduce(sizes_G, initial=1))
    if total != rewards_N.size or smallest < 0:
        raise ValueError(
            f"{rewards_N.size} rewards but group sizes add up to {total}: {rewards_N.size - total:+d} rewards are left over."
        )
    keep_N = None if mask is None else np.asarray(mask, dtype=np.bool_)
    if keep_N is None or keep_N.all():
        return _advantages(rewards_N, sizes_G if smallest else sizes_G[sizes_G > 0], eps, scale, baseline)
    if keep_N.shape != rewards_N.shape:
        raise ValueError(f"mask has {keep_N.size} entries for {rewards_N.size} rewards.")
    group_N = np.repeat(np.arange(sizes_G.size), sizes_G)
    kept_sizes_G = np.bincount(group_N[keep_N])
    kept_sizes_G = kept_sizes_G[kept_sizes_G > 0]
    advantages_N = np.zeros(rewards_N.size)
    advantages_N[keep_N] = _advantages(rewards_N[keep_N], kept_sizes_G, eps, scale, baseline)
    return advantages_N


def zero_variance_groups(
    rewards: Any, group_sizes: Sequence[int] | npt.NDArray[np.integer[Any]], mask: Any = None
) -> npt.NDArray[np.bool_]:
    """bool [G]: groups from which nothing can be learned, all rewards that take part being equal (or none)."""
    rewards_N = as_float64(rewards)
    sizes_G = np.asarray(group_sizes, dtype=np.int64)
    group_N = np.repeat(np.arange(sizes_G.size), sizes_G)
    if mask is not None:
        keep_N = np.asarray(mask, dtype=np.bool_)
        rewards_N, group_N = rewards_N[keep_N], group_N[keep_N]
    low_G = np.full(sizes_G.size, np.inf)
    high_G = np.full(sizes_G.size, -np.inf)
    np.minimum.at(low_G, group_N, rewards_N)
    np.maximum.at(high_G, group_N, rewards_N)
    return low_G >= high_G


def as_float64(values: Any) -> Float64:
    """float64 [N] from a list, array or tensor of numbers of any kind, or a list of 0-d tensors."""
    if isinstance(values, np.ndarray):
        return values.astype(np.float64, copy=False).reshape(-1)
    if hasattr(values, "detach"):  # a tensor; torch need not be imported for the other kinds
        return np.asarray(values.detach().cpu().double().numpy(), dtype=np.float64).reshape(-1)
    return np.array([float(value) for value in values], dtype=np.float64)


def _advantages(
    rewards_K: Float64, sizes: npt.NDArray[np.int64], eps: float, scale: Scale, baseline: Baseline
) -> Float64:
    """Of rewards that all take part, in groups none of which is empty."""
    if sizes.size == 0:
        return np.zeros(0)
    starts = np.add.accumulate(sizes) - sizes
    largest = float(np.maximum.reduce(np.abs(rewards_K)))
    if not math.isfinite(largest):
        raise ValueError(f"reward {int(np.argmin(np.isfinite(rewards_K)))} is not finite.")
    if largest > _SQUARABLE:
        rewards_K, eps = rewards_K * _SCALE_DOWN, eps * _SCALE_DOWN
    if baseline == "leave-one-out":
        centred_K, others_std_K = _leave_one_out(rewards_K, sizes, starts)
    else:
        mean = np.add.reduceat(rewards_K, starts) / sizes
        centred_K = rewards_K - mean.repeat(sizes)
    if scale == "none":
        advantages_K = centred_K if largest <= _SQUARABLE else centred_K / _SCALE_DOWN
    elif scale == "batch":
        advantages_K = centred_K / (float(rewards_K.std()) + eps)
    elif baseline == "leave-one-out":
        advantages_K = centred_K / np.where(others_std_K > 0, others_std_K + eps, 1.0)
    else:
        std = np.sqrt(np.add.reduceat(centred_K * centred_K, starts) / sizes)
        advantages_K = centred_K / (std + eps).repeat(sizes)
        if float(np.minimum.reduce(std)) > _ROUNDING * rewards_K.size * largest:
            return advantages_K
    # Rounding may leave a mean a hair beside a constant: equality of the rewards decides, not a small deviation.
    constant = np.minimum.reduceat(rewards_K, starts) == np.maximum.reduceat(rewards_K, starts)
    if constant.any():
        advantages_K[constant.repeat(sizes)] = 0.0
    return advantages_K


def _leave_one_out(
    rewards_K: Float64, sizes: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[Float64, Float64]:
    """Rewards minus the mean of the others, and the deviation of the others (exactly 0 where they are all equal)."""
    centred_K = np.empty_like(rewards_K)
    others_std_K = np.zeros_like(rewards_K)
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        group = rewards_K[start : start + size]
        if size == 1:
            centred_K[start] = 0.0
            continue
        # [size, size-1]: row i holds the group without sample i.
        others = np.broadcast_to(group, (size, size))[~np.eye(size, dtype=np.bool_)].reshape(size, size - 1)
        centred_K[start : start + size] = group - others.mean(axis=1)
        others_std_K[start : start + size] = np.where(np.ptp(others, axis=1) > 0, others.std(axis=1), 0.0)
    return centred_K, others_std_K
