"""The materialize actors of a run: started, called, replaced when they die, and ended."""

from __future__ import annotations

from typing import Any

import ray

from areno.materialize.rollout_batch import RolloutBatch
from areno.materialize.shard import Reward, ShardOptions, ShardSummary
from ray_workers.actors import START_TIMEOUT_S, end_actors, start_actor
from ray_workers.calls import get_all
from ray_workers.cluster import Resources, check_free, demand_of, share_of
from ray_workers.materialize_actor import MaterializeWorker, ShardOrder
from ray_workers.refs import StoredSpec


class MaterializePool:
    """
    Args:
        run: label of the run; the actors' namespace.
        resources: what the cluster has; CPUs are shared out by default.
        actor_options: passed to Ray for each actor.
        spec: tokenizer, reward and options. Held in the object store, so that an actor that comes later finds it.
    """

    def __init__(
        self,
        run: str,
        num_workers: int,
        resources: Resources,
        actor_options: dict[str, Any] | None,
        spec: tuple[Any, Reward, ShardOptions],
    ) -> None:
        self._run = run
        self._spec = StoredSpec(ray.put(spec))
        # Reward functions may use signals, so they must run on the main thread, which they only do one at a time.
        self._options = {
            "num_cpus": share_of(resources.cpus, num_workers),
            **(actor_options or {}),
            "max_concurrency": 1,
        }
        self._num_workers = num_workers
        self._replaced = 0
        self.actors: list[Any] = []
        self.process_ids: list[int] = []

    def start(self) -> None:
        """
        Raises:
            UsageError: the actors do not fit, or the reward file cannot be used.
            RunError: they do not start in time.
        """
        check_free(demand_of(self._options, self._num_workers))
        for i in range(self._num_workers):
            self.actors.append(self._new(f"materialize-{i}"))
        self.process_ids = get_all([a.ready.remote() for a in self.actors], START_TIMEOUT_S, "materialize actors")

    def call(
        self, worker: int, name: str, chunk: ray.ObjectRef[RolloutBatch], order: ShardOrder
    ) -> ray.ObjectRef[ShardSummary]:
        """Have a worker materialize a shard after those that it was given before."""
        summary: ray.ObjectRef[ShardSummary] = self.actors[worker].run.options(name=name).remote(chunk, order)
        return summary

    def replace(self, worker: int) -> None:
        """A new actor in the place of one that died."""
        ray.kill(self.actors[worker])  # it may only be out of reach
        self._replaced += 1
        self.actors[worker] = self._new(f"materialize-{worker}-again-{self._replaced}")

    def close(self) -> None:
        actors, self.actors = self.actors, []
        end_actors(actors)

    def _new(self, name: str) -> Any:
        return start_actor(MaterializeWorker, name, self._run, self._options, self._spec)
