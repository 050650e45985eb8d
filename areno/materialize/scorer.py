"""Scoring a shard: the interface of scorers, where outcomes are collected, and the scorer of this process.

Axes: N completions of the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from areno.materialize.hang_watch import HangWatch
from areno.materialize.records import RecordBatch
from areno.materialize.reward_call import Failure, run_hook
from areno.materialize.reward_hook import RewardHook
from areno.materialize.reward_value import Reward
from areno.materialize.rollout_batch import Float32, Float64
from areno.materialize.scoring import OnError, SampleFailure, Scores, ScoringOptions


class Scorer(Protocol):
    """Scores the records of a shard, in order."""

    def score(self, records: RecordBatch) -> Scores:
        """One reward or one named failure per record. Under `fail`, scoring ends at the first failure."""
        ...

    def close(self) -> None: ...


class ScoreBook:
    """Collects outcomes in any order. A failure is written down with its sample, and never becomes a number by itself."""

    def __init__(self, records: RecordBatch, on_error: OnError) -> None:
        self._records = records
        self._on_error = on_error
        count = len(records)
        self._rewards_N = np.zeros(count, dtype=np.float64)
        self._scored_N = np.zeros(count, dtype=np.bool_)
        self._seconds_N = np.zeros(count, dtype=np.float32)
        self._failures: dict[int, SampleFailure] = {}
        self._components: dict[str, Float64] = {}
        self.stopped = False

    def write(self, i: int, outcome: Reward | Failure, seconds: float) -> None:
        """The outcome of record i."""
        self._seconds_N[i] = seconds
        if isinstance(outcome, Reward):
            self._rewards_N[i] = outcome.value
            self._scored_N[i] = True
            for name, value in outcome.components.items():
                column = self._components.setdefault(name, np.full(len(self._records), np.nan))
                column[i] = value
            return
        self._failures[i] = SampleFailure(*self._records.place(i), outcome.cause, outcome.message, outcome.traceback)
        if self._on_error == "fail":
            self.stopped = True
        elif self._on_error != "skip":
            self._rewards_N[i] = self._on_error
            self._scored_N[i] = True

    def write_plain(self, indices: Sequence[int], rewards: Float64, seconds: Float32) -> None:
        """Rewards without parts, many at once."""
        self._rewards_N[indices] = rewards
        self._scored_N[indices] = True
        self._seconds_N[indices] = seconds

    def scores(self) -> Scores:
        failures = tuple(self._failures[i] for i in sorted(self._failures))
        return Scores(self._rewards_N, self._scored_N, self._seconds_N, failures, self._components)


class InlineScorer:
    """Calls the hook in this process, on the thread that asks: nothing stands between a hook that hangs and the run."""

    def __init__(self, hook: RewardHook, options: ScoringOptions) -> None:
        self._hook = hook
        self._options = options
        self._watch = HangWatch(hook.name)

    def score(self, records: RecordBatch) -> Scores:
        sink = _InlineSink(ScoreBook(records, self._options.on_error), records, self._watch)
        run_hook(self._hook, records, range(len(records)), sink, concurrency=self._options.concurrency)
        return sink.book.scores()

    def close(self) -> None:
        self._watch.close()


class _InlineSink:
    """Hands outcomes to the book, and tells the watch what is being worked on."""

    def __init__(self, book: ScoreBook, records: RecordBatch, watch: HangWatch) -> None:
        self.book = book
        self._records = records
        self._watch = watch

    @property
    def stopped(self) -> bool:
        return self.book.stopped

    def begin(self, i: int) -> None:
        self._watch.begin(self._records.place(i))

    def end(self, i: int, outcome: Reward | Failure, seconds: float) -> None:
        self._watch.end()
        self.book.write(i, outcome, seconds)
