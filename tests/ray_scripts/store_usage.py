"""100 steps of 20 MB packs in a store of 300 MB; prints how full it was after each, and whether anything was spilled."""

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


def main() -> None:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=CAPACITY,
        logging_level="error",
        log_to_driver=False,
    )
    rng = np.random.default_rng(0)
    rows = [[rng.integers(0, 300, 156_000) for _ in range(4)] for _ in range(4)]
    rollout = RolloutBatch.from_rows([[1]] * 4, rows, [[-rng.random(r.size) for r in group] for group in rows])
    used = []
    with RayMaterializer(make_tokenizer(), reward, num_workers=1) as materializer:
        for step in range(100):
            materializer.begin_step(step)
            batch = materializer.materialize(rollout, items_of(4))
            # As a train worker does: look at a row of each pack, here in the driver's process.
            pack_bytes = sum(pack.nbytes for pack in batch.flat_packs)
            assert len(next(iter(batch.train_packs(1)))["input_ids"][0]) > 100_000
            free = ray.available_resources()["object_store_memory"]
            used.append(round((CAPACITY - free) / 2**20))
        summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    ray.shutdown()
    print(json.dumps({"mb": used, "pack_mb": pack_bytes / 2**20, "spilled": "Spilled" in summary, "summary": summary}))


main()
