"""The public contracts, under the names that AReno users import. Loaded on first use: torch comes only with what needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areno.lazy import lazy_names

if TYPE_CHECKING:
    from areno.api.advantages import compute_batch_group_advantages as compute_batch_group_advantages
    from areno.api.data import PromptBatch as PromptBatch
    from areno.api.data import PromptItem as PromptItem
    from areno.api.loss_fns import grpo_loss_fn as grpo_loss_fn
    from areno.api.loss_fns import gspo_loss_fn as gspo_loss_fn
    from areno.api.models import RolloutResult as RolloutResult
    from areno.api.models import RolloutSequence as RolloutSequence
    from areno.api.models import SamplingParams as SamplingParams
    from areno.api.models import TrainSequence as TrainSequence
    from areno.api.rewards import RewardRecord as RewardRecord
    from areno.api.rewards import compute_group_advantages as compute_group_advantages
    from areno.api.train_pack import make_train_pack as make_train_pack

_HOME = {
    "PromptBatch": "data",
    "PromptItem": "data",
    "RewardRecord": "rewards",
    "RolloutResult": "models",
    "RolloutSequence": "models",
    "SamplingParams": "models",
    "TrainSequence": "models",
    "compute_batch_group_advantages": "advantages",
    "compute_group_advantages": "rewards",
    "grpo_loss_fn": "loss_fns",
    "gspo_loss_fn": "loss_fns",
    "make_train_pack": "train_pack",
}

__all__ = list(_HOME)

__getattr__ = lazy_names(__name__, _HOME)
