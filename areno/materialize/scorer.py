"""Scoring a shard in this process: one call of the reward function per completion, in order.

Axes: N completions of the shard.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from areno.api.rewards import RewardRecord
from areno.materialize.reward_hook import BadRewardError, RewardHook, as_reward, describe, line_in_file
from areno.materialize.rollout_batch import Bool, Float32, Float64

OnError = Literal["fail", "skip"] | float


@dataclass(frozen=True)
class SampleFailure:
    """Why one sample has no reward of its own. Indices are positions in the step's batch."""

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
    """

    rewards_N: Float64
    scored_N: Bool
    seconds_N: Float32
    failures: tuple[SampleFailure, ...]


def score_records(hook: RewardHook, records: Iterable[RewardRecord], count: int, on_error: OnError) -> Scores:
    """Call the hook on each record. A failure is written down with its sample, and never becomes a number by itself.

    Under `fail` scoring ends at the first failure: the step will be refused.
    """
    rewards_N = np.zeros(count, dtype=np.float64)
    scored_N = np.zeros(count, dtype=np.bool_)
    seconds_N = np.zeros(count, dtype=np.float32)
    failures: list[SampleFailure] = []
    clock = time.perf_counter
    for i, record in enumerate(records):
        began = clock()
        outcome = score_one(hook, record)
        seconds_N[i] = clock() - began
        if isinstance(outcome, float):
            rewards_N[i] = outcome
            scored_N[i] = True
            continue
        failures.append(outcome)
        if on_error == "fail":
            break
        if on_error != "skip":
            rewards_N[i] = on_error
            scored_N[i] = True
    return Scores(rewards_N, scored_N, seconds_N, tuple(failures))


def score_one(hook: RewardHook, record: RewardRecord) -> float | SampleFailure:
    """One reward, or what went wrong. Only the user interrupting the run passes through."""
    prompt_index, sample_index = record.metadata["prompt_index"], record.metadata["sample_index"]
    try:
        return as_reward(hook.fn(record))
    except BadRewardError as error:
        return SampleFailure(prompt_index, sample_index, error.cause, f"{hook.name}: reward_fn {error}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit: a hook that calls sys.exit() must not end the run
        where = line_in_file(error, hook.name)
        text = "".join(traceback.format_exception(error))
        return SampleFailure(prompt_index, sample_index, "exception", f"{where}: {describe(error)}", text)
