"""The numbers and notes of a step, read off the batch and the training report. Pure functions.

Axes: N completions, G groups.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from areno.api.advantages import zero_variance_groups
from areno.executor import TrainReport
from areno.materialize.materializer import MaterializedBatch
from areno.materialize.rollout_batch import LENGTH
from areno.metrics import CompletionSample, StepMetrics


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step by stage; `gap_s` is from the last completion to the first forward of training."""

    end_to_end_s: float
    rollout_s: float
    materialize_s: float
    train_s: float
    gap_s: float


def step_metrics(step: int, epoch: int, batch: MaterializedBatch, report: TrainReport, times: StepTimes) -> StepMetrics:
    """All metrics of a step. Steps count from 1 for people; a mean over nothing is NaN."""
    rewards = batch.rewards[batch.scored]
    nan = float("nan")
    stats = dict(report.stats)
    failures = Counter(failure.cause for failure in batch.failures)
    return StepMetrics(
        step=step,
        epoch=epoch,
        reward_mean=float(rewards.mean()) if rewards.size else nan,
        reward_std=float(rewards.std()) if rewards.size else nan,
        advantage_abs_mean=float(np.abs(batch.advantages[batch.scored]).mean()) if rewards.size else nan,
        zero_variance_groups=int(zero_variance_groups(batch.rewards, batch.group_sizes, batch.scored).sum()),
        response_len_mean=float(batch.response_lens.mean()) if batch.num_rows else nan,
        truncated_fraction=float((batch.finish == LENGTH).mean()) if batch.num_rows else nan,
        rollout_logprob_mean=batch.logprob_mean,
        loss=report.loss,
        policy_loss=stats.pop("policy_loss", nan),
        ratio_mean=stats.pop("ratio_mean", nan),
        ratio_std=stats.pop("ratio_std", nan),
        logp_diff_mean=stats.pop("logp_diff_mean", nan),
        logp_abs_diff_mean=stats.pop("logp_abs_diff_mean", nan),
        grad_norm=report.grad_norm,
        lr=report.lr,
        step_e2e_time_s=times.end_to_end_s,
        step_rollout_time_s=times.rollout_s,
        step_train_time_s=times.train_s,
        step_materialize_time_s=times.materialize_s,
        decode_s=batch.timings.decode_s,
        score_s=batch.timings.score_s,
        pack_s=batch.timings.pack_s,
        advantage_s=batch.timings.advantage_s,
        rollout_train_gap_s=times.gap_s,
        tokens_per_s=float(batch.response_lens.sum()) / times.end_to_end_s,
        peak_mem_gb=report.peak_mem_gb,
        extra={
            **stats,
            "optimizer_steps": report.optimizer_steps,
            "reward_failures": len(batch.failures),
            **{f"reward_failures/{cause}": count for cause, count in sorted(failures.items())},
            **reward_seconds(batch),
            **reward_parts(batch),
        },
    )


def reward_seconds(batch: MaterializedBatch) -> dict[str, float]:
    """How long reward calls took: median, 95th percentile and longest."""
    if not batch.num_rows:
        return {}
    p50, p95, longest = np.quantile(batch.reward_seconds, [0.5, 0.95, 1.0]).tolist()
    return {"reward_seconds_p50": p50, "reward_seconds_p95": p95, "reward_seconds_max": longest}


def reward_parts(batch: MaterializedBatch) -> dict[str, float]:
    """The mean of each part that rewards came with, over the rewards that had it."""
    return {f"reward/{name}_mean": float(np.nanmean(values_N)) for name, values_N in batch.components.items()}


def slow_rewards(batch: MaterializedBatch, threshold_s: float) -> list[tuple[int, int, float]]:
    """(prompt index, sample index, seconds) of each reward call that took longer."""
    group_N = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes)
    starts_G = np.cumsum(batch.group_sizes) - batch.group_sizes
    return [
        (int(group_N[row]), int(row - starts_G[group_N[row]]), float(batch.reward_seconds[row]))
        for row in np.flatnonzero(batch.reward_seconds > threshold_s).tolist()
    ]


def completion_samples(step: int, batch: MaterializedBatch) -> list[CompletionSample]:
    """The completions whose texts were kept, in prompt order."""
    group_N = np.repeat(np.arange(batch.group_sizes.size), batch.group_sizes)
    starts_G = np.cumsum(batch.group_sizes) - batch.group_sizes
    return [
        CompletionSample(
            step=step,
            prompt_index=int(group_N[row]),
            sample_index=int(row - starts_G[group_N[row]]),
            reward=float(batch.rewards[row]) if batch.scored[row] else None,
            advantage=float(batch.advantages[row]),
            text=text,
        )
        for row, text in enumerate(batch.texts)
    ]


def reward_report(batch: MaterializedBatch) -> str:
    """One line about the first rewards of a run, with a warning where nothing can be learned from them."""
    rewards = batch.rewards[batch.scored]
    if not rewards.size:
        return f"rewards of step 1: none of {batch.num_rows} completions was scored."
    line = (
        f"rewards of step 1: {np.unique(rewards).size} distinct in {rewards.size} completions, "
        f"min {rewards.min():g}, max {rewards.max():g}, {np.mean(rewards == 0):.0%} zero."
    )
    if rewards.min() == rewards.max():
        line += " All are equal, so nothing is learned from this step: check the reward function if this goes on."
    return line


def gap_seconds(rollout_finished_at: float, first_forward_at: float) -> float:
    """Time that the train workers waited after the last completion; NaN if the step was not trained on."""
    gap = first_forward_at - rollout_finished_at
    return gap if math.isnan(gap) else max(gap, 0.0)
