"""Ray for the suites: started on this machine's cores, with a process that samples rollouts into the object store."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from areno.materialize import RolloutBatch
from benches.case import SCRIPTS
from ray_workers.chunk import ChunkInfo
from ray_workers.materializer import RayMaterializer

ACTORS_AT_ONCE = 8  # on paper: materializers of several sizes are alive at the same time, and take turns


@contextmanager
def ray_session(store_bytes: int = 2 << 30) -> Iterator[Any]:
    import ray

    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        num_cpus=ACTORS_AT_ONCE,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=store_bytes,
        logging_level="error",
        log_to_driver=False,
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def warm_up(step: Callable[[], Any], seconds: float = 2.5, steps: int = 60) -> None:
    """Until pages of the object store are used again: Ray frees objects once a second, and the first use of a page costs
    more than the copy that goes there. A training run is past that after its first steps."""
    end = time.monotonic() + seconds
    for _ in range(steps):
        step()
        if time.monotonic() > end:
            return


def materializer(tokenizer: Any, reward: str, actors: int) -> RayMaterializer:
    return RayMaterializer(tokenizer, reward, num_workers=actors, text="raw", actor_options={"num_cpus": 1})


class Sampler:
    """Stands in for the train workers: holds a rollout and puts it into the object store, chunk by chunk."""

    def __init__(self, path: str) -> None:
        with np.load(path) as file:
            self._rollout = RolloutBatch(**dict(file))

    def sample(self, chunks: int) -> list[tuple[Any, ChunkInfo]]:
        import ray

        edges = np.linspace(0, self._rollout.num_groups, chunks + 1).astype(int).tolist()
        parts = [self._rollout.groups(a, b) for a, b in itertools.pairwise(edges)]
        return [(ray.put(part), ChunkInfo.of(part)) for part in parts]


def submit_all(there: RayMaterializer, sampled: list[tuple[Any, ChunkInfo]], items: list[Any]) -> None:
    """Hand all chunks on, as `RayExecutor` does. The list is emptied, so that the chunks can be freed."""
    group = row = 0
    while sampled:
        chunk, info = sampled.pop(0)
        size = info.group_sizes_G.size
        there.submit_ref(chunk, info, items[group : group + size], first_group=group, first_row=row)
        group, row = group + size, row + int(info.group_sizes_G.sum())
