"""The step between rollout and train: decode, score, one advantage pass, micro-batches.

Loaded on first use: a scorer process, started anew whenever one dies, must not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areno.lazy import lazy_names

if TYPE_CHECKING:
    from areno.materialize.materializer import AdvantageOptions as AdvantageOptions
    from areno.materialize.materializer import LocalMaterializer as LocalMaterializer
    from areno.materialize.materializer import MaterializedBatch as MaterializedBatch
    from areno.materialize.materializer import Materializer as Materializer
    from areno.materialize.pack import FlatPack as FlatPack
    from areno.materialize.rollout_batch import ABORTED as ABORTED
    from areno.materialize.rollout_batch import LENGTH as LENGTH
    from areno.materialize.rollout_batch import STOPPED as STOPPED
    from areno.materialize.rollout_batch import RolloutBatch as RolloutBatch
    from areno.materialize.scoring import ScoringOptions as ScoringOptions

_HOME = {
    "ABORTED": "rollout_batch",
    "LENGTH": "rollout_batch",
    "STOPPED": "rollout_batch",
    "AdvantageOptions": "materializer",
    "FlatPack": "pack",
    "LocalMaterializer": "materializer",
    "MaterializedBatch": "materializer",
    "Materializer": "materializer",
    "RolloutBatch": "rollout_batch",
    "ScoringOptions": "scoring",
}

__all__ = list(_HOME)

__getattr__ = lazy_names(__name__, _HOME)
