"""The local materializer equals the plain way, for every shape a rollout can have."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import items_for, rollouts

from areno.api import PromptItem, RewardRecord, grpo_loss_fn, gspo_loss_fn
from areno.errors import RewardError, RunError
from areno.materialize import LocalMaterializer, RolloutBatch, ScoringOptions
from areno.materialize.materializer import MaterializedBatch


def text_reward(text: str, item: PromptItem) -> float:
    return (sum(text.encode("utf-8")) % 17) / 7 + len(item.record["nested"]["gold"])


def hook(record: RewardRecord) -> float:
    item = PromptItem(record.prompt, record.answer, [], record.source_record)
    return text_reward(record.completion, item)


def check_equal(batch: MaterializedBatch, rollout: RolloutBatch, items: list[PromptItem], tokenizer: Any) -> None:
    sequences, rewards, _ = reference.materialize(rollout, items, tokenizer, text_reward)
    assert batch.rewards.tolist() == rewards
    flat = [s.advantages[-1] for s in sequences if any(not m for m in s.prompt_mask)]
    kept = batch.response_lens > 0
    np.testing.assert_allclose(batch.advantages[kept], flat, rtol=1e-9, atol=1e-9)
    for sequence, advantage in zip(sequences, batch.advantages.tolist(), strict=True):
        # Equal to 1e-9 as just seen; with the same float64 values, the packs must be equal to the bit.
        sequence.advantages = [0.0 if prompt else advantage for prompt in sequence.prompt_mask]
    if rollout.num_response_tokens and rollout.loss_mask_T is None:
        assert batch.logprob_mean == pytest.approx(float(np.mean(rollout.response_logprobs_T, dtype=np.float64)))
    for mini_bs in (1, 3, 100):
        chunks = [sequences[i : i + mini_bs] for i in range(0, len(sequences), mini_bs)]
        masked = rollout.loss_mask_T is not None
        for layout, lay_out in (
            ("packed", reference.packed),
            ("padded", partial(reference.padded, with_loss_mask=masked)),
        ):
            packs = list(batch.train_packs(mini_bs, layout=layout))
            assert len(packs) == len(chunks)
            for pack, chunk in zip(packs, chunks, strict=True):
                reference.equal_packs(pack, lay_out(chunk))


@given(rollouts())
def test_equals_the_reference(tokenizer: Any, rollout: RolloutBatch) -> None:
    items = items_for(rollout)
    with LocalMaterializer(tokenizer, hook) as materializer:
        check_equal(materializer.materialize(rollout, items), rollout, items, tokenizer)


@given(rollouts(masks=True), st.sampled_from(["grpo", "gspo"]))
def test_loss_and_gradient_equal_the_reference(tokenizer: Any, rollout: RolloutBatch, algo: str) -> None:
    items = items_for(rollout)
    sequences, _, _ = reference.materialize(rollout, items, tokenizer, text_reward)
    if not sequences:
        return
    batch = LocalMaterializer(tokenizer, hook).materialize(rollout, items)
    plain = reference.padded(sequences, with_loss_mask=True)
    rng = np.random.default_rng(0)
    square = torch.tensor(-rng.exponential(size=(len(sequences), plain["input_ids"].shape[1] - 1)), requires_grad=True)
    expected = reference.loss(algo, plain, square, 0.2)
    expected.backward()
    fn = {"grpo": grpo_loss_fn, "gspo": gspo_loss_fn}[algo]
    (pack,) = batch.train_packs(len(sequences), layout="packed")
    lens = [len(s.tokens) for s in sequences]
    flat = torch.cat([square.detach()[b, : n - 1] for b, n in enumerate(lens)]).requires_grad_()
    loss = fn(pack, flat, clip_eps=0.2)[0]
    loss.backward()
    assert flat.grad is not None
    assert square.grad is not None
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    sites = torch.cat([square.grad[b, : n - 1] for b, n in enumerate(lens)])
    torch.testing.assert_close(flat.grad, sites, atol=1e-6, rtol=1e-6)


def test_a_batch_of_one_has_arrays_of_its_own(tokenizer: Any) -> None:
    rollout = RolloutBatch.from_rows([[1]], [[[2, 3]]], [[[-1.0, -2.0]]])
    batch = LocalMaterializer(tokenizer, lambda _: 1.5).materialize(rollout, [PromptItem("p", [], [1], {})])
    for name in ("rewards", "advantages", "row_lens", "response_lens", "trainable_tokens", "reward_seconds"):
        assert torch.from_numpy(getattr(batch, name)).numel() == 1
    assert batch.rewards.tolist() == [1.5]


@given(rollouts(), st.data())
def test_chunks_make_the_same_batch(tokenizer: Any, rollout: RolloutBatch, data: st.DataObject) -> None:
    items = items_for(rollout)
    cuts = sorted(data.draw(st.lists(st.integers(0, rollout.num_groups), max_size=3)))
    edges = [0, *cuts, rollout.num_groups]
    materializer = LocalMaterializer(tokenizer, hook, num_texts=5)
    whole = materializer.materialize(rollout, items)
    for a, b in itertools.pairwise(edges):
        materializer.submit(rollout.groups(a, b), items[a:b])
    pieces = materializer.gather()
    assert pieces.rewards.tolist() == whole.rewards.tolist()
    assert pieces.advantages.tolist() == whole.advantages.tolist()
    assert pieces.logprob_mean == whole.logprob_mean
    assert pieces.texts == whole.texts
    for a, b in zip(pieces.train_packs(4), whole.train_packs(4), strict=True):
        reference.equal_packs(a, b)
    assert materializer.gather().num_rows == 0


def test_rewards_stand_with_their_own_tokens(tokenizer: Any) -> None:
    rng = np.random.default_rng(0)
    rollout = RolloutBatch.from_rows(
        [[1]] * 6, [[rng.integers(0, 600, size=5) for _ in range(4)] for _ in range(6)], [[[-1.0] * 5] * 4] * 6
    )
    seen: dict[tuple[int, ...], float] = {}

    def spy(record: RewardRecord) -> float:
        value = float(hash(tuple(record.tokens)) % 1000)
        seen[tuple(record.tokens)] = value
        return value

    batch = LocalMaterializer(tokenizer, spy).materialize(rollout, items_for(rollout))
    for i, row in enumerate(batch.train_packs(1)):
        assert batch.rewards[i] == seen[tuple(row["input_ids"][0].tolist())]


def test_the_record_that_a_reward_sees(tokenizer: Any) -> None:
    rollout = RolloutBatch.from_rows([[5, 6]], [[[7, 8], [9]]], [[[-1.0, -2.0], [-3.0]]], loss_masks=[[[1, 0], [1]]])
    item = PromptItem("中文 é 🙂", ["42"], [5, 6], {"gold": {"deep": [1]}})
    records: list[RewardRecord] = []

    def spoil(record: RewardRecord) -> float:
        records.append(record)
        assert record.prompt == "中文 é 🙂"
        assert record.source_record == {"gold": {"deep": [1]}}
        assert record.answer == ["42"]
        record.source_record["gold"]["deep"].append(2)
        record.answer.append("43")
        record.metadata.clear()
        record.tokens.append(-1)
        return 1.0

    LocalMaterializer(tokenizer, spoil).materialize(rollout, [item])
    assert item.record == {"gold": {"deep": [1]}}
    assert item.solutions == ["42"]
    first = records[0]
    assert first.tokens == [5, 6, 7, 8, -1]
    assert first.logprobs == [0.0, 0.0, -1.0, -2.0]
    assert first.loss_mask == [False, False, True, False]
    assert first.completion == first.final_answer == first.rendered_completion == tokenizer.decode([7, 8])


def test_empty_completions_count_in_the_group(tokenizer: Any) -> None:
    rollout = RolloutBatch.from_rows([[1]], [[[], [3, 3, 3], [], [4] * 5]], [[[], [-1.0] * 3, [], [-1.0] * 5]])
    texts: list[str] = []

    def by_length(record: RewardRecord) -> float:
        texts.append(record.completion)
        return float(len(record.tokens) - 1)

    batch = LocalMaterializer(tokenizer, by_length).materialize(rollout, items_for(rollout))
    assert texts[0] == texts[2] == ""
    assert batch.rewards.tolist() == [0, 3, 0, 5]
    assert batch.trainable_tokens.tolist() == [0, 3, 0, 5]
    np.testing.assert_allclose(batch.advantages, reference.group_advantages([0, 3, 0, 5]))


def test_an_empty_prompt_loses_only_the_first_token(tokenizer: Any) -> None:
    rollout = RolloutBatch.from_rows(
        [[]], [[[3, 4], [5], []]], [[[-1.0] * 2, [-1.0], []]], loss_masks=[[[False, True], [True], []]]
    )
    batch = LocalMaterializer(tokenizer, hook).materialize(rollout, items_for(rollout))
    assert batch.trainable_tokens.tolist() == [1, 0, 0]
    (pack,) = batch.train_packs(3)
    assert int(pack["packed_response_mask"].sum()) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_logprob_is_named(tokenizer: Any, bad: float) -> None:
    rollout = RolloutBatch.from_rows([[1], [2]], [[[3], [4]], [[5], [6]]], [[[-1.0], [-1.0]], [[-1.0], [bad]]])
    with pytest.raises(RunError, match="prompt 1, sample 1 are not finite"):
        LocalMaterializer(tokenizer, hook).materialize(rollout, items_for(rollout))


def some_rewards(tokenizer: Any, values: list[Any], on_error: Any) -> MaterializedBatch:
    n = len(values)
    rollout = RolloutBatch.from_rows([[1]], [[[10 + i] for i in range(n)]], [[[-1.0]] * n])

    def scripted(record: RewardRecord) -> Any:
        value = values[record.metadata["sample_index"]]
        if isinstance(value, BaseException):
            raise value
        return value

    return LocalMaterializer(tokenizer, scripted, scoring=ScoringOptions(on_error=on_error)).materialize(
        rollout, items_for(rollout)
    )


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (None, "none"), (float("nan"), "non_finite"), (float("inf"), "non_finite"), (10**400, "non_finite"),
        ("1.0", "bad_type"), ([1.0], "bad_type"), (1j, "bad_type"), (np.array([1.0]), "bad_type"),
        (torch.ones(1), "bad_type"), (ValueError("boom"), "exception"), (SystemExit(3), "exception"),
        (RecursionError("deep"), "exception"),
    ],
)  # fmt: skip
def test_failure_policies(tokenizer: Any, value: Any, cause: str) -> None:
    with pytest.raises(RewardError, match="prompt 0, sample 1 failed"):
        some_rewards(tokenizer, [1, value, 0], "fail")
    skipped = some_rewards(tokenizer, [1, value, 0], "skip")
    assert skipped.scored.tolist() == [True, False, True]
    np.testing.assert_allclose(skipped.advantages, [1, 0, -1])
    assert [f.cause for f in skipped.failures] == [cause]
    (pack,) = skipped.train_packs(3)
    learned = pack["packed_seq_ids"][pack["packed_response_mask"]].tolist()
    assert learned == [0, 2]
    (pack,) = skipped.train_packs(3, layout="padded")
    assert pack["loss_mask"].any(dim=1).tolist() == [True, False, True]
    valued = some_rewards(tokenizer, [1, value, 0], -2.0)
    assert valued.rewards.tolist() == [1, -2, 0]
    assert valued.scored.all()
    assert len(valued.failures) == 1


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.bool_(True), np.int64(1), np.array(1.0), torch.tensor(1), torch.tensor(True)],
)
def test_accepted_rewards(tokenizer: Any, value: Any) -> None:
    assert some_rewards(tokenizer, [value, 0], "fail").rewards.tolist() == [1.0, 0.0]


def test_a_group_without_any_reward_has_no_effect(tokenizer: Any) -> None:
    batch = some_rewards(tokenizer, [None, None], "skip")
    assert not batch.scored.any()
    assert (batch.advantages == 0).all()
    assert (batch.learnable_tokens == 0).all()


def test_interrupting_is_not_a_failed_reward(tokenizer: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        some_rewards(tokenizer, [KeyboardInterrupt()], "skip")


def test_one_item_per_group(tokenizer: Any) -> None:
    rollout = RolloutBatch.from_rows([[1]], [[[1]]], [[[-1.0]]])
    with pytest.raises(ValueError, match="0 prompt items for 1 prompt groups"):
        LocalMaterializer(tokenizer, hook).materialize(rollout, [])


@given(rollouts(max_groups=4), st.integers(1, 30))
def test_packs_by_tokens_hold_every_row_once(tokenizer: Any, rollout: RolloutBatch, budget: int) -> None:
    batch = LocalMaterializer(tokenizer, hook).materialize(rollout, items_for(rollout))
    packs = list(batch.train_packs(max_tokens=budget))
    assert sum(p["packed_num_sequences"] for p in packs) == batch.num_rows
    assert sum(p["input_ids"].numel() for p in packs) == int(batch.row_lens.sum())
    for pack in packs:
        assert pack["packed_num_sequences"] == 1 or pack["input_ids"].numel() <= budget
    with pytest.raises(ValueError, match="exactly one"):
        list(batch.train_packs())


def test_a_filler_has_no_weight(tokenizer: Any) -> None:
    rollout = RolloutBatch.from_rows([[1]], [[[1]]], [[[-1.0]]])
    batch = LocalMaterializer(tokenizer, hook).materialize(rollout, items_for(rollout))
    nothing = np.zeros(0, dtype=np.int64)
    assert not batch.train_pack(nothing, layout="packed")["packed_response_mask"].any()
    assert batch.train_pack(nothing, layout="padded")["prompt_mask"].all()
