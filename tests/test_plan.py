"""Plans: every row once, the same number of micro-batches everywhere, even costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno.materialize.plan import DispatchPlan, balance, plan_dispatch, plan_shards, row_cost, split

LENS = st.lists(st.integers(0, 3000), max_size=60)


def plan(lens: list[int], **options: Any) -> DispatchPlan:
    lens_N = np.array(lens, dtype=np.int64)
    return plan_dispatch(lens_N, lens_N, **options)


def rows_of(p: DispatchPlan) -> list[int]:
    return sorted(int(r) for w in p.windows for worker in w.micro_batches for batch in worker for r in batch)


@given(LENS, st.integers(1, 8), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 3)))
def test_every_trainable_row_exactly_once(lens: list[int], world: int, mini_bs: int, accumulation: int | None) -> None:
    p = plan(lens, world_size=world, mini_bs=mini_bs, accumulation=accumulation)
    assert rows_of(p) == [i for i, n in enumerate(lens) if n > 0]
    for window in p.windows:
        assert len(window.micro_batches) == world
        assert len({len(worker) for worker in window.micro_batches}) == 1
        sizes = [sum(batch.size for batch in worker) for worker in window.micro_batches]
        assert max(sizes) - min(sizes) <= 1
        assert all(batch.size <= mini_bs for worker in window.micro_batches for batch in worker)
        assert window.sequences == sum(sizes)
        assert window.packs == sum(batch.size > 0 for worker in window.micro_batches for batch in worker)
    assert sum(w.tokens for w in p.windows) == sum(lens)


@given(LENS, st.integers(1, 8), st.integers(1, 4000))
def test_token_budget(lens: list[int], world: int, budget: int) -> None:
    p = plan(lens, world_size=world, max_tokens=budget)
    assert rows_of(p) == [i for i, n in enumerate(lens) if n > 0]
    for window in p.windows:
        assert len({len(worker) for worker in window.micro_batches}) == 1
        for worker in window.micro_batches:
            for batch in worker:
                assert batch.size <= 1 or sum(lens[r] for r in batch) <= budget


@pytest.mark.parametrize(("rows", "world"), [(30, 4), (2, 4), (512, 6), (5, 4), (3, 4), (20, 4), (13, 4)])
def test_any_number_of_rows_on_any_number_of_workers(rows: int, world: int) -> None:
    lens = np.random.default_rng(rows).integers(1, 500, rows).tolist()
    p = plan(lens, world_size=world, mini_bs=2)
    assert rows_of(p) == list(range(rows))


def test_same_number_of_packs_over_many_seeds() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        lens = rng.integers(1, 4000, int(rng.integers(1, 40))).tolist()
        for world in range(2, 9):
            (window,) = plan(lens, world_size=world, max_tokens=4000).windows
            assert len({len(worker) for worker in window.micro_batches}) == 1


def test_long_answers_of_one_group_are_spread() -> None:
    lens = np.array([4000] * 8 + [100] * 24)
    shares = balance(row_cost(lens), 4)
    tokens = [int(lens[share].sum()) for share in shares]
    assert max(tokens) / np.mean(tokens) <= 1.05


@given(st.lists(st.integers(1, 8000), min_size=8, max_size=80), st.integers(2, 8))
def test_balance_is_close_to_the_best_possible(lens: list[int], world: int) -> None:
    costs = row_cost(np.array(lens, dtype=np.int64))
    shares = balance(costs, world)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lens)))
    loads = [costs[share].sum() for share in shares]
    # No partition beats the mean or the largest row; with equal counts the spread stays within one row.
    assert max(loads) <= costs.sum() / world + costs.max()


def test_the_budget_is_never_exceeded_by_packing_two() -> None:
    packs = split(np.arange(8), np.full(8, 7), mini_bs=None, max_tokens=8)
    assert [p.tolist() for p in packs] == [[i] for i in range(8)]
    assert [p.tolist() for p in split(np.arange(2), np.array([9, 3]), mini_bs=None, max_tokens=8)] == [[0], [1]]


def test_last_pack_may_be_short() -> None:
    packs = split(np.arange(249), np.ones(249, dtype=np.int64), mini_bs=2, max_tokens=None)
    assert len(packs) == 125
    assert packs[-1].size == 1


def test_uneven_bins_are_filled_up_with_fillers() -> None:
    lens = [1000] * 8 + [10] * 2
    (window,) = plan(lens, world_size=2, max_tokens=1000).windows
    counts = [[b.size for b in worker] for worker in window.micro_batches]
    assert len(counts[0]) == len(counts[1])
    assert window.packs == sum(size > 0 for worker in counts for size in worker)


def test_rows_without_a_trainable_token_are_left_out() -> None:
    p = plan_dispatch(np.array([9, 9, 9]), np.array([4, 0, 2]), world_size=1, mini_bs=8)
    assert rows_of(p) == [0, 2]
    assert plan_dispatch(np.array([9]), np.array([0]), world_size=2, mini_bs=8).windows == ()


def test_accumulation_makes_windows() -> None:
    p = plan([5] * 16, world_size=2, mini_bs=2, accumulation=2)
    assert [w.sequences for w in p.windows] == [8, 8]


@pytest.mark.parametrize("options", [{}, {"mini_bs": 1, "max_tokens": 9}, {"max_tokens": 9, "accumulation": 1}])
def test_contradictory_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="mini_bs"):
        plan([1], world_size=1, **options)


@given(st.lists(st.integers(0, 500), max_size=30), st.integers(1, 12))
def test_shards_are_runs_of_whole_groups(tokens: list[int], count: int) -> None:
    shards = plan_shards(tokens, count)
    assert [g for a, b in shards for g in range(a, b)] == list(range(len(tokens)))
    assert all(a < b for a, b in shards)
    assert len(shards) <= count


def test_shards_are_even() -> None:
    assert plan_shards([10] * 8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert plan_shards([1000, 1, 1, 1], 2) == [(0, 1), (1, 4)]
