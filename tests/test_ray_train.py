"""Train workers as one: any number of them takes the same step, and all of them end with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_fixtures import VOCAB, tiny_policy, tiny_tokenizer
from ray_support import hash_reward, items_of, random_rollout

from areno.config import RunConfig, build
from areno.engine.learner import Learner
from areno.engine.reducer import DistributedReducer, Rendezvous, join_store, open_store
from areno.engine.worker import Engine, loss_of
from areno.executor import TrainReport, plan_step
from areno.materialize import LocalMaterializer
from areno.materialize.materializer import MaterializedBatch

pytest.importorskip("ray")

from ray_workers.train_job import train_orders
from ray_workers.train_worker import TrainJob, TrainWorker

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

STEPS = 5


class Recording:
    """A reducer that keeps the gradients of its first step."""

    def __init__(self, inner: DistributedReducer) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.first: Any = None

    def sum_gradients(self, weights: Any) -> None:
        self._inner.sum_gradients(weights)
        if self.first is None:
            self.first = np.concatenate([w.grad.numpy().ravel() for w in weights])

    def sum_vector(self, values: torch.Tensor) -> torch.Tensor:
        return self._inner.sum_vector(values)


class Rank:
    """A process that can be any rank of one group after the other, around the train worker's own code."""

    def open(self, world_size: int) -> Rendezvous:
        torch.set_num_threads(1)
        self.store, rendezvous = open_store("127.0.0.1", world_size)
        return rendezvous

    def run(
        self, rank: int, config: RunConfig, rendezvous: Rendezvous, steps: list[tuple[TrainJob, list[Any]]]
    ) -> tuple[Any, str, list[TrainReport], Any]:
        """The first gradient, the digest of the weights at the end, the reports, and the weights."""
        import ray

        world_size = config.basic.world_size
        torch.set_num_threads(1)
        store = self.store if rank == 0 else join_store(rendezvous, world_size)
        inner = DistributedReducer(store, rank=rank, world_size=world_size, device=torch.device("cpu"))
        try:
            reducer = Recording(inner)
            policy = tiny_policy(torch.float64)
            worker = TrainWorker(f"train-{rank}", "test", config, rank)
            rollout: Any = None
            learner = Learner(policy, config.train, loss_of(config), temperature=1.0, reducer=reducer)
            worker._engine = Engine(policy, rollout, learner)
            reports = [worker.train(job, *ray.get(refs)) for job, refs in steps]
            weights = np.concatenate([p.detach().numpy().ravel() for p in policy.model.parameters()])
            return reducer.first, worker.weights_digest(), reports, weights
        finally:
            inner.close()


@pytest.fixture(scope="module")
def ranks(ray_session: Any) -> Iterator[list[Any]]:
    actors = [ray_session.remote(Rank).options(num_cpus=0.5).remote() for _ in range(4)]
    yield actors
    for actor in actors:
        ray_session.kill(actor)


def config(world_size: int, **values: Any) -> RunConfig:
    base = {"ckpt": "c", "dataset_path": "d", "reward_fn_path": "r", "materialize_backend": "ray", "algo": "grpo"}
    return build({**base, "world_size": world_size, "dtype": "float64", "mini_bs": 4, "lr": 1e-3, **values})


def batches(groups: int, samples: int) -> list[MaterializedBatch]:
    made = LocalMaterializer(tiny_tokenizer(), hash_reward)
    return [
        made.materialize(random_rollout(groups, samples, 40, seed=step, vocab=VOCAB), items_of(groups))
        for step in range(STEPS)
    ]


def train(ray: Any, ranks: list[Any], settings: RunConfig, steps: list[MaterializedBatch]) -> list[Any]:
    """What each rank of a group of this size comes to."""
    world_size = settings.basic.world_size
    per_rank: list[list[tuple[TrainJob, list[Any]]]] = [[] for _ in range(world_size)]
    for batch in steps:
        refs = [ray.put(pack.rollout) for pack in batch.flat_packs]
        for rank, order in enumerate(
            train_orders(plan_step(batch, settings, world_size=world_size), batch, world_size)
        ):
            per_rank[rank].append((order.job, [refs[i] for i in order.chunks]))
    rendezvous = ray.get(ranks[0].open.remote(world_size))
    return ray.get([ranks[r].run.remote(r, settings, rendezvous, per_rank[r]) for r in range(world_size)])


def relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("values", [{"algo": "grpo"}, {"algo": "gspo", "pack_layout": "padded"}], ids=["grpo", "gspo"])
def test_the_step_does_not_depend_on_the_number_of_workers(
    ray_session: Any, ranks: list[Any], values: dict[str, Any]
) -> None:
    steps = batches(10, 3)
    ((gradient, _, reports, weights),) = train(ray_session, ranks, config(1, **values), steps)
    for world_size in (2, 3, 4):  # 30 rows on 4 workers: 8, 8, 7 and 7
        results = train(ray_session, ranks, config(world_size, **values), steps)
        assert len({digest for _, digest, _, _ in results}) == 1
        for its_gradient, _, its_reports, its_weights in results:
            assert relative(its_gradient, gradient) < 1e-9
            assert relative(its_weights, weights) < 1e-9
            for mine, theirs in zip(reports, its_reports, strict=True):
                assert mine.loss == pytest.approx(theirs.loss, rel=1e-9, abs=1e-12)
                assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)
                assert mine.stats == pytest.approx(theirs.stats, rel=1e-6, abs=1e-9)


def test_fewer_rows_than_workers(ray_session: Any, ranks: list[Any]) -> None:
    steps = batches(1, 3)
    ((gradient, _, _, weights),) = train(ray_session, ranks, config(1), steps)
    results = train(ray_session, ranks, config(4), steps)
    assert len({digest for _, digest, _, _ in results}) == 1
    for its_gradient, _, _, its_weights in results:
        assert relative(its_gradient, gradient) < 1e-9
        assert relative(its_weights, weights) < 1e-9


def test_the_port_is_held_from_the_moment_it_is_chosen() -> None:
    import socket

    store, rendezvous = open_store("127.0.0.1", 1)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", rendezvous.port))
    del store
