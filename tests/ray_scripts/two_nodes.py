"""Two nodes on this machine: materialize actors on the one, train workers on the other. Arguments: checkpoint, folder."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from pathlib import Path

import ray
from engine_fixtures import tiny_tokenizer
from ray.cluster_utils import Cluster

from areno.api import PromptBatch, PromptItem
from areno.config import build
from ray_workers.executor import RayExecutor

REWARD = """
import ray
from pathlib import Path

def reward_fn(record):
    node = ray.get_runtime_context().get_node_id()
    (Path({folder!r}) / node).touch()
    return len(record.completion)
"""


def main() -> None:
    folder = Path(sys.argv[2])
    (folder / "nodes").mkdir()
    (folder / "reward").mkdir()
    reward = folder / "reward" / "reward.py"
    reward.write_text(REWARD.format(folder=str(folder / "nodes")))
    cluster = Cluster()
    store = 200 << 20
    cluster.add_node(num_cpus=2, resources={"materialize": 2}, object_store_memory=store, include_dashboard=False)
    cluster.add_node(num_cpus=2, resources={"train": 2}, object_store_memory=store)
    config = build(
        {
            "ckpt": sys.argv[1],
            "dataset_path": "d",
            "reward_fn_path": str(reward),
            "materialize_backend": "ray",
            "ray_address": cluster.address,
            "materialize_workers": 2,
            "world_size": 2,
            "batch_size": 6,
            "n_samples": 4,
            "max_new_tokens": 40,
            "device": "cpu",
        }
    )
    executor = RayExecutor.from_config(
        config,
        tiny_tokenizer(),
        train_options={"resources": {"train": 1}},
        materialize_options={"resources": {"materialize": 1}},
    )
    nodes = {n["NodeID"]: "train" if "train" in n["Resources"] else "materialize" for n in ray.nodes()}
    shutil.rmtree(reward.parent)  # the other node need not have it
    prompts = PromptBatch([PromptItem(f"{i}", None, [10 + i, 11], {}) for i in range(6)], 0, 0, 0, 0)
    reports = [executor.train(executor.materialize(executor.rollout(prompts, step))) for step in (1, 2)]
    where = [
        actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        for actor in executor._group._actors
    ]
    found = {
        "scored_on": sorted(nodes[path.name] for path in (folder / "nodes").iterdir()),
        "trained_on": [nodes[node] for node in ray.get(where)],
        "digests": len(set(executor._group.weights_digests())),
        "loss_is_finite": all(math.isfinite(report.loss) for report in reports),
    }
    executor.close()
    # The cluster that was joined goes on, without our actors.
    found["left"] = ray.is_initialized()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    found["nodes_after"] = sum(node["Alive"] for node in ray.nodes())
    deadline = time.monotonic() + 20
    while (actors := ray.util.list_named_actors(all_namespaces=True)) and time.monotonic() < deadline:
        time.sleep(0.2)
    found["actors_after"] = actors
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(found))


main()
