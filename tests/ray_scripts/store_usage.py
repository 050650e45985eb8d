"""100 steps of 20 MB chunks in a store of 300 MB, all actors on one CPU; prints how full the store was after each step, and
whether anything was spilled."""

from __future__ import annotations

import json

import numpy as np
import ray
from conftest import make_tokenizer
from ray._private.internal_api import memory_summary
from ray_support import items_of

from areno.materialize import RolloutBatch
from ray_workers import RayMaterializer

CAPACITY = 300 << 20


def reward(record: object) -> float:
    return 1.0


class Reader:
    """Reads chunks as a train worker does."""

    def read(self, *chunks: RolloutBatch) -> tuple[int, int]:
        return sum(chunk.nbytes for chunk in chunks), sum(int(chunk.response_tokens_T[-1]) for chunk in chunks)


def main() -> None:
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=CAPACITY,
        logging_level="error",
        log_to_driver=False,
    )
    rng = np.random.default_rng(0)
    rows = [[rng.integers(0, 300, 156_000) for _ in range(4)] for _ in range(4)]
    rollout = RolloutBatch.from_rows([[1]] * 4, rows, [[-rng.random(r.size) for r in group] for group in rows])
    used = []
    readers = [ray.remote(Reader).options(num_cpus=0.3).remote() for _ in range(2)]
    with RayMaterializer(make_tokenizer(), reward, num_workers=1, actor_options={"num_cpus": 0.4}) as materializer:
        for step in range(100):
            materializer.begin_step(step)
            batch = materializer.materialize(rollout, items_of(4))
            refs = batch.flat_packs.chunks
            assert len(refs) == 1
            read = ray.get([reader.read.remote(*refs) for reader in readers])
            assert read[0] == read[1]
            chunk_bytes = read[0][0]
            del refs, batch
            free = ray.available_resources()["object_store_memory"]
            used.append(round((CAPACITY - free) / 2**20))
        summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    ray.shutdown()
    print(json.dumps({"mb": used, "chunk_mb": chunk_bytes / 2**20, "spilled": "Spilled" in summary, "summary": summary}))


main()
