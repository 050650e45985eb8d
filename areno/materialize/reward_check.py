"""Trying a reward function on real rows: what it returns, how long it takes, what it fails on, whether it repeats itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from areno.api.data import PromptItem
from areno.materialize.records import RecordBatch
from areno.materialize.rollout_batch import RolloutBatch
from areno.materialize.scoring import ScoringOptions
from areno.materialize.shard import Reward, make_scorer


@dataclass(frozen=True)
class Case:
    """A completion to score, and the data set row that it answers (counted from 0)."""

    row: int
    item: PromptItem
    completion: str


@dataclass(frozen=True)
class Verdict:
    """What the reward function made of a case. `reward` is None where it failed; `repeats` are the other tries' rewards."""

    row: int
    completion: str
    reward: float | None
    parts: dict[str, float]
    seconds: float
    cause: str
    fault: str
    repeats: tuple[float | None, ...]

    @property
    def repeatable(self) -> bool:
        """Whether every try gave the same."""
        return all(other == self.reward for other in self.repeats)


def made_up(row: int, item: PromptItem) -> list[Case]:
    """Completions for a row that has none: each solution, an answer that is wrong, and nothing at all."""
    texts = [*(item.solutions or []), "I do not know.", ""]
    return [Case(row, item, text) for text in dict.fromkeys(texts)]


def check_reward(
    reward: Reward, cases: Sequence[Case], options: ScoringOptions, *, repeat: int, repeat_cases: int
) -> list[Verdict]:
    """Score every case once, and the first `repeat_cases` of them `repeat` times, as training would.

    Raises:
        UsageError: the reward file cannot be used.
    """
    scorer = make_scorer(reward, options)
    try:
        tries = [scorer.score(_records(cases))]
        tries += [scorer.score(_records(cases[:repeat_cases])) for _ in range(repeat - 1)]
    finally:
        scorer.close()
    first = tries[0]
    failures = {failure.prompt_index: failure for failure in first.failures}
    verdicts = []
    for i, case in enumerate(cases):
        rewards = [float(t.rewards_N[i]) if t.scored_N[i] else None for t in tries if i < t.rewards_N.size]
        failure = failures.get(i)
        parts = {k: float(column[i]) for k, column in first.components.items() if not np.isnan(column[i])}
        verdicts.append(
            Verdict(
                row=case.row,
                completion=case.completion,
                reward=rewards[0],
                parts=parts,
                seconds=float(first.seconds_N[i]),
                cause="" if failure is None else failure.cause,
                fault="" if failure is None else failure.message,
                repeats=tuple(rewards[1:]),
            )
        )
    return verdicts


def _records(cases: Iterable[Case]) -> RecordBatch:
    """One group of one completion per case. Without a model there are no sampled ids: bytes stand in for them."""
    cases = list(cases)
    responses = [list(case.completion.encode("utf-8", "surrogateescape")) for case in cases]
    rollout = RolloutBatch.from_rows(
        [case.item.input_tokens for case in cases],
        [[ids] for ids in responses],
        [[[-1.0] * len(ids)] for ids in responses],
    )
    return RecordBatch(rollout, [case.item for case in cases], [case.completion for case in cases], first_group=0)
