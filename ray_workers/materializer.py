"""The materializer over Ray actors: the same interface and, bit for bit, the same result as the local one."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from areno.api.data import PromptItem
from areno.materialize.decode import RewardText
from areno.materialize.materializer import (
    GROUP_RELATIVE,
    AdvantageOptions,
    Assembler,
    MaterializedBatch,
    pad_id_of,
    resolve_end_token_ids,
)
from areno.materialize.pack import FlatPack
from areno.materialize.plan import plan_shards
from areno.materialize.reward_hook import RewardSource
from areno.materialize.rollout_batch import RolloutBatch
from areno.materialize.scoring import ScoringOptions
from areno.materialize.shard import DEFAULT_SCORING, Reward, ShardOptions, ShardSummary
from ray_workers.calls import get_all, plain_error, span_of
from ray_workers.chunk import ChunkInfo
from ray_workers.cluster import Cluster, check_free, demand_of, share_of
from ray_workers.materialize_actor import MaterializeWorker, ShardOrder, light
from ray_workers.metrics import DriverMetrics
from ray_workers.refs import RefPacks, StoredSpec, put, too_small_store
from ray_workers.shard_queue import Shard, ShardQueue

START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class _Work:
    """A shard's order with the chunk that it is cut from. The chunk is freed when its last shard is done."""

    chunk: ray.ObjectRef[RolloutBatch]
    order: ShardOrder
    name: str


@dataclass(frozen=True)
class _Running:
    worker: int
    actor: Any
    shard: Shard[_Work]
    pack: ray.ObjectRef[FlatPack]


class RayMaterializer:
    """Materializes on Ray actors of this machine or cluster. Arguments as `LocalMaterializer`, and:

    Args:
        num_workers: actors.
        shards_per_worker: how finely a chunk is cut at most, so that one slow shard does not hold up the rest.
        min_shard_s: a shard that would take less, going by the step before, costs more to send than it saves.
        actor_options: passed to Ray for each actor (resources, scheduling); CPUs are shared out by default.

    Raises:
        UsageError: Ray cannot be started, or the reward file cannot be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        reward: Reward,
        *,
        num_workers: int,
        text: RewardText = "no-eos",
        scoring: ScoringOptions = DEFAULT_SCORING,
        end_token_ids: Sequence[int] | None = None,
        advantages: AdvantageOptions = GROUP_RELATIVE,
        num_texts: int = 0,
        shards_per_worker: int = 4,
        min_shard_s: float = 0.01,
        actor_options: dict[str, Any] | None = None,
        run: str | None = None,
    ) -> None:
        # Read here and sent by value: the file need not be on another node, and an edit cannot be half picked up.
        source = RewardSource.read(reward) if isinstance(reward, (str, Path)) else reward
        self._cluster = Cluster.connect()
        self._run = uuid.uuid4().hex[:8] if run is None else run
        self._assembler = Assembler(scoring.on_error, advantages, pad_id_of(tokenizer))
        self._shards_per_chunk = num_workers * shards_per_worker
        self._min_shard_s = min_shard_s
        self._seconds_per_token = math.inf
        self._num_texts = num_texts
        self._step = 0
        self._queue: ShardQueue[_Work] = ShardQueue(num_workers)
        self._actors: list[Any] = []
        self._replaced = 0
        self.metrics = DriverMetrics(self._run)
        self._reset()
        options = ShardOptions(text, scoring, resolve_end_token_ids(tokenizer, end_token_ids))
        try:
            # Held here, so that an actor that restarts finds it.
            self._spec = StoredSpec(ray.put((tokenizer, source, options)))
            self._start(num_workers, actor_options)
        except BaseException:
            self.close()
            raise

    def _start(self, num_workers: int, actor_options: dict[str, Any] | None) -> None:
        resources = self._cluster.resources()
        self._store_bytes = resources.object_store_bytes
        self._actor_options = {"num_cpus": share_of(resources.cpus, num_workers), **(actor_options or {})}
        # Reward functions may use signals, so they must run on the main thread, which they only do one at a time.
        self._actor_options["max_concurrency"] = 1
        check_free(demand_of(self._actor_options, num_workers))
        for i in range(num_workers):
            self._actors.append(self._new_actor(f"materialize-{i}"))
        self.process_ids = get_all([a.ready.remote() for a in self._actors], START_TIMEOUT_S, "materialize actors")

    def _new_actor(self, name: str) -> Any:
        actor = ray.remote(MaterializeWorker)
        options = {"name": name, "namespace": f"areno-{self._run}", **self._actor_options}
        return actor.options(**options).remote(name, self._run, self._spec)

    def _reset(self) -> None:
        self._running: dict[ray.ObjectRef[ShardSummary], _Running] = {}
        self._done: dict[int, tuple[ShardSummary, ray.ObjectRef[FlatPack]]] = {}
        self._groups = self._rows = self._bytes = 0
        self._queue.clear()

    def materialize(self, rollout: RolloutBatch, items: Sequence[PromptItem]) -> MaterializedBatch:
        self.submit(rollout, items)
        return self.gather()

    def submit(self, chunk: RolloutBatch, items: Sequence[PromptItem]) -> None:
        """
        Raises:
            RunError: the step does not fit into the object store, or a shard of it failed.
        """
        if len(items) != chunk.num_groups:
            raise ValueError(f"{len(items)} prompt items for {chunk.num_groups} prompt groups.")
        self._bytes += 2 * chunk.nbytes  # the chunk, and the flat packs made of it
        if self._bytes > self._store_bytes:
            needed = self._bytes
            self._abandon()
            raise too_small_store(needed, self._store_bytes, "there")
        first_group, first_row = self._groups, self._rows
        self._groups += chunk.num_groups
        self._rows += chunk.num_completions
        self.submit_ref(put(chunk), ChunkInfo.of(chunk), items, first_group=first_group, first_row=first_row)

    def submit_ref(
        self,
        chunk: ray.ObjectRef[RolloutBatch],
        info: ChunkInfo,
        items: Sequence[PromptItem],
        *,
        first_group: int,
        first_row: int,
    ) -> None:
        """A chunk that is in the object store already, at its place in the step; chunks may come in any order."""
        rows_G1 = np.concatenate([[0], np.cumsum(info.group_sizes_G)]) + first_row
        for start, stop in plan_shards(info.group_tokens_G, self._shards_for(info)):
            order = ShardOrder(
                start,
                stop,
                light(items[start:stop]),
                first_group + start,
                max(self._num_texts - int(rows_G1[start]), 0),
            )
            name = f"step {self._step}, {span_of('prompt', first_group + start, first_group + stop)}"
            self._queue.add(Shard(first_group + start, stop - start, _Work(chunk, order, name)))
        self.advance(timeout_s=0)

    def _shards_for(self, info: ChunkInfo) -> int:
        """How many shards a chunk is worth."""
        seconds = self._seconds_per_token * max(int(info.group_tokens_G.sum()), 1)
        if self._min_shard_s == 0 or seconds >= self._min_shard_s * self._shards_per_chunk:
            return self._shards_per_chunk
        return max(round(seconds / self._min_shard_s), 1)

    def waiting_for(self) -> list[ray.ObjectRef[Any]]:
        """What `advance` would wait for, for callers that wait for other things too."""
        return list(self._running)

    def advance(self, timeout_s: float | None, *, to_the_end: bool = False) -> None:
        """Take in shards that are done and hand out pending ones.

        Args:
            timeout_s: how long to wait for one if none is done, or for each of them.
            to_the_end: go on until all are done.

        Raises:
            RunError: a shard failed, or its actor died on it too often. The step is given up.
        """
        try:
            self._hand_out()
            while self._running:
                ready, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
                if not ready:
                    return
                self._take_in(ready[0])
                self._hand_out()
                if not to_the_end:
                    timeout_s = 0
        except BaseException:
            self._abandon()
            raise

    def gather(self) -> MaterializedBatch:
        """The step as a batch, and a fresh start. The flat packs stay in the object store.

        Raises:
            RewardError: a reward failed and the policy is to stop.
            RunError: a shard failed, or its actor died on it too often.
        """
        try:
            self.advance(timeout_s=None, to_the_end=True)
            done = [self._done[key] for key in sorted(self._done)]
            batch = self._assembler.assemble([s for s, _ in done], RefPacks([p for _, p in done]))
            if tokens := int(batch.response_lens.sum()):
                took = batch.timings
                self._seconds_per_token = (took.decode_s + took.score_s + took.pack_s) / tokens
            return batch
        finally:
            self._abandon()

    def begin_step(self, step: int) -> None:
        """Name the tasks that follow after this step."""
        self._step = step
        self.metrics.step.set(step)

    def close(self) -> None:
        actors, self._actors = self._actors, []
        try:
            if ray.is_initialized():
                for actor in actors:
                    ray.kill(actor)
        finally:
            self._cluster.close()

    def __enter__(self) -> RayMaterializer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hand_out(self) -> None:
        while (assigned := self._queue.assign()) is not None:
            worker, shard = assigned
            call = self._actors[worker].run.options(num_returns=2, name=f"materialize {shard.payload.name}")
            summary, pack = call.remote(shard.payload.chunk, shard.payload.order)
            self._running[summary] = _Running(worker, self._actors[worker], shard, pack)
        self.metrics.record_queue_length(len(self._queue))

    def _take_in(self, ref: ray.ObjectRef[ShardSummary]) -> None:
        running = self._running[ref]
        try:
            summary = ray.get(ref)
        except (RayActorError, OutOfMemoryError) as error:
            # An actor works on its oldest shard; those behind it were only lost with it.
            oldest = next(r for r in self._running.values() if r.actor is running.actor)
            del self._running[ref]
            self._replace(running.worker, running.actor)
            self._queue.lost(running.worker, running.shard, type(error).__name__, guilty=oldest is running)
            return
        except RayError as error:
            raise plain_error(error) from error
        del self._running[ref]
        self._queue.finished(running.worker)
        self._done[running.shard.first_group] = (summary, running.pack)
        if summary.failures and self._assembler.on_error == "fail":
            self._queue.drop_after(running.shard.first_group)

    def _replace(self, worker: int, dead: Any) -> None:
        """A new actor in the place of a dead one, unless an earlier shard that died with it has seen to that."""
        if self._actors[worker] is dead:
            ray.kill(dead)  # it may only be out of reach
            self._replaced += 1
            self._actors[worker] = self._new_actor(f"materialize-{worker}-again-{self._replaced}")
            self.metrics.add_actor_death()

    def _abandon(self) -> None:
        """Let go of what is still running, whose results are not wanted, and begin afresh."""
        for ref in self._running:
            ray.cancel(ref)
        self._reset()
