"""What a step costs, counted instead of timed: function calls, allocations, copies, Ray calls and objects.

A loop over tokens, a copy too many or a summary that grows with the tokens fails here, on any machine.
"""

from __future__ import annotations

import pickle
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from areno.api import PromptItem
from areno.materialize import LocalMaterializer, RolloutBatch
from areno.materialize.decode import make_decoder
from areno.materialize.pack import FlatPack
from areno.materialize.plan import plan_dispatch, plan_shards
from areno.materialize.shard import ShardMaterializer, ShardOptions, ShardTask

GROUPS, SAMPLES, PROMPT = 8, 4, 5
ROWS = GROUPS * SAMPLES
SHORT, LONG = 20, 900  # tokens of a completion


def rollout_of(length: int) -> RolloutBatch:
    rng = np.random.default_rng(0)
    tokens = ROWS * length
    return RolloutBatch(
        prompt_tokens_P=rng.integers(0, 600, GROUPS * PROMPT).astype(np.int32),
        prompt_offsets_G1=np.arange(GROUPS + 1) * PROMPT,
        group_offsets_G1=np.arange(GROUPS + 1) * SAMPLES,
        response_tokens_T=rng.integers(0, 600, tokens).astype(np.int32),
        response_logprobs_T=-rng.random(tokens).astype(np.float32),
        response_offsets_N1=np.arange(ROWS + 1) * length,
        finish_N=np.zeros(ROWS, dtype=np.uint8),
    )


def items() -> list[PromptItem]:
    return [PromptItem(f"prompt {g}", None, [], {}) for g in range(GROUPS)]


def reward(record: Any) -> float:
    return float(record.metadata["sample_index"])


def calls_of(work: Callable[[], Any]) -> int:
    """Calls of Python and C functions that `work` makes."""
    count = 0

    def on_event(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    work()  # what is only done the first time does not count
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """Result of `work`, and the bytes that it held at most while it ran (its result among them)."""
    work()
    tracemalloc.start()
    try:
        result = work()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_function_calls_do_not_grow_with_the_tokens(tokenizer: Any, layout: Any) -> None:
    counts = []
    with LocalMaterializer(tokenizer, reward) as local:
        for length in (SHORT, LONG):
            rollout = rollout_of(length)

            def step(rollout: RolloutBatch = rollout) -> None:
                for _ in local.materialize(rollout, items()).train_packs(8, layout=layout):
                    pass

            counts.append(calls_of(step))
    assert counts[0] == counts[1]
    assert counts[1] < 80 * ROWS + 1000


def test_driver_calls_do_not_grow_with_the_tokens() -> None:
    lens = [np.full(ROWS, PROMPT + length) for length in (SHORT, LONG)]
    counts = [
        calls_of(lambda n=n: (plan_shards(n, 8), plan_dispatch(n, n - PROMPT, world_size=4, mini_bs=4))) for n in lens
    ]
    assert counts[0] == counts[1]


def test_decoding_holds_one_block_beside_the_texts(tokenizer: Any) -> None:
    decoder = make_decoder(tokenizer, skip_special=False)
    peaks = []
    for length in (8 * LONG, 32 * LONG):  # several blocks each
        rollout = rollout_of(length)
        offsets = rollout.response_offsets_N1
        texts, peak = peak_of(lambda r=rollout, o=offsets: decoder.decode(r.response_tokens_T, o[:-1], o[1:]))
        peaks.append((peak - sum(map(sys.getsizeof, texts))) / (1 << 17))
    # A block's ids beside the texts; its bytes and their edges are Arrow's, which frees them block by block.
    assert max(peaks) < 8
    assert pa.total_allocated_bytes() < 16 << 20


def test_rows_are_views_of_the_rollout() -> None:
    rollout = rollout_of(LONG)
    rows, peak = peak_of(lambda: [FlatPack(rollout).row(i, 0.5) for i in range(ROWS)])
    assert peak < 2048 * ROWS
    shard = rollout.groups(2, 5)
    for row, whole in ((rows[9], rollout), (FlatPack(shard).row(1, 0.5), rollout)):
        assert np.shares_memory(row.prompt_P, whole.prompt_tokens_P)
        assert np.shares_memory(row.response_R, whole.response_tokens_T)
        assert np.shares_memory(row.logprobs_R, whole.response_logprobs_T)


@pytest.mark.parametrize(("layout", "per_token", "beside"), [("packed", 33, 1.3), ("padded", 25, 1.1)])
def test_a_micro_batch_is_its_tensors_and_little_else(
    tokenizer: Any, layout: Any, per_token: int, beside: float
) -> None:
    with LocalMaterializer(tokenizer, reward) as local:
        batch = local.materialize(rollout_of(LONG), items())
    rows = np.arange(8)
    pack, peak = peak_of(lambda: batch.train_pack(rows, layout=layout))
    held = sum(value.nbytes for value in pack.values() if not isinstance(value, int))
    assert held <= per_token * 8 * (PROMPT + LONG) + 256
    assert peak <= beside * held + 16384


def test_a_summary_does_not_grow_with_the_tokens(tokenizer: Any) -> None:
    shards = ShardMaterializer(tokenizer, reward, ShardOptions())
    sizes = []
    for length in (SHORT, LONG):
        summary = shards.run(ShardTask(rollout_of(length), tuple(items())))
        sizes.append(len(pickle.dumps(summary)))
    shards.close()
    assert abs(sizes[0] - sizes[1]) < 64  # integers of other widths
    assert sizes[1] < 4096 + 64 * ROWS


def test_object_store_bytes_per_response_token() -> None:
    """A token is stored once, as its id and its logprob; beside it only what prompts and rows cost."""
    rollout = rollout_of(LONG)
    assert len(pickle.dumps(rollout, protocol=5)) / rollout.num_response_tokens < 8.1


@pytest.mark.ray
def test_ray_calls_and_objects_of_a_step(ray_session: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One put, one call per shard, and at most a get and a wait for each, whatever the tokens."""
    from ray_workers import RayMaterializer
    from ray_workers.shard_queue import ShardQueue

    counts: dict[str, int] = {}

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return real(*args, **kwargs)

        return call

    options: dict[str, Any] = {"shards_per_worker": 2, "min_shard_s": 0, "actor_options": {"num_cpus": 1}}
    with RayMaterializer(tokenizer, reward, num_workers=2, **options) as there:
        for name in ("put", "get", "wait"):
            monkeypatch.setattr(ray_session, name, counting(name, getattr(ray_session, name)))
        monkeypatch.setattr(ShardQueue, "finished", counting("calls", ShardQueue.finished))
        for length in (SHORT, LONG):
            counts.clear()
            there.materialize(rollout_of(length), items())
            assert counts["put"] == 1
            assert counts["calls"] == 4
            assert counts["get"] <= 4
            assert counts["wait"] <= 4
