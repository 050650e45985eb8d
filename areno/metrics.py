"""What a step reports: its numbers, and completions to show."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepMetrics:
    """One step in numbers. The field names are the keys of metrics.jsonl and of TensorBoard, and do not change.

    Rewards, advantages, lengths and the rollout logprob are over the completions of the step (those that failed to be
    scored take no part in rewards); loss and what follows come from the learner; times are in seconds, memory in GiB.
    `extra` adds keys that only some runs have.
    """

    step: int
    epoch: int
    reward_mean: float
    reward_std: float
    advantage_abs_mean: float
    zero_variance_groups: int
    response_len_mean: float
    truncated_fraction: float
    rollout_logprob_mean: float
    loss: float
    policy_loss: float
    ratio_mean: float
    ratio_std: float
    logp_diff_mean: float
    logp_abs_diff_mean: float
    grad_norm: float
    lr: float
    step_e2e_time_s: float
    step_rollout_time_s: float
    step_train_time_s: float
    step_materialize_time_s: float
    decode_s: float
    score_s: float
    pack_s: float  # checks, sums and lengths: tokens are only laid out in training
    advantage_s: float
    rollout_train_gap_s: float
    tokens_per_s: float
    peak_mem_gb: float
    extra: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, float]:
        """Every key with its number, `extra` included."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        return own | dict(self.extra)


@dataclass(frozen=True)
class CompletionSample:
    """One completion as it is shown to people. `reward` is None where scoring failed and the row was left out."""

    step: int
    prompt_index: int
    sample_index: int
    reward: float | None
    advantage: float
    text: str
