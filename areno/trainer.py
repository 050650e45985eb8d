"""The training loop: sample, materialize, learn, record, save."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areno.api.data import PromptBatch
from areno.config import RunConfig
from areno.errors import RewardError, RunError
from areno.executor import Executor, TrainReport
from areno.materialize.materializer import MaterializedBatch
from areno.metrics import CompletionSample, StepMetrics
from areno.step_metrics import (
    StepTimes,
    completion_samples,
    gap_seconds,
    reward_report,
    slow_rewards,
    step_metrics,
)

# So many steps in a row without a single reward end the run: the reward function is broken, not a sample.
MAX_UNSCORED_STEPS = 3

# So many single samples are named per step; the others are counted.
MAX_LINES = 5


class PromptStream(Protocol):
    """Where prompts come from; see `areno.data.PromptSource`."""

    @property
    def steps_per_epoch(self) -> int: ...

    def batches(self, epoch: int) -> Iterator[PromptBatch]: ...


class StepLog(Protocol):
    """Where the record of a run goes; see `areno.run_log.RunLog`."""

    def log_step(self, metrics: StepMetrics, samples: list[CompletionSample]) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class RunSummary:
    """What a run came to."""

    steps: int
    last_checkpoint: Path | None


def train(config: RunConfig, source: PromptStream, executor: Executor, log: StepLog) -> RunSummary:
    """Run the configured steps. Steps are numbered from 1, epochs from 0.

    Raises:
        RunError: a fault in a step; metrics and checkpoints up to the step before are whole.
    """
    saver = CheckpointSaver(config, executor, total_steps(config, source))
    guard = RewardGuard(config.materialize.max_failed_fraction)
    if config.basic.n_samples == 1:
        log.note("--n-samples 1: every advantage is 0 with one completion per prompt, so nothing is learned; raise it.")
    step = 0
    for step, prompts in steps(config, source):
        with naming_step(step):
            outcome = run_step(config, executor, guard, step, prompts)
        log.log_step(outcome.metrics, outcome.samples)
        for note in outcome.notes:
            log.note(note)
        saver.after(step)
    return RunSummary(step, saver.last)


@dataclass(frozen=True)
class StepOutcome:
    """What is left of a step when its tokens are gone."""

    metrics: StepMetrics
    samples: list[CompletionSample]
    notes: list[str]


def run_step(config: RunConfig, executor: Executor, guard: RewardGuard, step: int, prompts: PromptBatch) -> StepOutcome:
    """Sample, materialize, learn. The batch is let go of on return: its packs must not lie beside those of the next step.

    Raises:
        RunError: a fault in the step, or its rewards failed too often.
    """
    began = time.monotonic()
    rollout = executor.rollout(prompts, step)
    batch = executor.materialize(rollout)
    materialized = time.monotonic()
    guard.check(batch)
    report = executor.train(batch)
    ended = time.monotonic()
    times = StepTimes(
        end_to_end_s=ended - began,
        rollout_s=rollout.seconds,
        materialize_s=materialized - began - rollout.seconds,
        train_s=ended - materialized,
        gap_s=gap_seconds(rollout.finished_at, report.first_forward_at),
    )
    return StepOutcome(
        metrics=step_metrics(step, prompts.epoch, batch, report, times),
        samples=completion_samples(step, batch),
        notes=list(notes(config, step, batch, report)),
    )


def total_steps(config: RunConfig, source: PromptStream) -> int:
    """How many steps the run will take."""
    available = source.steps_per_epoch * config.basic.epochs
    return available if config.basic.max_steps is None else min(available, config.basic.max_steps)


def steps(config: RunConfig, source: PromptStream) -> Iterator[tuple[int, PromptBatch]]:
    """Every step's number and prompts, epoch after epoch."""
    last = total_steps(config, source)
    step = 0
    for epoch in range(config.basic.epochs):
        for prompts in source.batches(epoch):
            if step == last:
                return
            step += 1
            yield step, prompts


@contextmanager
def naming_step(step: int) -> Iterator[None]:
    """Put the step's number in front of a fault's message."""
    try:
        yield
    except RunError as error:
        raise type(error)(f"step {step}: {error}", error.details) from error


def notes(config: RunConfig, step: int, batch: MaterializedBatch, report: TrainReport) -> Iterator[str]:
    """What the person at the terminal should know of a step beside its numbers."""
    if step == 1:
        yield reward_report(batch)
    yield from at_most(
        MAX_LINES,
        [f"step {step}, prompt {f.prompt_index}, sample {f.sample_index}: {f.message}" for f in batch.failures],
        f"step {step}: {{}} more rewards failed.",
    )
    threshold_s = config.materialize.reward_slow_threshold_s
    slow = [] if threshold_s is None else slow_rewards(batch, threshold_s)
    hook = config.basic.reward_fn_path
    yield from at_most(
        MAX_LINES,
        [f"step {step}: {hook} took {seconds:.2f} s on prompt {g}, sample {i}." for g, i, seconds in slow],
        f"step {step}: {{}} more reward calls were slow.",
    )
    if report.optimizer_steps == 0:
        yield f"step {step}: no completion has both a reward and a token to learn from; the weights are unchanged."


def at_most(limit: int, lines: list[str], rest: str) -> Iterator[str]:
    """The first lines, and how many there are beside them."""
    yield from lines[:limit]
    if len(lines) > limit:
        yield rest.format(len(lines) - limit)


class RewardGuard:
    """Stops a run whose reward function fails too often to learn from."""

    def __init__(self, max_failed_fraction: float) -> None:
        self._max_failed_fraction = max_failed_fraction
        self._unscored_in_a_row = 0

    def check(self, batch: MaterializedBatch) -> None:
        """
        Raises:
            RewardError: too large a share of this step's rewards failed, or all of the last MAX_UNSCORED_STEPS steps'.
        """
        if not batch.failures:
            self._unscored_in_a_row = 0
            return
        failed = len(batch.failures) / batch.num_rows
        self._unscored_in_a_row = self._unscored_in_a_row + 1 if failed == 1.0 else 0
        first = batch.failures[0]
        where = f"prompt {first.prompt_index}, sample {first.sample_index}: {first.message}"
        if failed > self._max_failed_fraction:
            raise RewardError(
                f"{len(batch.failures)} of {batch.num_rows} rewards failed, more than --max-failed-fraction "
                f"{self._max_failed_fraction:g}; the first is {where}.",
                first.traceback,
            )
        if self._unscored_in_a_row == MAX_UNSCORED_STEPS:
            raise RewardError(
                f"all rewards of {MAX_UNSCORED_STEPS} steps in a row failed; the first of this step is {where}.",
                first.traceback,
            )


class CheckpointSaver:
    """Saves every `--save-interval` steps and after the last one."""

    def __init__(self, config: RunConfig, executor: Executor, last_step: int) -> None:
        self._folder = None if config.checkpoint.save_path is None else Path(config.checkpoint.save_path)
        self._interval = config.checkpoint.save_interval
        self._executor = executor
        self._last_step = last_step
        self.last: Path | None = None

    def after(self, step: int) -> None:
        """Save if this step is due."""
        if self._folder is not None and (step % self._interval == 0 or step == self._last_step):
            self.last = self._executor.save(self._folder / f"step_{step:06d}")
