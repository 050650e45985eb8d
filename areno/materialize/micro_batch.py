"""Flat packs, row numbers and one float per row become the tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from areno.api.train_pack import Layout, TrainPack, TrainRow, packed_pack, padded_pack
from areno.materialize.pack import FlatPack
from areno.materialize.rollout_batch import Bool, Float64, Int64

RowPlace = tuple[int, int]
"""Which flat pack a row is in, and its position there."""


def places_of(rows: Int64, pack_offsets_K1: Int64) -> list[RowPlace]:
    """Where rows of the step's batch lie. `pack_offsets_K1` int64 [K+1]: pack k holds rows o[k]:o[k+1]."""
    packs = np.searchsorted(pack_offsets_K1, rows, side="right") - 1
    return list(zip(packs.tolist(), (rows - pack_offsets_K1[packs]).tolist(), strict=True))


def micro_batch(rows: Sequence[TrainRow], *, layout: Layout, pad_id: int) -> TrainPack:
    """The train pack of these rows; without rows, a filler of zero weight."""
    if not rows:
        # Two tokens, so that a forward pass has an action site, and none of it is a response.
        nothing = np.zeros(0, dtype=np.float32)
        rows = [TrainRow(np.full(2, pad_id, dtype=np.int32), nothing, nothing, advantage=0.0)]
    return packed_pack(rows) if layout == "packed" else padded_pack(rows, pad_id=pad_id)


def gather_rows(
    packs: Sequence[FlatPack],
    places: Iterable[RowPlace],
    advantages: Iterable[float],
    learn: Iterable[bool],
) -> list[TrainRow]:
    """Views of the rows at `places`, each with its advantage."""
    return [
        packs[pack].row(i, advantage, wanted)
        for (pack, i), advantage, wanted in zip(places, advantages, learn, strict=True)
    ]


def train_pack_of(
    packs: Sequence[FlatPack],
    pack_offsets_K1: Int64,
    rows: Int64,
    advantages_N: Float64,
    scored_N: Bool,
    *,
    layout: Layout,
    pad_id: int,
) -> TrainPack:
    """One micro-batch of a step, cut out of its flat packs. Rows that are not scored are laid out, but not learned from."""
    taken = gather_rows(packs, places_of(rows, pack_offsets_K1), advantages_N[rows].tolist(), scored_N[rows].tolist())
    return micro_batch(taken, layout=layout, pad_id=pad_id)
