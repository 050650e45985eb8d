"""Metrics for the Ray dashboard and Prometheus, labelled by run and worker. Ray exports them on each node.

The names are areno_NAME, for counters areno_NAME_total. `scripts/grafana_dashboard.json` shows them.
"""

from __future__ import annotations

import math

from ray.util.metrics import Counter, Gauge

from areno.materialize.shard import ShardSummary


class _Labelled:
    """Makes metrics that carry the labels of one worker of a run."""

    def __init__(self, run: str, worker: str) -> None:
        self._labels = {"run": run, "worker": worker}

    def counter(self, name: str, description: str) -> Counter:
        made = Counter(f"areno_{name}", description=description, tag_keys=tuple(self._labels))
        made.set_default_tags(self._labels)
        return made

    def gauge(self, name: str, description: str) -> Gauge:
        made = Gauge(f"areno_{name}", description=description, tag_keys=tuple(self._labels))
        made.set_default_tags(self._labels)
        return made


class ShardMetrics:
    """What a materialize actor reports of its shards."""

    def __init__(self, run: str, worker: str) -> None:
        make = _Labelled(run, worker)
        self._samples = make.counter("materialized_samples", "Completions checked, decoded and scored.")
        self._tokens = make.counter("materialized_tokens", "Response tokens of those completions.")
        self._failures = make.counter("reward_failures", "Reward calls that failed.")
        self._seconds = {
            stage: make.counter(f"{stage}_seconds", f"Seconds spent in the stage {stage}.")
            for stage in ("decode", "score", "pack")
        }

    def record(self, summary: ShardSummary) -> None:
        """Add one shard."""
        add(self._samples, summary.samples_N.size)
        add(self._tokens, int(summary.samples_N["response_len"].sum()))
        add(self._failures, len(summary.failures))
        add(self._seconds["decode"], summary.decode_s)
        add(self._seconds["score"], summary.score_s)
        add(self._seconds["pack"], summary.pack_s)


class TrainMetrics:
    """What a train worker reports of its sampling and training."""

    def __init__(self, run: str, worker: str) -> None:
        make = _Labelled(run, worker)
        self._samples = make.counter("sampled_completions", "Completions sampled.")
        self._tokens = make.counter("sampled_tokens", "Response tokens of those completions.")
        self._rollout_seconds = make.counter("rollout_seconds", "Seconds spent sampling.")
        self._train_seconds = make.counter("train_seconds", "Seconds spent training, waiting for the others included.")

    def record_rollout(self, samples: int, tokens: int, seconds: float) -> None:
        add(self._samples, samples)
        add(self._tokens, tokens)
        add(self._rollout_seconds, seconds)

    def record_train(self, seconds: float) -> None:
        add(self._train_seconds, seconds)


class DriverMetrics:
    """What the driver reports of the run as a whole."""

    def __init__(self, run: str) -> None:
        make = _Labelled(run, "driver")
        self.step = make.gauge("step", "Training step that is being worked on.")
        self._queue_length = make.gauge("shard_queue_length", "Shards that wait for a materialize actor.")
        self._gap = make.gauge(
            "rollout_train_gap_seconds", "From the last completion to the first forward of training."
        )
        self._last_length = -1
        self._deaths = make.counter("materialize_actor_deaths", "Materialize actors that died and were replaced.")

    def record_queue_length(self, length: int) -> None:
        """Called for every shard, and an export takes longer than a comparison."""
        if length != self._last_length:
            self._last_length = length
            self._queue_length.set(length)

    def record_gap(self, seconds: float) -> None:
        """A step that was not trained on has no gap."""
        if not math.isnan(seconds):
            self._gap.set(max(seconds, 0.0))

    def add_actor_death(self) -> None:
        self._deaths.inc()


def add(counter: Counter, amount: float) -> None:
    """Ray refuses to add nothing."""
    if amount > 0:
        counter.inc(amount)
