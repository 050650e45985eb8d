"""Advantages: right on the cases that other tools get wrong, and equal to the plain per-group reference."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno.api import compute_batch_group_advantages, compute_group_advantages
from areno.api.advantages import zero_variance_groups

FINITE = st.floats(-1e6, 1e6, allow_nan=False)


@pytest.mark.parametrize("constant", [0.9, 0.1, 123.456, -7.7, 1e-300, 1e300, 0.0])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(constant: float, baseline: str, scale: str) -> None:
    for size in range(1, 65):
        advantages = compute_batch_group_advantages([constant] * size, [size], baseline=baseline, scale=scale)
        assert (advantages == 0.0).all()


@pytest.mark.parametrize("rewards", [[1000, 1000.1, 1000.2, 1000.3], [10000, 10001, 10002, 10003]])
def test_a_large_offset_does_not_matter(rewards: list[float]) -> None:
    np.testing.assert_allclose(compute_group_advantages(rewards), [-1.3416, -0.4472, 0.4472, 1.3416], atol=1e-3)


def test_near_equal_rewards_are_not_shrunk() -> None:
    rewards = [1.0, 1.00001, 2.0, 2.00001]
    ours = compute_batch_group_advantages(rewards, [2, 2], eps=1e-6)
    plain = reference.group_advantages(rewards[:2], 1e-6) + reference.group_advantages(rewards[2:], 1e-6)
    np.testing.assert_allclose(ours, plain, rtol=1e-3)
    assert abs(ours[0]) > 0.8


def test_leave_one_out_divides_by_the_spread_of_the_others() -> None:
    lone = compute_batch_group_advantages([0.0] + [0.95] * 7, [8], baseline="leave-one-out")
    assert lone[0] == pytest.approx(-0.95)
    groups = compute_batch_group_advantages(
        [1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1], [4, 4, 4, 4], baseline="leave-one-out"
    ).reshape(4, 4)
    assert (groups[:3] != 0).all()
    assert (groups[3] == 0).all()


def test_ragged_and_empty_groups() -> None:
    ours = compute_batch_group_advantages([1, 2, 3, 4, 5, 5, 5, 6, 7, 8, 9], [0, 4, 3, 0, 4, 0])
    ramp = [-1.34164, -0.44721, 0.44721, 1.34164]
    np.testing.assert_allclose(ours, [*ramp, 0, 0, 0, *ramp], atol=1e-4)
    assert compute_batch_group_advantages([], []).shape == (0,)
    assert compute_batch_group_advantages([], [0, 0]).shape == (0,)


def test_group_not_batch_and_identity_by_position() -> None:
    assert (compute_batch_group_advantages([0, 0, 1, 1], [2, 2]) == 0).all()
    np.testing.assert_allclose(compute_batch_group_advantages([0, 1, 10, 12], [2, 2]), [-1, 1, -1, 1], atol=1e-6)


@pytest.mark.parametrize("sizes", [[2], [2, 2], [4], [-1, 4]])
def test_sizes_that_do_not_add_up_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="group sizes add up to"):
        compute_batch_group_advantages([1, 2, 3], sizes)


def test_a_group_of_one_is_zero_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute_batch_group_advantages([1, 2, 3], [2, 1]).tolist()[2] == 0.0
        for scale, baseline in itertools.product(("group", "batch", "none"), ("mean", "leave-one-out")):
            assert compute_batch_group_advantages([3.5], [1], scale=scale, baseline=baseline).tolist() == [0.0]


def test_masked_rows_take_no_part() -> None:
    masked = compute_batch_group_advantages([1, 0, 0, -100], [4], mask=[True, True, True, False])
    np.testing.assert_array_equal(masked[:3], compute_batch_group_advantages([1, 0, 0], [3]))
    assert masked[3] == 0
    infinite = compute_batch_group_advantages([1, np.inf, 0, 2, 3], [3, 2], mask=[True, False, True, True, True])
    np.testing.assert_allclose(infinite, [1, 0, -1, -1, 1], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_rewards_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="reward 1 is not finite"):
        compute_batch_group_advantages([1, bad, 0, 2, 3], [3, 2])


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int", "bool", "numpy", "tensors", "list"])
def test_rewards_of_every_number_type(kind: str) -> None:
    values = [1, 1, 1, 1.0078125]
    rewards = {
        "bf16": torch.tensor(values, dtype=torch.bfloat16),
        "fp16": torch.tensor(values, dtype=torch.float16),
        "int": [1, 1, 1, 2],
        "bool": [False, False, False, True],
        "numpy": [np.float32(v) for v in values],
        "tensors": [torch.tensor(v, dtype=torch.bfloat16) for v in values],
        "list": values,
    }[kind]
    advantages = compute_batch_group_advantages(rewards, [4])
    assert advantages.dtype == np.float64
    np.testing.assert_allclose(advantages, [-0.57735, -0.57735, -0.57735, 1.73205], atol=1e-3)


def test_batch_scale_flags_dead_groups_by_group() -> None:
    np.testing.assert_array_equal(zero_variance_groups([1, 1, 0, 1], [2, 2]), [True, False])
    np.testing.assert_array_equal(zero_variance_groups([0.5] * 4 + [0, 1, 0, 1], [4, 4]), [True, False])
    scaled = compute_batch_group_advantages([1, 1, 0, 1], [2, 2], scale="batch")
    assert (scaled[:2] == 0).all()
    assert scaled[2] < 0 < scaled[3]


def test_huge_rewards_do_not_overflow() -> None:
    huge = compute_batch_group_advantages([1e308, -1e308, 0, 5], [3, 1])
    np.testing.assert_allclose(huge, [1.2247, -1.2247, 0, 0], atol=1e-3)
    assert np.isfinite(compute_batch_group_advantages([1e308, -1e308], [2], scale="none")).all()


@given(st.lists(st.lists(FINITE, max_size=6), max_size=6))
def test_equals_the_per_group_reference(groups: list[list[float]]) -> None:
    ours = compute_batch_group_advantages([r for g in groups for r in g], [len(g) for g in groups])
    plain = [a for g in groups for a in reference.group_advantages(g)]
    np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-6)
    one_by_one = [a for g in groups if g for a in compute_group_advantages(g)]
    assert ours.tolist() == one_by_one  # a group's result does not depend on its neighbours, to the bit


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=8), st.randoms())
def test_metamorphic(rewards: list[int], random: object) -> None:
    base = np.array(compute_group_advantages(rewards))
    np.testing.assert_allclose(compute_group_advantages([r + 1024 for r in rewards]), base, atol=1e-6)
    np.testing.assert_allclose(compute_group_advantages([r * 4 for r in rewards]), base, atol=1e-6)
    order = sorted(range(len(rewards)), key=lambda _: random.random())  # type: ignore[attr-defined]
    np.testing.assert_allclose(compute_group_advantages([rewards[i] for i in order]), base[order], atol=1e-9)
    assert abs(base.sum()) < 1e-5
