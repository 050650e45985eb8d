"""A step where /dev/shm is too small for the object store: it runs, and one note says what to do."""

from __future__ import annotations

import json

from conftest import make_tokenizer
from ray_support import hash_reward, items_of, random_rollout

from areno.materialize import LocalMaterializer
from ray_workers import RayMaterializer
from ray_workers.cluster import Cluster, ClusterOptions


def main() -> None:
    rollout = random_rollout(8, 8, 60_000)  # 16 MB of rollout, and as much of packs
    items = items_of(8)
    with Cluster.connect(ClusterOptions(object_store_bytes=200 << 20)) as cluster:
        with RayMaterializer(make_tokenizer(), hash_reward, num_workers=1) as materializer:
            batches = [materializer.materialize(rollout, items) for _ in range(3)]
        local = LocalMaterializer(make_tokenizer(), hash_reward).materialize(rollout, items)
        equal = all(batch.rewards.tobytes() == local.rewards.tobytes() for batch in batches)
    print(json.dumps({"equal": equal, "notes": len(cluster.notes), "note": " ".join(cluster.notes)}))


main()
