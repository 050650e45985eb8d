"""The step between rollout and train: decode, score, pack, one advantage pass."""

from __future__ import annotations

from areno.materialize.materializer import LocalMaterializer, MaterializedBatch, Materializer
from areno.materialize.pack import FlatPack
from areno.materialize.rollout_batch import ABORTED, LENGTH, STOPPED, RolloutBatch

__all__ = [
    "ABORTED",
    "LENGTH",
    "STOPPED",
    "FlatPack",
    "LocalMaterializer",
    "MaterializedBatch",
    "Materializer",
    "RolloutBatch",
]
