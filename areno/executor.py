"""The seam between the training loop and where its work is done, and the executor that does it all in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from areno.api.data import PromptBatch, PromptItem
from areno.api.models import SamplingParams
from areno.api.train_pack import TrainPack
from areno.config import RunConfig, reward_on_error_policy
from areno.engine.checkpoint import save_checkpoint
from areno.engine.learner import TrainStats, WindowCounts
from areno.engine.worker import Engine, build_engine
from areno.materialize.materializer import LocalMaterializer, MaterializedBatch, Materializer
from areno.materialize.plan import DispatchPlan, OptimizerWindow, plan_dispatch
from areno.materialize.rollout_batch import RolloutBatch
from areno.materialize.scoring import ScoringOptions

Chunk = TypeVar("Chunk")


@dataclass(frozen=True)
class TrainReport:
    """What training on one batch did. `first_forward_at` is on the clock of `time.monotonic()`.

    Without an optimizer step (`optimizer_steps` 0: no row had both a reward and a trainable token) the numbers are NaN.
    """

    optimizer_steps: int
    loss: float
    grad_norm: float
    lr: float
    peak_mem_gb: float
    first_forward_at: float
    stats: dict[str, float]


class StepRollout(Generic[Chunk]):
    """The chunks of a step as they are finished, each with its prompts, and when the last completion existed.

    Iterating it may be what drives the generation, so its time is measured here.
    """

    def __init__(self, chunks: Iterable[tuple[Chunk, Sequence[PromptItem]]]) -> None:
        self._chunks = chunks
        self.seconds = 0.0
        self.finished_at = time.monotonic()

    def __iter__(self) -> Iterator[tuple[Chunk, Sequence[PromptItem]]]:
        chunks = iter(self._chunks)
        while True:
            began = time.monotonic()
            chunk = next(chunks, None)
            self.finished_at = time.monotonic()
            self.seconds += self.finished_at - began
            if chunk is None:
                return
            yield chunk


class Executor(Protocol):
    """Does the work of a step. The loop only passes on what these return."""

    def rollout(self, prompts: PromptBatch, step: int) -> StepRollout[Any]:
        """Begin to sample `n_samples` completions for each prompt."""
        ...

    def materialize(self, rollout: StepRollout[Any]) -> MaterializedBatch:
        """Decode, score and pack the chunks as they come, and compute the advantages of the whole step.

        Raises:
            RewardError: a reward failed and the policy is to stop.
        """
        ...

    def train(self, batch: MaterializedBatch) -> TrainReport:
        """Learn from the batch.

        Raises:
            RunError: the loss or the gradient is not finite; the weights are unchanged.
        """
        ...

    def save(self, path: Path) -> Path:
        """Write a checkpoint that transformers loads; the folder appears whole or not at all."""
        ...

    def close(self) -> None: ...


class LocalExecutor:
    """Everything in this process, one device."""

    def __init__(self, config: RunConfig, engine: Engine, materializer: Materializer) -> None:
        self._config = config
        self._engine = engine
        self._materializer = materializer

    @classmethod
    def from_config(cls, config: RunConfig, tokenizer: Any) -> LocalExecutor:
        """Load the model and the reward function.

        Raises:
            UsageError: one of them cannot be loaded.
        """
        engine = build_engine(config, tokenizer)
        materializer = LocalMaterializer(
            tokenizer,
            config.basic.reward_fn_path,
            text=config.materialize.reward_text,
            scoring=scoring_options(config),
            end_token_ids=engine.policy.end_token_ids,
            num_texts=config.observability.log_completions,
        )
        return cls(config, engine, materializer)

    def rollout(self, prompts: PromptBatch, step: int) -> StepRollout[RolloutBatch]:
        chunks = self._engine.rollout.generate(
            [item.input_tokens for item in prompts.items],
            prompt_indices=range(len(prompts.items)),
            n_samples=self._config.basic.n_samples,
            params=sampling_params(self._config),
            step=step,
        )
        return StepRollout(with_items(chunks, prompts.items))

    def materialize(self, rollout: StepRollout[RolloutBatch]) -> MaterializedBatch:
        for chunk, items in rollout:
            self._materializer.submit(chunk, items)
        return self._materializer.gather()

    def train(self, batch: MaterializedBatch) -> TrainReport:
        plan = plan_step(batch, self._config, world_size=1)
        first_forward = FirstUse()
        results = [
            self._engine.learner.train_window(first_forward.of(self._packs(batch, window)), window_counts(window))
            for window in plan.windows
        ]
        return train_report(results, first_forward.at)

    def _packs(self, batch: MaterializedBatch, window: OptimizerWindow) -> Iterator[TrainPack]:
        (micro_batches,) = window.micro_batches
        for rows in micro_batches:
            yield batch.train_pack(rows, layout=self._config.train.pack_layout)

    def save(self, path: Path) -> Path:
        return save_checkpoint(self._engine.policy, path)

    def close(self) -> None:
        self._materializer.close()


def sampling_params(config: RunConfig) -> SamplingParams:
    """The sampling options of a run."""
    rollout = config.rollout
    return SamplingParams(
        greedy=rollout.greedy,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        seed=config.basic.seed,
    )


def scoring_options(config: RunConfig) -> ScoringOptions:
    """How the options want rewards to be called for."""
    options = config.materialize
    return ScoringOptions(
        on_error=reward_on_error_policy(options.reward_on_error),
        timeout_s=options.reward_timeout_s,
        memory_gb=options.reward_memory_gb,
        isolate=options.reward_isolation,
        retries=options.reward_retries,
        concurrency=options.reward_concurrency,
    )


def with_items(
    chunks: Iterable[RolloutBatch], items: Sequence[PromptItem]
) -> Iterator[tuple[RolloutBatch, Sequence[PromptItem]]]:
    """Each chunk with the prompts of its groups."""
    start = 0
    for chunk in chunks:
        yield chunk, items[start : start + chunk.num_groups]
        start += chunk.num_groups


def plan_step(batch: MaterializedBatch, config: RunConfig, *, world_size: int) -> DispatchPlan:
    """Which rows are trained where."""
    return plan_dispatch(
        batch.row_lens,
        batch.learnable_tokens,
        world_size=world_size,
        mini_bs=config.train.mini_bs,
        accumulation=config.train.gradient_accumulation_steps,
    )


def window_counts(window: OptimizerWindow) -> WindowCounts:
    """What the learner needs to know of a window as a whole."""
    return WindowCounts(tokens=window.tokens, sequences=window.sequences, packs=window.packs)


class FirstUse:
    """Notes when the first element of an iterable is handed out."""

    def __init__(self) -> None:
        self.at = float("nan")

    def of(self, packs: Iterable[TrainPack]) -> Iterator[TrainPack]:
        for pack in packs:
            if np.isnan(self.at):
                self.at = time.monotonic()
            yield pack


def train_report(results: Sequence[TrainStats], first_forward_at: float) -> TrainReport:
    """One report for all optimizer steps of a training step: means over them, and the last learning rate."""
    if not results:
        nan = float("nan")
        return TrainReport(0, nan, nan, nan, nan, nan, {})
    return TrainReport(
        optimizer_steps=len(results),
        loss=float(np.mean([r.loss for r in results])),
        grad_norm=float(np.mean([r.grad_norm for r in results])),
        lr=results[-1].lr,
        peak_mem_gb=max(r.peak_mem_gb for r in results),
        first_forward_at=first_forward_at,
        stats={key: float(np.mean([r.stats[key] for r in results])) for key in results[0].stats},
    )
