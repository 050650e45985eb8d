"""Metrics for the Ray dashboard and Prometheus, labelled by run and worker. Ray exports them on each node."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from areno.materialize.shard import ShardSummary

LABELS = ("run", "worker")


class ShardMetrics:
    """What a materialize actor reports of its shards."""

    def __init__(self, run: str, worker: str) -> None:
        tags = {"run": run, "worker": worker}

        def counter(name: str, description: str) -> Counter:
            made = Counter(f"areno_{name}", description=description, tag_keys=LABELS)
            made.set_default_tags(tags)
            return made

        self._samples = counter("materialized_samples", "Completions decoded, scored and packed.")
        self._tokens = counter("materialized_tokens", "Response tokens of those completions.")
        self._failures = counter("reward_failures", "Reward calls that failed.")
        self._seconds = {
            stage: counter(f"{stage}_seconds", f"Seconds spent in the stage {stage}.")
            for stage in ("decode", "score", "pack")
        }

    def record(self, summary: ShardSummary) -> None:
        """Add one shard."""
        add(self._samples, summary.rewards_N.size)
        add(self._tokens, int(summary.response_lens_N.sum()))
        add(self._failures, len(summary.failures))
        add(self._seconds["decode"], summary.decode_s)
        add(self._seconds["score"], summary.score_s)
        add(self._seconds["pack"], summary.pack_s)


class DriverMetrics:
    """What the driver reports of the run as a whole."""

    def __init__(self, run: str) -> None:
        tags = {"run": run, "worker": "driver"}

        def gauge(name: str, description: str) -> Gauge:
            made = Gauge(f"areno_{name}", description=description, tag_keys=LABELS)
            made.set_default_tags(tags)
            return made

        self.step = gauge("step", "Training step that is being worked on.")
        self.queue_length = gauge("shard_queue_length", "Shards that wait for a materialize actor.")
        self.gap_seconds = gauge(
            "rollout_train_gap_seconds", "From the last completion to the first forward of training."
        )


def add(counter: Counter, amount: float) -> None:
    """Ray refuses to add nothing."""
    if amount > 0:
        counter.inc(amount)
