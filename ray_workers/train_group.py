"""The driver's handle on all train workers: started together, stopped together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from areno.api.models import SamplingParams
from areno.config import RunConfig
from areno.executor import TrainReport
from areno.materialize.rollout_batch import RolloutBatch
from ray_workers.actors import START_TIMEOUT_S, end_actors, start_actor
from ray_workers.calls import get_all, get_each, span_of
from ray_workers.chunk import ChunkInfo
from ray_workers.cluster import check_free, demand_of
from ray_workers.train_job import WorkerOrder
from ray_workers.train_worker import TrainWorker

# A worker that died is told at once; a step of long answers may take its time.
CALL_TIMEOUT_S = 24 * 3600.0


class TrainGroup:
    """`train-0` .. `train-W-1`, one GPU each, or CPUs with gloo.

    Args:
        actor_options: passed to Ray for each actor (CPUs, GPUs, other resources, scheduling).

    Raises:
        UsageError: there is no room for the actors, or the checkpoint cannot be loaded.
        RunError: the workers do not start.
    """

    def __init__(self, config: RunConfig, tokenizer: Any, run: str, actor_options: dict[str, Any]) -> None:
        check_free(demand_of(actor_options, config.basic.world_size))
        self._actors: list[Any] = []
        try:
            for rank in range(config.basic.world_size):
                self._actors.append(start_actor(TrainWorker, f"train-{rank}", run, actor_options, config, rank))
            (rendezvous,) = get_all([self._actors[0].open_rendezvous.remote()], START_TIMEOUT_S, "train workers")
            boxed = ray.put(tokenizer)
            loading = [a.load.remote(boxed, rendezvous) for a in self._actors]
            self.end_token_ids: tuple[int, ...] = self._collect(loading, "load the model")[0]
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def rollout(
        self, worker: int, prompts: Sequence[Any], indices: Sequence[int], params: SamplingParams, step: int
    ) -> tuple[ray.ObjectRef[RolloutBatch], ray.ObjectRef[ChunkInfo]]:
        """Have one worker sample a chunk. Its tokens stay in the object store."""
        call = self._actors[worker].rollout.options(
            num_returns=2, name=f"rollout step {step}, {span_of('prompt', indices[0], indices[-1] + 1)}"
        )
        chunk, info = call.remote(prompts, indices, params, step)
        return chunk, info

    def info(self, worker: int, ref: ray.ObjectRef[ChunkInfo]) -> ChunkInfo:
        """The small result of a finished `rollout` call.

        Raises:
            RunError: the call failed.
        """
        (info,) = get_each([ref], CALL_TIMEOUT_S, "a rollout did not end", lambda _: self._died(worker, "sample"))
        return info  # type: ignore[no-any-return]

    def train(
        self, orders: Sequence[WorkerOrder], chunks: Sequence[ray.ObjectRef[RolloutBatch]], step: int
    ) -> list[TrainReport]:
        """Have all workers train on their shares.

        Raises:
            RunError: one of them failed; the others are not waited for.
        """
        calls = [
            actor.train.options(name=f"train step {step}").remote(order.job, *(chunks[i] for i in order.chunks))
            for actor, order in zip(self._actors, orders, strict=True)
        ]
        return self._collect(calls, "train")

    def save(self, path: Path) -> Path:
        """Rank 0 writes a checkpoint."""
        (saved,) = self._collect([self._actors[0].save.remote(path)], "save a checkpoint")
        return Path(saved)

    def weights_digests(self) -> list[str]:
        """One digest per worker; they are equal as long as the workers agree."""
        return self._collect([a.weights_digest.remote() for a in self._actors], "read its weights")

    def _collect(self, calls: Sequence[Any], what: str) -> list[Any]:
        """All results, in rank order; the first failure ends the wait."""
        return get_each(
            calls,
            CALL_TIMEOUT_S,
            f"the train workers did not {what}",
            lambda rank: self._died(rank, what),
        )

    def _died(self, rank: int, what: str) -> str:
        return f"train worker {rank} died while it was to {what} (out of memory, or killed from outside)"

    def close(self) -> None:
        actors, self._actors = self._actors, []
        end_actors(actors)
