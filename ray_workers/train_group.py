"""The driver's handle on all train workers: started together, stopped together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from areno.api.models import SamplingParams
from areno.config import RunConfig
from areno.errors import RunError
from areno.executor import TrainReport
from areno.materialize.pack import FlatPack
from areno.materialize.rollout_batch import RolloutBatch
from ray_workers.chunk import ChunkInfo
from ray_workers.materializer import get_all, plain_error
from ray_workers.train_job import WorkerOrder
from ray_workers.train_worker import TrainWorker

PLACE_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 1800.0


class TrainGroup:
    """`train-0` .. `train-W-1`, one GPU each, or CPUs with gloo.

    Raises:
        UsageError: the checkpoint cannot be loaded.
        RunError: the workers do not start.
    """

    def __init__(self, config: RunConfig, tokenizer: Any, run: str, actor_options: dict[str, Any]) -> None:
        actor = ray.remote(TrainWorker)
        self._actors: list[Any] = [
            actor.options(name=f"train-{rank}", namespace=f"areno-{run}", **actor_options).remote(
                f"train-{rank}", config, rank
            )
            for rank in range(config.basic.world_size)
        ]
        try:
            (rendezvous,) = get_all([self._actors[0].open_rendezvous.remote()], PLACE_TIMEOUT_S, "train workers")
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
            num_returns=2, name=f"rollout step {step} prompts {indices[0]}-{indices[-1]}"
        )
        chunk, info = call.remote(prompts, indices, params, step)
        return chunk, info

    def train(
        self, orders: Sequence[WorkerOrder], packs: Sequence[ray.ObjectRef[FlatPack]], step: int
    ) -> list[TrainReport]:
        """Have all workers train on their shares.

        Raises:
            RunError: one of them failed; the others are not waited for.
        """
        calls = [
            actor.train.options(name=f"train step {step}").remote(order.job, *(packs[i] for i in order.packs))
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
        """All results, in rank order; the first failure ends the wait, as the other ranks may wait for the failed one."""
        waiting = list(calls)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=LOAD_TIMEOUT_S)
            if not ready:
                raise RunError(f"the train workers did not {what} within {LOAD_TIMEOUT_S:g} s.")
            try:
                ray.get(ready)
            except RayTaskError as error:
                raise plain_error(error) from error
            except RayActorError as error:
                rank = list(calls).index(ready[0])
                raise RunError(
                    f"train worker {rank} died while it was to {what} (out of memory, or killed from outside): "
                    f"{' '.join(str(error).split())[:300]}"
                ) from error
        return list(ray.get(list(calls)))

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
