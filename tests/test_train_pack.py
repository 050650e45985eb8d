"""make_train_pack: rows built by hand, of any array kind, in both layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from test_losses import batches

from areno.api import TrainSequence, make_train_pack
from areno.api.sites import predicted_positions, trainable_sites


@given(batches())
def test_equals_the_reference(sequences: list[TrainSequence]) -> None:
    reference.equal_packs(make_train_pack(sequences, "padded"), reference.padded(sequences, with_loss_mask=True))
    reference.equal_packs(make_train_pack(sequences, "packed"), reference.packed(sequences))


@given(batches())
def test_lists_arrays_and_tensors_are_the_same(sequences: list[TrainSequence]) -> None:
    fields = ("prompt_mask", "loss_mask", "tokens", "logprobs", "advantages")
    arrays = [replace(s, **{f: np.array(getattr(s, f)) for f in fields}) for s in sequences]
    tensors = [replace(s, **{f: torch.tensor(getattr(s, f)) for f in fields}) for s in sequences]
    for layout in ("padded", "packed"):
        reference.equal_packs(make_train_pack(arrays, layout), make_train_pack(sequences, layout))
        single = make_train_pack(tensors, layout)
        for key, value in make_train_pack(sequences, layout).items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(single[key], value)


def test_without_a_loss_mask_there_is_no_such_key() -> None:
    seq = TrainSequence([True, False, False], [], [5, 6, 2], [0, -1, -2], [0, 1, 1], eos_token_id=2)
    pack = make_train_pack([seq])
    assert "loss_mask" not in pack
    assert trainable_sites(pack).tolist() == [[True, True]]


def test_pad_id_equal_to_end_id_loses_no_token() -> None:
    # Ids 2 in the middle and at the end are trained on; the padding, also 2, is not.
    rows = [
        TrainSequence([True, *[False] * 3], [], [9, 5, 6, 2], [0.0, -1, -1, -1], [0, 1, 1, 1], eos_token_id=2),
        TrainSequence([True, *[False] * 5], [], [9, 5, 2, 6, 7, 2], [0.0, *[-1] * 5], [0, *[1] * 5], eos_token_id=2),
    ]
    assert trainable_sites(make_train_pack(rows, "padded")).sum(dim=1).tolist() == [3, 5]
    assert int(trainable_sites(make_train_pack(rows, "packed")).sum()) == 8


def test_each_logprob_stands_beside_its_own_token() -> None:
    rows = []
    for start, n in ((10, 4), (20, 5), (30, 6)):
        ids = list(range(start, start + n))
        rows.append(TrainSequence([True] + [False] * (n - 1), [], ids, [-i / 1000 for i in ids], [1.0] * n))
    pack = make_train_pack(rows, "packed")
    targets = pack["input_ids"][0][predicted_positions(pack["train_cu_seqlens"])]
    assert targets.numel() == 12
    torch.testing.assert_close(pack["packed_logprobs"], -targets / 1000)


def test_interleaved_tool_output() -> None:
    mask = [False, False, True, True, False, False, True, True]
    seq = TrainSequence([False] * 8, mask, list(range(8)), [-float(i) for i in range(8)], [1.0] * 8)
    for layout in ("packed", "padded"):
        pack = make_train_pack([seq], layout)
        assert trainable_sites(pack).reshape(-1).tolist() == mask[1:]
    assert make_train_pack([seq], "packed")["packed_logprobs"].tolist() == [-float(i) for i in range(1, 8)]


@pytest.mark.parametrize("field", ["prompt_mask", "loss_mask", "logprobs", "advantages"])
def test_a_wrong_length_is_named(field: str) -> None:
    good = TrainSequence([True, False], [False, True], [1, 2], [0.0, -1.0], [0.0, 1.0])
    bad = replace(good, **{field: [0, 1, 1]})
    with pytest.raises(ValueError, match=rf"row 1: {field} has 3 entries for 2 tokens"):
        make_train_pack([good, bad])


def test_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        make_train_pack([])
