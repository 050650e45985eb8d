"""RolloutBatch: refuses what breaks its contract, and cuts and joins without changing a bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import rollouts

from areno.materialize.rollout_batch import LENGTH, STOPPED, RolloutBatch


def small() -> RolloutBatch:
    return RolloutBatch.from_rows(
        [[1, 2], [3]], [[[4, 5], []], [[6]]], [[[-1.0, -2.0], []], [[-3.0]]], finish=[[0, 1], [0]]
    )


def same(a: RolloutBatch, b: RolloutBatch) -> None:
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype, name
            np.testing.assert_array_equal(value, other, err_msg=name)
        else:
            assert value == other, name


def test_layout() -> None:
    batch = small()
    assert batch.prompt_tokens_P.tolist() == [1, 2, 3]
    assert batch.group_offsets_G1.tolist() == [0, 2, 3]
    assert batch.response_offsets_N1.tolist() == [0, 2, 2, 3]
    assert batch.finish_N.tolist() == [STOPPED, LENGTH, STOPPED]
    assert batch.group_of_row_N.tolist() == [0, 0, 1]
    assert batch.response_tokens_T.dtype == np.int32
    assert batch.loss_mask_T is None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("prompt_tokens_P", np.array([1, 2, 3]), "prompt_tokens_P must be a one-dimensional numpy array of int32"),
        ("response_tokens_T", [4, 5, 6], "got list"),
        ("response_tokens_T", np.array([4, -5, 6], dtype=np.int32), "negative token id at position 1"),
        ("response_tokens_T", np.zeros((3, 1), dtype=np.int32), "one-dimensional"),
        ("response_logprobs_T", np.zeros(2, dtype=np.float32), "2 entries for 3 response tokens"),
        ("response_logprobs_T", np.zeros(6, dtype=np.float32)[::2], "C-contiguous"),
        ("response_offsets_N1", np.array([0, 2, 1, 3]), "must not decrease; it does after entry 1"),
        ("response_offsets_N1", np.array([0, 2, 2, 4]), "start at 0 and end at 3"),
        ("group_offsets_G1", np.array([0, 2]), "end at 3"),
        ("prompt_offsets_G1", np.array([0, 3]), "1 prompts but 2 groups"),
        ("finish_N", np.zeros(2, dtype=np.uint8), "2 entries for 3 completions"),
        ("loss_mask_T", np.ones(4, dtype=bool), "loss_mask_T has 4 entries for 3 response tokens"),
    ],
)
def test_a_broken_array_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(small(), **{field: value})


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"prompts": [[1]], "responses": [], "logprobs": []}, "1 prompts, 0 groups"),
        ({"prompts": [[1]], "responses": [[[1]]], "logprobs": [[]]}, "group 0 has 1 responses but 0 rows of logprobs"),
        (
            {"prompts": [[1]], "responses": [[[1, 2]]], "logprobs": [[[-1.0]]]},
            "group 0, sample 0: 2 tokens but 1 entries",
        ),
        ({"prompts": [[1]], "responses": [[[1.5]]], "logprobs": [[[-1.0]]]}, "integer token ids"),
        ({"prompts": [[1]], "responses": [[[2**31]]], "logprobs": [[[-1.0]]]}, "does not fit"),
        (
            {"prompts": [[1]], "responses": [[[1]]], "logprobs": [[[-1.0]]], "finish": [[]]},
            "finish must have one entry",
        ),
        (
            {"prompts": [[1]], "responses": [[[1]]], "logprobs": [[[-1.0]]], "loss_masks": [[[True, False]]]},
            "group 0, sample 0: 1 tokens but 2 entries in loss_masks",
        ),
    ],
)
def test_broken_rows_are_named(rows: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RolloutBatch.from_rows(**rows)


@given(rollouts(), st.data())
def test_cut_and_joined_is_the_same(batch: RolloutBatch, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, batch.num_groups), max_size=3)))
    edges = [0, *cuts, batch.num_groups]
    parts = [batch.groups(a, b) for a, b in itertools.pairwise(edges)]
    same(RolloutBatch.concatenate(parts), batch)


def test_a_cut_is_a_view() -> None:
    batch = small()
    part = batch.groups(1, 2)
    assert np.shares_memory(part.response_tokens_T, batch.response_tokens_T)
    assert part.nbytes < batch.nbytes
