"""The materializer over Ray actors: the same interface and, bit for bit, the same result as the local one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

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
from areno.materialize.reward_hook import RewardSource
from areno.materialize.rollout_batch import RolloutBatch, offsets_of
from areno.materialize.scoring import ScoringOptions
from areno.materialize.shard import DEFAULT_SCORING, Reward, ShardOptions, ShardSummary
from ray_workers.calls import get_or_errors, plain_error, span_of
from ray_workers.chunk import ChunkInfo
from ray_workers.cluster import Cluster
from ray_workers.materialize_actor import ShardOrder, light
from ray_workers.materialize_pool import MaterializePool
from ray_workers.metrics import DriverMetrics
from ray_workers.refs import RefPacks, put, too_small_store
from ray_workers.shard_cut import MIN_SHARD_S, SHARDS_PER_WORKER, ShardCut
from ray_workers.shard_queue import Shard, ShardQueue

# How often the driver looks up while it waits for the last shards, of which one may have lost its actor.
LOOK_UP_S = 0.2


@dataclass(frozen=True)
class _Work:
    """A shard's order with the chunk that it is cut from."""

    chunk: ray.ObjectRef[RolloutBatch]
    order: ShardOrder
    name: str


@dataclass(frozen=True)
class _Running:
    worker: int
    shard: Shard[_Work]


@dataclass(frozen=True)
class _Chunk:
    tokens: ray.ObjectRef[RolloutBatch]
    num_rows: int


class RayMaterializer:
    """Materializes on Ray actors of this machine or cluster. Arguments as `LocalMaterializer`, and:

    Args:
        num_workers: actors.
        shards_per_worker: how finely a chunk is cut at most, so that one slow shard does not hold up the rest.
        min_shard_s: a shard that would take less, going by the step before, costs more to send than it saves (see
            `ShardCut`).
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
        shards_per_worker: int = SHARDS_PER_WORKER,
        min_shard_s: float = MIN_SHARD_S,
        actor_options: dict[str, Any] | None = None,
        run: str | None = None,
    ) -> None:
        # Read here and sent by value: the file need not be on another node, and an edit cannot be half picked up.
        source = RewardSource.read(reward) if isinstance(reward, (str, Path)) else reward
        self._cluster = Cluster.connect()
        self._run = uuid.uuid4().hex[:8] if run is None else run
        self._assembler = Assembler(scoring.on_error, advantages, pad_id_of(tokenizer))
        self._cut = ShardCut(num_workers, shards_per_worker, min_shard_s)
        self._num_texts = num_texts
        self._step = 0
        self._queue: ShardQueue[_Work] = ShardQueue(num_workers)
        self.metrics = DriverMetrics(self._run)
        self._reset()
        options = ShardOptions(text, scoring, resolve_end_token_ids(tokenizer, end_token_ids))
        with ExitStack() as started:
            started.callback(self._cluster.close)
            resources = self._cluster.resources()
            self._store_bytes = resources.object_store_bytes
            spec = (tokenizer, source, options)
            self._pool = MaterializePool(self._run, num_workers, resources, actor_options, spec)
            started.callback(self._pool.close)
            self._pool.start()
            self._close = started.pop_all().close

    @property
    def process_ids(self) -> list[int]:
        """Of the actors that were there at the start."""
        return self._pool.process_ids

    def _reset(self) -> None:
        self._running: dict[ray.ObjectRef[ShardSummary], _Running] = {}
        self._done: dict[int, ShardSummary] = {}
        self._chunks: dict[int, _Chunk] = {}
        self._groups = self._rows = self._bytes = 0
        self._queue.clear()

    def materialize(self, rollout: RolloutBatch, items: Sequence[PromptItem]) -> MaterializedBatch:
        self.submit(rollout, items)
        return self.gather()

    def submit(self, chunk: RolloutBatch, items: Sequence[PromptItem]) -> None:
        """
        Raises (the step is given up):
            ValueError: not one item per group.
            RunError: the step does not fit into the object store, or a shard of it failed.
        """
        with self._giving_up():
            if len(items) != chunk.num_groups:
                raise ValueError(f"{len(items)} prompt items for {chunk.num_groups} prompt groups.")
            self._bytes += chunk.nbytes
            if self._bytes > self._store_bytes:
                raise too_small_store(self._bytes, self._store_bytes, "there")
            stored = put(chunk)
        self.submit_ref(stored, ChunkInfo.of(chunk), items, first_group=self._groups, first_row=self._rows)
        self._groups += chunk.num_groups
        self._rows += chunk.num_completions

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
        with self._giving_up():
            if self._running:
                self.advance(timeout_s=0)  # who is idle decides how the chunk is cut
            rows_G1 = offsets_of(info.group_sizes_G)
            if info.group_sizes_G.size:  # an empty chunk stands at the place of the next one
                self._chunks[first_group] = _Chunk(chunk, int(rows_G1[-1]))
            for start, stop, seconds in self._cut.shards(info, self._queue.idle):
                num_texts = max(self._num_texts - first_row - int(rows_G1[start]), 0)
                order = ShardOrder(start, stop, light(items[start:stop]), first_group + start, num_texts)
                name = f"step {self._step}, {span_of('prompt', first_group + start, first_group + stop)}"
                self._queue.add(Shard(first_group + start, stop - start, _Work(chunk, order, name), seconds))
            self._hand_out()

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
        with self._giving_up():
            self._hand_out()
            while self._running:
                ready = self._wait(timeout_s)
                if not ready:
                    return
                for ref, result in zip(ready, get_or_errors(ready), strict=True):
                    if ref in self._running:  # else it was lost with an earlier one
                        self._take_in(ref, result)
                self._hand_out()
                if not to_the_end:
                    timeout_s = 0

    def _wait(self, timeout_s: float | None) -> list[ray.ObjectRef[ShardSummary]]:
        """Shards that are done; none only where there was a time limit."""
        running = list(self._running)
        if timeout_s is None and not self._queue:
            # No actor waits for a shard of its own, so there is no need to wake up for each result.
            ready, _ = ray.wait(running, num_returns=len(running), timeout=LOOK_UP_S)
            if ready:
                return list(ready)
        ready, _ = ray.wait(running, num_returns=len(running) if timeout_s == 0 else 1, timeout=timeout_s)
        return list(ready)

    def gather(self) -> MaterializedBatch:
        """The step as a batch, and a fresh start. The tokens stay in the object store.

        Raises:
            RewardError: a reward failed and the policy is to stop.
            RunError: a shard failed, or its actor died on it too often.
        """
        try:
            self.advance(timeout_s=None, to_the_end=True)
            summaries = [self._done[key] for key in sorted(self._done)]
            chunks = [self._chunks[key] for key in sorted(self._chunks)]
            packs = RefPacks([chunk.tokens for chunk in chunks])
            batch = self._assembler.assemble(summaries, packs, [chunk.num_rows for chunk in chunks])
            self._cut = self._cut.learn_from(batch)
            return batch
        finally:
            self._abandon()

    def begin_step(self, step: int) -> None:
        """Name the tasks that follow after this step."""
        self._step = step
        self.metrics.step.set(step)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> RayMaterializer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hand_out(self) -> None:
        while (assigned := self._queue.assign()) is not None:
            worker, shard = assigned
            work = shard.payload
            summary = self._pool.call(worker, f"materialize {work.name}", work.chunk, work.order)
            self._running[summary] = _Running(worker, shard)
        self.metrics.record_queue_length(len(self._queue))

    def _take_in(self, ref: ray.ObjectRef[ShardSummary], result: ShardSummary | RayError) -> None:
        running = self._running[ref]
        if isinstance(result, (RayActorError, OutOfMemoryError)):
            self._replace(running.worker, type(result).__name__)
            return
        if isinstance(result, RayError):
            raise plain_error(result) from result
        del self._running[ref]
        self._queue.finished(running.worker, running.shard)
        self._done[running.shard.first_group] = result
        if result.failures and self._assembler.on_error == "fail":
            self._queue.drop_after(running.shard.first_group)

    def _replace(self, worker: int, cause: str) -> None:
        """A new actor in the place of a dead one; what that one had goes back to the front of the queue.

        It worked on the oldest of its shards (finished ones were taken in before); the others were only lost with it.
        """
        self._pool.replace(worker)
        self.metrics.add_actor_death()
        lost = [ref for ref, running in self._running.items() if running.worker == worker]
        for ref in reversed(lost):
            self._queue.lost(worker, self._running.pop(ref).shard, cause, guilty=ref is lost[0])

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Give the step up where something fails: nothing of it must get into the next one."""
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Let go of what is still running, whose results are not wanted, and begin afresh."""
        for ref in self._running:
            ray.cancel(ref)
        self._reset()
