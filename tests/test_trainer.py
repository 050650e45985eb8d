"""The loop: steps and epochs, notes, faults, checkpoints. Driven with a scripted executor, without a model."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areno.api import PromptBatch, PromptItem, RewardRecord, SamplingParams
from areno.config import RunConfig, build
from areno.engine.scripted import ScriptedCompletion, ScriptedRollout, seeded_script
from areno.errors import RewardError, RunError
from areno.executor import StepRollout, TrainReport, plan_step, with_items
from areno.materialize.materializer import LocalMaterializer, MaterializedBatch
from areno.materialize.scoring import ScoringOptions
from areno.metrics import StepMetrics
from areno.trainer import MAX_UNSCORED_STEPS, train


class Prompts:
    def __init__(self, count: int, batch_size: int) -> None:
        self.items = [PromptItem(f"p{i}", None, [i + 1], {"i": i}) for i in range(count)]
        self.batch_size = batch_size

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def batches(self, epoch: int) -> Iterator[PromptBatch]:
        for i in range(0, len(self.items), self.batch_size):
            yield PromptBatch(self.items[i : i + self.batch_size], 0, 0, 0, epoch)


class ScriptedExecutor:
    """Materializes for real; sampling is scripted and training only written down."""

    def __init__(self, config: RunConfig, tokenizer: Any, reward: Any, script: Any = None, **options: Any) -> None:
        self.config = config
        self.script = ScriptedRollout(script or seeded_script(0, 600, 6, 0), groups_per_chunk=2)
        self.materializer = LocalMaterializer(tokenizer, reward, **options)
        self.trained: list[MaterializedBatch] = []
        self.saved: list[str] = []

    def rollout(self, prompts: PromptBatch, step: int) -> StepRollout[Any]:
        chunks = self.script.generate(
            [i.input_tokens for i in prompts.items],
            prompt_indices=range(len(prompts.items)),
            n_samples=self.config.basic.n_samples,
            params=SamplingParams(),
            step=step,
        )
        return StepRollout(with_items(chunks, prompts.items))

    def materialize(self, rollout: StepRollout[Any]) -> MaterializedBatch:
        for chunk, items in rollout:
            self.materializer.submit(chunk, items)
        return self.materializer.gather()

    def train(self, batch: MaterializedBatch) -> TrainReport:
        plan = plan_step(batch, self.config, world_size=1)
        self.trained.append(batch)
        if not plan.windows:
            return TrainReport(0, *[math.nan] * 5, {})
        return TrainReport(len(plan.windows), 0.5, 1.0, 1e-3, 1.0, math.inf, {"policy_loss": 0.5, "response_len": 3.0})

    def save(self, path: Path) -> Path:
        self.saved.append(path.name)
        return path

    def close(self) -> None: ...


class Log:
    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.notes: list[str] = []
        self.samples: list[Any] = []

    def log_step(self, metrics: StepMetrics, samples: Any) -> None:
        self.steps.append(metrics)
        self.samples += samples

    def note(self, text: str) -> None:
        self.notes.append(text)


def config(**values: Any) -> RunConfig:
    base = {"ckpt": "c", "dataset_path": "d", "reward_fn_path": "r", "batch_size": 2, "n_samples": 3, "epochs": 1}
    return build({**base, **values})


def run(tokenizer: Any, reward: Callable[[RewardRecord], Any], count: int = 5, **values: Any) -> tuple[Any, Log, Any]:
    options = {k: values.pop(k) for k in ("script", "scoring", "num_texts") if k in values}
    settings = config(**values)
    executor = ScriptedExecutor(settings, tokenizer, reward, **options)
    log = Log()
    summary = train(settings, Prompts(count, settings.basic.batch_size), executor, log)
    return executor, log, summary


def by_text(record: RewardRecord) -> float:
    return float(len(record.completion) % 5)


def test_every_prompt_of_every_epoch_is_trained_once(tokenizer: Any) -> None:
    executor, log, summary = run(tokenizer, by_text, epochs=2)
    assert [(m.step, m.epoch) for m in log.steps] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    assert summary.steps == 6
    assert [b.num_rows for b in executor.trained] == [6, 6, 3] * 2
    assert [m.zero_variance_groups for m in log.steps] == [
        sum(len(set(b.rewards[i : i + 3])) == 1 for i in range(0, b.num_rows, 3)) for b in executor.trained
    ]


def test_max_steps_and_checkpoints(tokenizer: Any) -> None:
    executor, _, summary = run(tokenizer, by_text, epochs=9, max_steps=5, save_path="x", save_interval=2)
    assert executor.saved == ["step_000002", "step_000004", "step_000005"]
    assert summary.last_checkpoint == Path("x/step_000005")
    executor, _, _ = run(tokenizer, by_text, max_steps=2, save_path="x", save_interval=2)
    assert executor.saved == ["step_000002"]
    assert run(tokenizer, by_text)[0].saved == []


def test_metrics_are_those_of_the_batch(tokenizer: Any) -> None:
    executor, log, _ = run(tokenizer, by_text, max_steps=1, num_texts=4)
    (batch,), (m,) = executor.trained, log.steps
    assert m.reward_mean == batch.rewards.mean()
    assert m.reward_std == batch.rewards.std()
    assert m.response_len_mean == batch.response_lens.mean()
    assert m.truncated_fraction == (batch.finish == 1).mean()
    assert m.rollout_logprob_mean == batch.logprob_mean
    assert m.step_e2e_time_s >= m.step_rollout_time_s + m.step_materialize_time_s
    assert m.extra["response_len"] == 3.0
    assert [(s.prompt_index, s.sample_index) for s in log.samples] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [s.reward for s in log.samples] == batch.rewards[:4].tolist()


def test_first_step_tells_about_the_rewards(tokenizer: Any) -> None:
    _, log, _ = run(tokenizer, by_text)
    assert any("distinct in 6 completions" in note for note in log.notes)
    _, log, _ = run(tokenizer, lambda _: 0.0)
    assert any("All are equal" in note for note in log.notes)
    _, log, _ = run(tokenizer, by_text, n_samples=1)
    assert "--n-samples 1" in log.notes[0]


def test_a_failed_reward_stops_the_run_with_its_place(tokenizer: Any) -> None:
    def fails_later(record: RewardRecord) -> float:
        if record.source_record["i"] == 3 and record.metadata["sample_index"] == 2:
            raise ValueError("no gold")
        return 1.0

    with pytest.raises(
        RewardError, match=r"step 2: reward of prompt 1, sample 2 failed: .*ValueError: no gold"
    ) as failed:
        run(tokenizer, fails_later)
    assert "Traceback" in failed.value.details


def test_skipped_rewards_are_counted(tokenizer: Any) -> None:
    executor, log, _ = run(
        tokenizer,
        lambda r: None if r.metadata["sample_index"] == 1 else r.metadata["sample_index"],
        scoring=ScoringOptions(on_error="skip"),
    )
    assert all(m.reward_mean == 1.0 for m in log.steps)
    assert log.steps[0].extra["reward_failures/none"] == 2
    assert all(not b.scored[1] for b in executor.trained)


def test_steps_without_any_reward_end_the_run(tokenizer: Any) -> None:
    def broken(_: RewardRecord) -> float:
        raise ValueError("always")

    log = Log()
    settings = config()
    executor = ScriptedExecutor(settings, tokenizer, broken, scoring=ScoringOptions(on_error="skip"))
    with pytest.raises(RewardError, match=f"{MAX_UNSCORED_STEPS} steps in a row failed.*always"):
        train(settings, Prompts(20, 2), executor, log)
    assert len(log.steps) == MAX_UNSCORED_STEPS - 1
    assert math.isnan(log.steps[0].reward_mean)
    assert any("weights are unchanged" in note for note in log.notes)


def test_too_many_failures_stop_the_run(tokenizer: Any) -> None:
    def half(record: RewardRecord) -> float:
        if record.metadata["sample_index"] != 1:
            raise ValueError("no gold")
        return 1.0

    skip = ScoringOptions(on_error="skip")
    with pytest.raises(RewardError, match=r"step 1: 4 of 6 rewards failed, more than --max-failed-fraction 0\.5"):
        run(tokenizer, half, scoring=skip, max_failed_fraction=0.5)
    _, log, _ = run(tokenizer, half, scoring=skip, max_failed_fraction=0.7)
    assert len(log.steps) == 3


def test_slow_rewards_are_named_without_text(tokenizer: Any) -> None:
    def slow(record: RewardRecord) -> float:
        time.sleep(0.05 * (record.source_record["i"] == 3 and record.metadata["sample_index"] == 2))
        return 1.0

    _, log, _ = run(tokenizer, slow, reward_slow_threshold_s=0.04)
    (line,) = [note for note in log.notes if "took" in note]
    assert line.startswith("step 2: r took 0.0")
    assert line.endswith("on prompt 1, sample 2.")
    assert log.steps[1].extra["reward_seconds_max"] >= 0.05 > log.steps[1].extra["reward_seconds_p50"]


def test_parts_of_rewards_become_metrics(tokenizer: Any) -> None:
    def parts(record: RewardRecord) -> Any:
        i = record.metadata["sample_index"]
        return {"score": i, "format": 1.0, **({"bonus": 3.0} if i == 2 else {})}

    _, log, _ = run(tokenizer, parts, max_steps=1)
    assert log.steps[0].extra["reward/format_mean"] == 1.0
    assert log.steps[0].extra["reward/bonus_mean"] == 3.0
    assert log.steps[0].reward_mean == 1.0


def test_a_step_of_empty_completions_is_skipped_with_a_reason(tokenizer: Any) -> None:
    _, log, summary = run(tokenizer, lambda _: 1.0, script=lambda *_: ScriptedCompletion([], []))
    assert summary.steps == 3
    assert all(m.extra["optimizer_steps"] == 0 for m in log.steps)
    assert any("no completion has both a reward and a token" in note for note in log.notes)


def test_faults_of_the_executor_are_named_with_the_step(tokenizer: Any) -> None:
    class Broken(ScriptedExecutor):
        def train(self, batch: MaterializedBatch) -> TrainReport:
            if len(self.trained) == 1:
                raise RunError("the loss is not finite")
            return super().train(batch)

    log = Log()
    settings = config()
    with pytest.raises(RunError, match="step 2: the loss is not finite"):
        train(settings, Prompts(5, 2), Broken(settings, tokenizer, by_text), log)
    assert len(log.steps) == 1


def test_metrics_keys_are_pinned() -> None:
    assert [f.name for f in dataclasses.fields(StepMetrics)] == [
        "step", "epoch", "reward_mean", "reward_std", "advantage_abs_mean", "zero_variance_groups", "response_len_mean",
        "truncated_fraction", "rollout_logprob_mean", "loss", "policy_loss", "ratio_mean", "ratio_std", "logp_diff_mean",
        "logp_abs_diff_mean", "grad_norm", "lr", "step_e2e_time_s", "step_rollout_time_s", "step_train_time_s",
        "step_materialize_time_s", "decode_s", "score_s", "pack_s", "advantage_s", "rollout_train_gap_s", "tokens_per_s",
        "peak_mem_gb", "extra",
    ]  # fmt: skip
