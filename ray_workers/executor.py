"""The executor over Ray: train workers sample, materialize actors prepare, and the driver passes references on."""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from areno.api.data import PromptBatch, PromptItem
from areno.config import RunConfig
from areno.executor import StepRollout, TrainReport, plan_step, sampling_params, scoring_options
from areno.materialize.materializer import MaterializedBatch
from areno.materialize.rollout_batch import RolloutBatch
from ray_workers.chunk import ChunkInfo
from ray_workers.cluster import GIB, Cluster, ClusterOptions, check_store, plan_actors
from ray_workers.materializer import RayMaterializer
from ray_workers.refs import RefPacks
from ray_workers.train_group import TrainGroup
from ray_workers.train_job import train_orders

# Object-store bytes of tokens: an id, and with sampled ones their logprob. Each is there once.
PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES = 4, 8


@dataclass(frozen=True)
class RayChunk:
    """A rollout chunk in the object store, and its place in the step."""

    tokens: ray.ObjectRef[RolloutBatch]
    info: ChunkInfo
    first_group: int


class RayExecutor:
    """Train workers and materialize actors of one run. The driver holds no token and no GPU."""

    def __init__(
        self, config: RunConfig, group: TrainGroup, materializer: RayMaterializer, close: Callable[[], None]
    ) -> None:
        self._config = config
        self._group = group
        self._materializer = materializer
        self._close = close
        self._step = 0
        self._rollout_finished_at = math.nan

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        tokenizer: Any,
        say: Callable[[str], None] = print,
        *,
        train_options: dict[str, Any] | None = None,
        materialize_options: dict[str, Any] | None = None,
    ) -> RayExecutor:
        """Connect to Ray, start the actors and load the model.

        Args:
            say: told what the person should know of the cluster.
            train_options, materialize_options: Ray's options for the two kinds of actors, such as the `resources` that
                place them on certain nodes; CPUs and GPUs are shared out by default.

        Raises:
            UsageError: Ray, the checkpoint or the reward file cannot be used, or the actors do not fit.
        """
        options = config.materialize
        store = None if options.object_store_gb is None else int(options.object_store_gb * GIB)
        run = uuid.uuid4().hex[:8]
        with ExitStack() as started:
            cluster = started.enter_context(
                Cluster.connect(ClusterOptions(options.ray_address, store, options.ray_dashboard))
            )
            resources = cluster.resources()
            plan = plan_actors(
                resources,
                train_workers=config.basic.world_size,
                materialize_workers=options.materialize_workers,
                on_gpu=resolve_on_gpu(config, resources.gpus),
            )
            check_store(step_bytes(config), resources.object_store_bytes)
            for note in (*cluster.notes, *plan.notes):
                say(note)
            if cluster.dashboard_url:
                say(f"Ray dashboard: http://{cluster.dashboard_url}")
            train = {"num_cpus": plan.train_cpus, "num_gpus": plan.train_gpus, **(train_options or {})}
            group = TrainGroup(config, tokenizer, run, train)
            started.callback(group.close)
            materializer = RayMaterializer(
                tokenizer,
                config.basic.reward_fn_path,
                num_workers=plan.materialize_workers,
                text=options.reward_text,
                scoring=scoring_options(config),
                end_token_ids=group.end_token_ids,
                num_texts=config.observability.log_completions,
                actor_options={"num_cpus": plan.materialize_cpus, **(materialize_options or {})},
                run=run,
            )
            started.callback(materializer.close)
            return cls(config, group, materializer, started.pop_all().close)

    def rollout(self, prompts: PromptBatch, step: int) -> StepRollout[RayChunk]:
        self._step = step
        self._materializer.begin_step(step)
        return StepRollout(self._chunks(prompts.items, step))

    def _chunks(self, items: Sequence[PromptItem], step: int) -> Iterator[tuple[RayChunk, Sequence[PromptItem]]]:
        """Chunks in the order in which they are finished. While the driver waits, it serves the materialize actors."""
        params = sampling_params(self._config)
        pending = deque(rollout_parts(len(items), self._config))
        running: dict[Any, tuple[int, int, int, Any]] = {}

        def begin(worker: int) -> None:
            if not pending:
                return
            start, stop = pending.popleft()
            prompts = [items[i].input_tokens for i in range(start, stop)]
            tokens, info = self._group.rollout(worker, prompts, range(start, stop), params, step)
            running[info] = (worker, start, stop, tokens)

        # A second call waits at each worker, so that none idles while the driver is busy.
        for _ in range(2):
            for worker in range(len(self._group)):
                begin(worker)
        while running:
            (ref,) = self._wait(list(running))
            worker, start, stop, tokens = running.pop(ref)
            begin(worker)
            yield RayChunk(tokens, self._group.info(worker, ref), start), items[start:stop]

    def _wait(self, rollouts: list[Any]) -> list[Any]:
        """The next finished rollout call, taking in finished shards meanwhile."""
        while True:
            ready, _ = ray.wait([*rollouts, *self._materializer.waiting_for()], num_returns=1)
            if ready[0] in rollouts:
                return ready
            self._materializer.advance(timeout_s=0)

    def materialize(self, rollout: StepRollout[RayChunk]) -> MaterializedBatch:
        for chunk, items in rollout:
            self._materializer.submit_ref(
                chunk.tokens,
                chunk.info,
                items,
                first_group=chunk.first_group,
                first_row=chunk.first_group * self._config.basic.n_samples,
            )
        self._rollout_finished_at = rollout.finished_at
        return self._materializer.gather()

    def train(self, batch: MaterializedBatch) -> TrainReport:
        plan = plan_step(batch, self._config, world_size=len(self._group))
        assert isinstance(batch.flat_packs, RefPacks)
        reports = self._group.train(train_orders(plan, batch, len(self._group)), batch.flat_packs.chunks, self._step)
        report = merge_reports(reports)
        self._materializer.metrics.record_gap(report.first_forward_at - self._rollout_finished_at)
        return report

    def save(self, path: Path) -> Path:
        return self._group.save(path)

    def close(self) -> None:
        self._close()


def resolve_on_gpu(config: RunConfig, gpus: float) -> bool:
    """Whether train workers run on GPUs: the driver itself may have none."""
    if config.basic.device == "auto":
        return gpus > 0
    return config.basic.device == "cuda"


def step_bytes(config: RunConfig) -> int:
    """Object-store bytes of the longest step that the options allow."""
    rollout = config.rollout
    prompt = rollout.max_prompt_tokens * PROMPT_TOKEN_BYTES
    responses = config.basic.n_samples * rollout.max_new_tokens * RESPONSE_TOKEN_BYTES
    return config.basic.batch_size * (prompt + responses)


def rollout_parts(num_prompts: int, config: RunConfig) -> list[tuple[int, int]]:
    """Runs of prompts that go into one call of a model: what fits side by side, and something for every worker."""
    fits = max(1, config.rollout.rollout_rows // config.basic.n_samples)
    size = min(fits, math.ceil(num_prompts / config.basic.world_size))
    return [(start, min(start + size, num_prompts)) for start in range(0, num_prompts, size)]


def merge_reports(reports: Sequence[TrainReport]) -> TrainReport:
    """The workers' reports agree but for memory and for when each began."""
    first = reports[0]
    return TrainReport(
        optimizer_steps=first.optimizer_steps,
        loss=first.loss,
        grad_norm=first.grad_norm,
        lr=first.lr,
        peak_mem_gb=max(r.peak_mem_gb for r in reports),
        first_forward_at=min(
            (r.first_forward_at for r in reports if not math.isnan(r.first_forward_at)), default=math.nan
        ),
        stats=first.stats,
    )
