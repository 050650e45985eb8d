"""What the tests of the Ray back end share."""

from __future__ import annotations

from typing import Any

import numpy as np

from areno.api import PromptItem, RewardRecord
from areno.materialize import RolloutBatch
from areno.materialize.materializer import MaterializedBatch


def hash_reward(record: RewardRecord) -> float:
    """Depends on every character of prompt and completion, and on the record."""
    text = f"{record.prompt}|{record.completion}|{record.answer}"
    return (sum(i * b for i, b in enumerate(text.encode("utf-8"), 1)) % 1009) / 7 + len(record.source_record)


def same_batch(left: MaterializedBatch, right: MaterializedBatch) -> None:
    """Equal bit for bit: rewards, advantages, statistics, and the train packs of any micro-batch size."""
    for name in (
        "rewards",
        "advantages",
        "scored",
        "group_sizes",
        "row_lens",
        "response_lens",
        "trainable_tokens",
        "finish",
    ):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype, name
        assert a.tobytes() == b.tobytes(), name
    assert left.logprob_mean == right.logprob_mean
    assert left.texts == right.texts
    assert [f.message for f in left.failures] == [f.message for f in right.failures]
    for size in (1, 5):
        for layout in ("packed", "padded"):
            packs = [list(batch.train_packs(size, layout=layout)) for batch in (left, right)]  # type: ignore[arg-type]
            assert len(packs[0]) == len(packs[1])
            for a, b in zip(*packs, strict=True):
                same_pack(a, b)


def same_pack(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, int):
            assert value == right[key]
            continue
        assert value.dtype == right[key].dtype, key
        assert value.shape == right[key].shape, key
        assert value.numpy().tobytes() == right[key].numpy().tobytes(), key


def random_rollout(groups: int, samples: int, tokens: int, seed: int = 0, vocab: int = 600) -> RolloutBatch:
    """`groups` x `samples` completions of 1 to `tokens` tokens."""
    rng = np.random.default_rng(seed)
    lens = [rng.integers(1, tokens + 1, samples) for _ in range(groups)]
    return RolloutBatch.from_rows(
        [rng.integers(0, vocab, 4) for _ in range(groups)],
        [[rng.integers(0, vocab, n) for n in group] for group in lens],
        [[-rng.random(n).astype(np.float32) for n in group] for group in lens],
    )


def items_of(count: int) -> list[PromptItem]:
    return [PromptItem(f"prompt {g}", [str(g)], [1, 2, 3, 4], {"index": g}) for g in range(count)]
