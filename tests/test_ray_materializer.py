"""The Ray materializer: the same bits as the local one, however it is cut up and in whatever order it is done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray_support import hash_reward, items_of, random_rollout, same_batch
from strategies import items_for, rollouts

from areno.api import PromptItem, RewardRecord
from areno.errors import RunError
from areno.materialize import LocalMaterializer, RolloutBatch

ShardQueue = pytest.importorskip("ray_workers.shard_queue").ShardQueue

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


@pytest.fixture(scope="module")
def pool(ray_session: Any, tokenizer: Any) -> Iterator[Any]:
    """A materializer with three actors. `use` lets it work with fewer of them."""
    from ray_workers import RayMaterializer

    with RayMaterializer(tokenizer, hash_reward, num_workers=3, num_texts=3, min_shard_s=0) as materializer:
        yield materializer


def use(pool: Any, workers: int, shards: int) -> Any:
    """The pool with its first actors only, and chunks cut into so many shards."""
    pool._queue = ShardQueue(workers)
    pool._cut = replace(pool._cut, workers=shards, shards_per_worker=1)
    return pool


def chat_items(rollout: RolloutBatch) -> list[PromptItem]:
    """Prompts that were chats, with text of several scripts."""
    return [
        PromptItem(f"<|user|>来日方长 é 🙂 {g}\n<|assistant|>\n", [f"→{g}"], [], {"messages": [{"role": "user"}] * g})
        for g in range(rollout.num_groups)
    ]


@settings(max_examples=60)
@given(rollouts(max_groups=7), st.sampled_from([1, 2, 3]), st.integers(1, 6), st.booleans(), st.data())
def test_equals_the_local_one_bit_for_bit(
    pool: Any, tokenizer: Any, rollout: RolloutBatch, workers: int, shards: int, chat: bool, data: st.DataObject
) -> None:
    items = chat_items(rollout) if chat else items_for(rollout)
    local = LocalMaterializer(tokenizer, hash_reward, num_texts=3).materialize(rollout, items)
    materializer = use(pool, workers, shards * workers)
    same_batch(local, materializer.materialize(rollout, items))
    cut = data.draw(st.integers(0, rollout.num_groups))
    materializer.submit(rollout.groups(0, cut), items[:cut])
    materializer.submit(rollout.groups(cut, rollout.num_groups), items[cut:])
    same_batch(local, materializer.gather())


def test_a_large_batch_equals_the_local_one(pool: Any, tokenizer: Any) -> None:
    rollout = random_rollout(24, 6, 700)  # packs that are too large to travel inside of messages
    items = items_for(rollout, tokenizer)
    local = LocalMaterializer(tokenizer, hash_reward, num_texts=3).materialize(rollout, items)
    for workers in (1, 2, 3):
        same_batch(local, use(pool, workers, 5).materialize(rollout, items))


def test_actors_have_readable_names(pool: Any, ray_session: Any) -> None:
    namespace = f"areno-{pool._run}"
    for i in range(3):
        actor = ray_session.get_actor(f"materialize-{i}", namespace=namespace)
        assert ray_session.get(actor.ready.remote()) == pool.process_ids[i]
        name = ray_session.get(actor.__ray_call__.remote(repr))
        assert name == f"materialize-{i}"


def test_arrays_reach_the_actor_without_a_copy(pool: Any, ray_session: Any) -> None:
    rollout = random_rollout(4, 4, 5000)

    def look(_: Any, chunk: RolloutBatch) -> list[tuple[bool, bool]]:
        part = chunk.groups(1, 3)
        arrays = (chunk.response_tokens_T, chunk.response_logprobs_T, part.response_tokens_T, part.response_logprobs_T)
        return [(a.flags.owndata, a.flags.writeable) for a in arrays]

    flags = ray_session.get(pool._pool.actors[0].__ray_call__.remote(look, ray_session.put(rollout)))
    assert flags == [(False, False)] * 4


def test_flat_packs_are_views_of_the_store_that_nobody_can_write_to(pool: Any) -> None:
    batch = pool.materialize(random_rollout(6, 6, 5000), items_of(6))
    for pack in batch.flat_packs:
        row = pack.row(3, 0.5)
        for array in (row.prompt_P, row.response_R, row.logprobs_R):
            assert not array.flags.owndata
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True


def test_chunks_without_groups_leave_no_gap(pool: Any, tokenizer: Any) -> None:
    rollout, items = random_rollout(4, 3, 40), items_of(4)
    nothing = RolloutBatch.from_rows([], [], [])
    local = LocalMaterializer(tokenizer, hash_reward, num_texts=3).materialize(rollout, items)
    for chunk, its_items in ((nothing, []), (rollout.groups(0, 2), items[:2]), (nothing, []), (nothing, [])):
        pool.submit(chunk, its_items)
    pool.submit(rollout.groups(2, 4), items[2:])
    pool.submit(nothing, [])
    same_batch(local, pool.gather())


def test_fetching_a_chunk_again_takes_no_more_memory(ray_session: Any) -> None:
    size = 12_500_000  # 100 MB

    @ray_session.remote(num_cpus=0.1)  # type: ignore[untyped-decorator]
    class Reader:
        def grown(self, refs: list[Any]) -> int:
            read: list[RolloutBatch] = []
            before = 0
            for _ in range(10):
                read.append(ray_session.get(refs[0]))
                chunk = read[-1]
                assert float(chunk.response_logprobs_T.sum()) + int(chunk.response_tokens_T.sum()) == size
                before = before or self.resident()  # modules are imported and every page is touched
            return self.resident() - before

        def resident(self) -> int:
            pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")

    chunk = RolloutBatch.from_rows([[1]], [[np.ones(size, np.int32)]], [[np.zeros(size, np.float32)]])
    reader = Reader.remote()
    grown = ray_session.get(reader.grown.remote([ray_session.put(chunk)]))
    ray_session.kill(reader)
    assert grown < 0.2 * chunk.nbytes


def test_results_stand_in_prompt_order_when_the_first_shards_end_last(ray_materializer: Any, tokenizer: Any) -> None:
    def slow_first(record: RewardRecord) -> float:
        time.sleep(0.3 - 0.04 * record.metadata["prompt_index"])
        return float(sum(record.tokens) % 101)

    rollout = random_rollout(6, 1, 30)
    batch = ray_materializer(slow_first, num_workers=3, shards_per_worker=2).materialize(rollout, items_of(6))
    for i, pack in enumerate(batch.train_packs(1)):
        tokens = pack["input_ids"][0].tolist()
        assert tokens[4:] == rollout.response_tokens_T[slice(*rollout.response_offsets_N1[i : i + 2])].tolist()
        assert batch.rewards[i] == sum(tokens) % 101


def test_rewards_run_on_the_main_thread_whatever_the_actor_options(ray_materializer: Any) -> None:
    def with_alarm(record: RewardRecord) -> float:
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 60)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        return 1.0

    materializer = ray_materializer(with_alarm, num_workers=1, actor_options={"max_concurrency": 4})
    assert materializer.materialize(random_rollout(4, 2, 5), items_of(4)).rewards.tolist() == [1.0] * 8


def test_a_step_larger_than_the_store_says_so(pool: Any) -> None:
    materializer = pool
    known, materializer._store_bytes = materializer._store_bytes, 1 << 20
    try:
        with pytest.raises(RunError, match=r"too small: \d+ MiB needed, 1 MiB there; pass a larger --object-store-gb"):
            materializer.materialize(random_rollout(4, 4, 50_000), items_of(4))
    finally:
        materializer._store_bytes = known
    assert materializer.materialize(random_rollout(2, 2, 10), items_of(2)).num_rows == 4


def test_wrong_number_of_items(pool: Any) -> None:
    with pytest.raises(ValueError, match="3 prompt items for 2 prompt groups"):
        pool.submit(random_rollout(2, 2, 10), items_of(3))
    assert pool.gather().num_rows == 0
