"""How rewards are asked for, and what comes back for a shard.

Axes: N completions of the shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from areno.materialize.rollout_batch import Bool, Float32, Float64

OnError = Literal["fail", "skip"] | float


@dataclass(frozen=True)
class ScoringOptions:
    """How rewards are called for.

    on_error     what a sample whose reward failed gets: `fail` refuses the step, `skip` leaves the row out of baseline
                 and loss, a number is its reward
    timeout_s    longest call, in seconds
    memory_gb    memory that a scorer may take beyond what it starts with, in GiB
    isolate      score in a process of its own; None does so where timeout_s or memory_gb is set
    retries      how often a sample that killed its scorer is tried again
    concurrency  calls of an async hook that run at a time
    """

    on_error: OnError = "fail"
    timeout_s: float | None = None
    memory_gb: float | None = None
    isolate: bool | None = None
    retries: int = 1
    concurrency: int = 16

    @property
    def isolated(self) -> bool:
        threatened = self.timeout_s is not None or self.memory_gb is not None
        return threatened if self.isolate is None else self.isolate or threatened


@dataclass(frozen=True)
class SampleFailure:
    """Why one sample has no reward of its own. Indices are positions in the step's batch.

    cause: exception, timeout, killed, memory, none, non_finite or bad_type.
    """

    prompt_index: int
    sample_index: int
    cause: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Scores:
    """Rewards of a shard.

    rewards_N   float64 [N]  0.0 where not scored
    scored_N    bool [N]     False: left out of baseline and loss
    seconds_N   float32 [N]  how long each call took
    components  name -> float64 [N], NaN where a reward came without that part
    """

    rewards_N: Float64
    scored_N: Bool
    seconds_N: Float32
    failures: tuple[SampleFailure, ...]
    components: Mapping[str, Float64] = field(default_factory=dict)
