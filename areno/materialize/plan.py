"""Decisions from lengths alone: how groups are cut into shards, and which rows go to which train worker in which
micro-batch. Pure functions; nothing here has seen a token.

Axes: G groups, N rows of the step, R rows of one optimizer step, W train workers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areno.materialize.rollout_batch import Float64, Int64

Rows = Int64
"""int64 [n]: positions of rows in the step's batch, in prompt order."""

# A row of L tokens costs about L + QUADRATIC * L^2 of a layer's linear work: attention does 2hL^2 operations beside
# the 24h^2 L of the projections, and h = 1024 stands for the hidden sizes of 0.5B to 8B models.
QUADRATIC = 1 / (12 * 1024)


@dataclass(frozen=True)
class OptimizerWindow:
    """Everything between two optimizer steps.

    micro_batches[w][m] are the rows of worker w's micro-batch m. Every worker has the same number of micro-batches; an
    empty one is a filler of zero weight. `tokens`, `sequences` and `packs` count all workers: trainable tokens, rows,
    and micro-batches that are not fillers.
    """

    micro_batches: tuple[tuple[Rows, ...], ...]
    tokens: int
    sequences: int
    packs: int


@dataclass(frozen=True)
class DispatchPlan:
    """The optimizer steps of one training step, in order. No windows means that there is nothing to learn from."""

    windows: tuple[OptimizerWindow, ...]

    @property
    def num_rows(self) -> int:
        return sum(window.sequences for window in self.windows)


def plan_dispatch(
    row_lens_N: Int64,
    trainable_N: Int64,
    *,
    world_size: int,
    mini_bs: int | None = None,
    max_tokens: int | None = None,
    accumulation: int | None = None,
) -> DispatchPlan:
    """Give every row with a trainable token to one worker and one micro-batch, exactly once.

    Args:
        row_lens_N: prompt and response tokens of each row.
        trainable_N: tokens of each row that the loss learns from; rows with none are left out.
        world_size: number of train workers; their rows are balanced by cost, their numbers of rows differ by at most 1.
        mini_bs: rows per micro-batch.
        max_tokens: tokens per micro-batch instead; a longer row stands alone.
        accumulation: micro-batches per optimizer step and worker (with `mini_bs`); None takes all.

    Raises:
        ValueError: not exactly one of mini_bs and max_tokens, or accumulation without mini_bs.
    """
    if (mini_bs is None) == (max_tokens is None):
        raise ValueError("give exactly one of mini_bs and max_tokens.")
    if accumulation is not None and mini_bs is None:
        raise ValueError("accumulation counts micro-batches of mini_bs rows: give mini_bs.")
    rows = np.flatnonzero(trainable_N > 0)
    per_window = rows.size if accumulation is None or mini_bs is None else mini_bs * accumulation * world_size
    windows = []
    for start in range(0, rows.size, max(per_window, 1)):
        window_rows = rows[start : start + per_window]
        shares = balance(row_cost(row_lens_N[window_rows]), world_size)
        batches = [split(window_rows[share], row_lens_N, mini_bs=mini_bs, max_tokens=max_tokens) for share in shares]
        count = max(len(b) for b in batches)
        filler = np.zeros(0, dtype=np.int64)
        windows.append(
            OptimizerWindow(
                micro_batches=tuple((*b, *[filler] * (count - len(b))) for b in batches),
                tokens=int(trainable_N[window_rows].sum()),
                sequences=window_rows.size,
                packs=sum(len(b) for b in batches),
            )
        )
    return DispatchPlan(tuple(windows))


def row_cost(row_lens_R: Int64) -> Float64:
    """float64 [R]: relative cost of a forward and backward pass over each row."""
    lens_R = row_lens_R.astype(np.float64)
    return lens_R + QUADRATIC * lens_R * lens_R


def balance(costs_R: Float64, world_size: int) -> tuple[Rows, ...]:
    """Share rows out so that costs are even and numbers of rows differ by at most 1.

    Balanced largest differencing (Michiels, Korst, Aarts 2003): sorted rows are cut into runs of `world_size`, each run
    spread over the workers, and partial solutions merged, the two most uneven first, large shares with small ones.

    Returns:
        Per worker the positions in `costs_R`, ascending.
    """
    if world_size == 1:
        return (np.arange(costs_R.size),)
    order = np.argsort(-costs_R, kind="stable").tolist()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for tie, start in enumerate(range(0, len(order), world_size)):
        run = order[start : start + world_size]
        shares = [(float(costs_R[i]), [i]) for i in run] + [(0.0, []) for _ in range(world_size - len(run))]
        heap.append((shares[-1][0] - shares[0][0], tie, shares))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, m + n) for (a, m), (b, n) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
    shares = heap[0][2] if heap else [(0.0, []) for _ in range(world_size)]
    return tuple(np.array(sorted(share), dtype=np.int64) for _, share in shares)


def split(rows: Rows, row_lens_N: Int64, *, mini_bs: int | None, max_tokens: int | None) -> list[Rows]:
    """Cut one worker's rows into micro-batches: runs of `mini_bs`, or first-fit decreasing under `max_tokens`."""
    if mini_bs is not None:
        return [rows[i : i + mini_bs] for i in range(0, rows.size, mini_bs)]
    assert max_tokens is not None
    bins: list[tuple[int, list[int]]] = []
    for row in rows[np.argsort(-row_lens_N[rows], kind="stable")].tolist():
        length = int(row_lens_N[row])
        for i, (used, members) in enumerate(bins):
            if used + length <= max_tokens:
                bins[i] = (used + length, [*members, row])
                break
        else:
            bins.append((length, [row]))
    return [np.array(sorted(members), dtype=np.int64) for _, members in bins]


def plan_shards(weights_G: Int64 | Float64 | Sequence[float], num_shards: int) -> list[tuple[int, int]]:
    """Cut groups into at most `num_shards` runs (start, stop) of about the same weight (tokens, or seconds), none of them
    empty.

    A group that weighs nothing counts as the lightest of the others, so that reward calls on empty completions are spread
    too.
    """
    weights_G = np.asarray(weights_G, dtype=np.float64)
    if num_shards == 1 or weights_G.size == 0:
        return [(0, weights_G.size)] if weights_G.size else []
    lightest = np.min(weights_G, where=weights_G > 0, initial=np.inf)
    ends_G = np.cumsum(np.maximum(weights_G, lightest if np.isfinite(lightest) else 1.0))
    # Where each shard should end: the group boundary nearest to an even share of the whole.
    targets = ends_G[-1] * np.arange(1, num_shards) / num_shards
    right = np.searchsorted(ends_G, targets)
    before = np.where(right > 0, ends_G[np.maximum(right - 1, 0)], 0)
    cuts = np.where(targets - before < ends_G[right] - targets, right, right + 1)
    edges = np.unique(np.concatenate([[0], cuts, [weights_G.size]])).tolist()
    return list(itertools.pairwise(edges))
