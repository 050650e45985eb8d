"""The parts of the Ray back end that decide, without a running Ray."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno.config import RunConfig, build
from areno.errors import RunError, UsageError
from areno.executor import TrainReport
from areno.materialize.plan import plan_dispatch

pytest.importorskip("ray")

from ray_workers import cluster
from ray_workers.chunk import ChunkInfo
from ray_workers.cluster import Cluster, ClusterOptions, Resources, check_store, plan_actors
from ray_workers.executor import merge_reports, rollout_parts, step_bytes
from ray_workers.shard_cut import ShardCut
from ray_workers.shard_queue import Shard, ShardQueue
from ray_workers.train_job import train_orders

pytestmark = pytest.mark.ray

GIB = 1 << 30


def config(**values: Any) -> RunConfig:
    base = {"ckpt": "c", "dataset_path": "d", "reward_fn_path": "r", "materialize_backend": "ray"}
    return build({**base, **values})


class TestShardQueue:
    @given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 4), st.randoms())
    def test_every_shard_is_handed_out_once(self, sizes: list[int], workers: int, rng: Any) -> None:
        queue: ShardQueue[int] = ShardQueue(workers)
        for i, size in enumerate(sizes):
            queue.add(Shard(i, size, i))
        out: list[tuple[int, Shard[int]]] = []
        seen = []
        while len(queue) or out:
            while (assigned := queue.assign()) is not None:
                out.append(assigned)
            assert max([w for w, _ in out].count(w) for w in range(workers)) <= 2
            worker, shard = out.pop(rng.randrange(len(out)))
            queue.finished(worker, shard)
            seen.append(shard.payload)
        assert sorted(seen) == list(range(len(sizes)))

    def test_the_least_busy_worker_is_next(self) -> None:
        queue: ShardQueue[str] = ShardQueue(2)
        for i in range(5):
            queue.add(Shard(i, 1, ""))
        taken = [queue.assign() for _ in range(5)]
        assert [t and t[0] for t in taken] == [0, 1, 0, 1, None]
        assert taken[1] is not None
        queue.finished(*taken[1])
        again = queue.assign()
        assert again is not None
        assert (again[0], again[1].first_group) == (1, 4)

    def test_cheap_shards_go_out_ahead_to_whoever_has_the_least_to_do(self) -> None:
        queue: ShardQueue[str] = ShardQueue(2)
        for i, seconds in enumerate([0.08, 0.02, 0.02, 0.02, 0.02, 0.04, 0.08, 0.08, 0.08]):
            queue.add(Shard(i, 1, "", seconds))
        taken = [(w, s.first_group) for w, s in iter(queue.assign, None)]
        assert taken == [(0, 0), (1, 1), (1, 2), (0, 3), (1, 4), (1, 5), (0, 6), (1, 7)]
        assert (len(queue), queue.idle) == (1, 0)

    def test_a_worker_with_room_behind_its_shard_gets_one_whoever_has_less_to_do(self) -> None:
        queue: ShardQueue[str] = ShardQueue(2)
        for i, seconds in enumerate([0.08, 0.19, 0.08, 0.1]):
            queue.add(Shard(i, 1, "", seconds))
        assert [(w, s.first_group) for w, s in iter(queue.assign, None)] == [(0, 0), (1, 1), (0, 2), (1, 3)]

    def test_workers_without_work_are_idle(self) -> None:
        queue: ShardQueue[str] = ShardQueue(3)
        assert queue.idle == 3
        queue.add(Shard(0, 1, ""))
        assert queue.idle == 2
        assert queue.assign() is not None
        assert queue.idle == 2

    def test_tries_are_bounded_and_only_the_guilty_shard_is_blamed(self) -> None:
        queue: ShardQueue[str] = ShardQueue(1)
        queue.add(Shard(4, 3, ""))
        queue.add(Shard(7, 1, ""))
        for _ in range(2):
            taken = {s.first_group: s for _, s in iter(queue.assign, None)}
            queue.lost(0, taken[7], "killed", guilty=False)
            queue.lost(0, taken[4], "killed", guilty=True)
        taken = {s.first_group: s for _, s in iter(queue.assign, None)}
        queue.lost(0, taken[7], "killed", guilty=False)
        with pytest.raises(RunError, match=r"died 3 times on prompts 4 to 6 \(killed\)"):
            queue.lost(0, taken[4], "killed", guilty=True)


class TestShardCut:
    @given(
        st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 64)), max_size=40),
        st.integers(1, 16),
        st.integers(1, 8),
        st.sampled_from([0.0, 1e-8, 1e-5, math.inf]),
        st.sampled_from([0.0, 1e-5, 1.0]),
        st.sampled_from([0.0, 0.005]),
        st.integers(0, 16),
    )
    def test_every_group_once_and_in_order(
        self,
        groups: list[tuple[int, int]],
        workers: int,
        each: int,
        per_token: float,
        per_completion: float,
        min_shard_s: float,
        idle: int,
    ) -> None:
        chunk = ChunkInfo(np.array([g[0] for g in groups], np.int64), np.array([g[1] for g in groups], np.int64))
        shards = ShardCut(workers, each, min_shard_s, per_token, per_completion).shards(chunk, min(idle, workers))
        assert [g for start, stop, _ in shards for g in range(start, stop)] == list(range(len(groups)))
        assert len(shards) <= workers * each
        assert all(seconds >= 0 for _, _, seconds in shards)

    def test_by_what_a_chunk_costs(self) -> None:
        chunk = ChunkInfo(np.full(32, 1000), np.full(32, 8))

        def number(idle: int, tokens_s: float = 0.0, scoring_s: float = 0.0) -> int:
            return len(ShardCut(4, 4, 0.005, tokens_s / 32_000, scoring_s / 256).shards(chunk, idle))

        assert [number(4, s) for s in (0, 0.009, 0.011, 0.03, 10)] == [1, 1, 2, 4, 4]
        assert number(0, tokens_s=10) == 1
        # Scoring is cut finer, to even out, and into equally many for each actor.
        assert [number(0, 0, s) for s in (0.03, 0.07, 0.09, 0.15, 0.17, 10)] == [1, 1, 4, 4, 8, 16]
        assert number(4, tokens_s=math.inf) == 16  # nothing is known of the first step

    def test_shards_of_equal_cost_not_of_equal_tokens(self) -> None:
        chunk = ChunkInfo(np.array([9000, 1000, 1000, 1000]), np.full(4, 8))
        even = ShardCut(2, 1, 0.005, 1e-9, 0.05).shards(chunk, idle=2)
        assert [(a, b) for a, b, _ in even] == [(0, 2), (2, 4)]
        assert [round(s, 3) for _, _, s in even] == [0.8, 0.8]


class TestPlanActors:
    def test_materialize_workers_take_the_cpus_that_are_left(self) -> None:
        plan = plan_actors(Resources(16, 8, GIB), train_workers=8, materialize_workers=None, on_gpu=True)
        assert (plan.materialize_workers, plan.materialize_cpus, plan.train_cpus, plan.train_gpus) == (8, 1.0, 1.0, 1.0)
        plan = plan_actors(Resources(2, 0, GIB), train_workers=2, materialize_workers=None, on_gpu=False)
        assert (plan.materialize_workers, plan.train_gpus) == (1, 0.0)

    @given(st.integers(1, 64), st.integers(0, 64), st.none() | st.integers(1, 200))
    def test_shares_never_exceed_the_whole(self, cpus: int, train: int, materialize: int | None) -> None:
        if train > cpus:
            return
        plan = plan_actors(Resources(cpus, 0, GIB), train_workers=train, materialize_workers=materialize, on_gpu=False)
        assert 1 <= plan.materialize_workers <= cpus
        assert plan.materialize_workers * plan.materialize_cpus + train * plan.train_cpus <= cpus + 1e-9
        assert plan.materialize_cpus > 0

    def test_too_many_are_refused_or_reduced_with_a_message(self) -> None:
        with pytest.raises(UsageError, match=r"--world-size 4 .*Ray has 2: lower it"):
            plan_actors(Resources(16, 2, GIB), train_workers=4, materialize_workers=1, on_gpu=True)
        with pytest.raises(UsageError, match=r"--world-size 4 .*Ray has 2: lower it"):
            plan_actors(Resources(2, 0, GIB), train_workers=4, materialize_workers=1, on_gpu=False)
        plan = plan_actors(Resources(2, 0, GIB), train_workers=1, materialize_workers=64, on_gpu=False)
        assert plan.materialize_workers == 2
        assert plan.notes == ("--materialize-workers 64 reduced to 2: Ray has 2 CPUs.",)


def test_a_step_that_does_not_fit_into_the_store() -> None:
    needed = step_bytes(config(batch_size=128, n_samples=16, max_new_tokens=8192))
    with pytest.raises(
        UsageError, match=r"needs 0\.13 GiB .* has 0\.10 GiB: pass --object-store-gb 0\.3, or lower --batch"
    ):
        check_store(needed, int(0.1 * GIB))
    check_store(needed, GIB)


class TestConnect:
    @pytest.fixture
    def listener(self) -> Iterator[socket.socket]:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            yield listening

    @pytest.fixture(autouse=True)
    def no_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
        monkeypatch.setattr(cluster.ray, "init", lambda **_: pytest.fail("Ray was started"))
        monkeypatch.setattr(cluster, "JOIN_TIMEOUT_S", 0.5)

    def test_nobody_listens(self, listener: socket.socket) -> None:
        port = listener.getsockname()[1]
        listener.close()
        with pytest.raises(UsageError, match=rf"no Ray cluster answers at 127\.0\.0\.1:{port} .*check --ray-address"):
            Cluster.connect(ClusterOptions(address=f"127.0.0.1:{port}"))

    def test_who_listens_never_answers(self, listener: socket.socket) -> None:
        began = time.monotonic()
        with pytest.raises(UsageError, match=r"timed out.*check --ray-address"):
            Cluster.connect(ClusterOptions(address=f"127.0.0.1:{listener.getsockname()[1]}"))
        assert time.monotonic() - began < 5

    def test_something_else_answers(self, listener: socket.socket) -> None:
        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(UsageError, match="what listens there is something else"):
            Cluster.connect(ClusterOptions(address=f"127.0.0.1:{listener.getsockname()[1]}"))
        server.join()

    def test_the_address_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        with pytest.raises(UsageError, match=r"127\.0\.0\.1:1 .*RAY_ADDRESS"):
            Cluster.connect()

    def test_local_mode(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_LOCAL_MODE", "1")
        with pytest.raises(UsageError, match="use --materialize-backend local"):
            Cluster.connect()

    @pytest.mark.parametrize(
        ("shm", "asked", "in_file"),
        [
            (64 << 20, None, True),
            (64 << 20, GIB, True),
            (8 * GIB, None, False),
            (GIB, 2 * GIB, True),
            (4 * GIB, GIB, False),
        ],
    )
    def test_a_small_shm_moves_the_store_to_a_file(
        self, monkeypatch: pytest.MonkeyPatch, shm: int, asked: int | None, in_file: bool
    ) -> None:
        asked_of_ray: dict[str, Any] = {}
        monkeypatch.setattr(cluster.shutil, "disk_usage", lambda _: SimpleNamespace(total=shm))
        monkeypatch.setattr(
            cluster.ray, "init", lambda **given: asked_of_ray.update(given) or SimpleNamespace(dashboard_url=None)
        )
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        found = Cluster.connect(ClusterOptions(object_store_bytes=asked))
        assert ("_plasma_directory" in asked_of_ray) == in_file
        assert len(found.notes) == in_file
        if in_file:
            assert "--shm-size" in found.notes[0]
            assert f"{shm >> 20} MiB" in found.notes[0]


@given(st.integers(1, 70), st.integers(1, 8), st.integers(1, 16), st.integers(1, 100))
def test_rollout_parts_cover_every_prompt_once_and_keep_all_workers_busy(
    prompts: int, world_size: int, n_samples: int, rows: int
) -> None:
    parts = rollout_parts(prompts, config(world_size=world_size, n_samples=n_samples, rollout_rows=rows))
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(prompts))
    assert all((stop - start) * n_samples <= max(rows, n_samples) for start, stop in parts)
    assert len(parts) >= min(prompts, world_size) / 2


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_orders_name_every_row_once_and_only_the_packs_that_are_needed(
    rows: int, world_size: int, mini_bs: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lens = rng.integers(1, 50, rows)
    edges = np.unique(np.concatenate([[0, rows], rng.integers(0, rows + 1, 4)]))
    batch: Any = SimpleNamespace(pack_offsets=edges, advantages=np.arange(rows, dtype=np.float64))
    plan = plan_dispatch(lens, lens, world_size=world_size, mini_bs=mini_bs)
    orders = train_orders(plan, batch, world_size)
    assert len({len(order.job.windows[0][0]) for order in orders}) == 1
    trained = []
    for order in orders:
        used = set()
        for micro_batches, _ in order.job.windows:
            for job in micro_batches:
                used |= set(job.pack_R.tolist())
                places = zip(job.pack_R.tolist(), job.row_R.tolist(), strict=True)
                numbers = [int(edges[order.chunks[pack]]) + row for pack, row in places]
                assert numbers == job.advantage_R.tolist()
                trained += numbers
        assert used == set(range(len(order.chunks)))
    assert sorted(trained) == list(range(rows))


def test_reports_are_merged() -> None:
    def report(memory: float, at: float) -> TrainReport:
        return TrainReport(1, 0.5, 1.0, 1e-3, memory, at, {"policy_loss": 0.5})

    merged = merge_reports([report(1.0, math.nan), report(3.0, 7.0), report(2.0, 6.0)])
    assert (merged.peak_mem_gb, merged.first_forward_at, merged.loss) == (3.0, 6.0, 0.5)
