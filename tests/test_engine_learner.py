from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from engine_fixtures import END, packs_of, random_rows, tiny_model, tiny_policy, tiny_tokenizer
from transformers import GraniteConfig, GraniteForCausalLM

from areno.api.loss_fns import PolicyLoss, policy_loss
from areno.api.sites import trainable_sites
from areno.api.train_pack import TrainPack, TrainRow
from areno.config import TrainConfig
from areno.engine.learner import Learner, WindowCounts
from areno.engine.logprobs import has_plain_head, site_logprobs
from areno.engine.model import Policy, policy_of
from areno.engine.train_stats import PackStats, combine, weighted_sums
from areno.errors import RunError

LOSSES = {algo: policy_loss(algo, clip_eps=0.2, ratio="rollout") for algo in ("grpo", "gspo")}
TRAIN = TrainConfig(lr=1e-3, min_lr=0.0, grad_clip_norm=0.0)


def logprobs_of(model: Any, pack: TrainPack, **options: Any) -> torch.Tensor:
    return site_logprobs(model, pack, **{"temperature": 0.7, "chunk_sites": 8, **options})


def counts_of(rows: list[TrainRow], packs: list[TrainPack]) -> WindowCounts:
    trainable = [int(trainable_sites(packs_of([row], 1, "packed")[0]).sum()) for row in rows]
    live = sum(bool(trainable_sites(p).any()) for p in packs)
    return WindowCounts(sum(trainable), sum(n > 0 for n in trainable), live)


def gradients(policy: Policy, packs: list[TrainPack], counts: WindowCounts, loss: PolicyLoss, **train: Any) -> Any:
    """The gradient that one optimizer step would apply, and its statistics."""
    learner = Learner(policy, dataclasses.replace(TRAIN, **train), loss, temperature=1.0)
    kept: list[torch.Tensor] = []
    learner._optimizer.step = lambda _lr: kept.extend(w.grad.clone() for w in learner._optimizer.weights)  # type: ignore[method-assign, union-attr]
    stats = learner.train_window(packs, counts)
    return torch.cat([g.flatten() for g in kept]), stats


class TestSiteLogprobs:
    @pytest.mark.parametrize("row_attention", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    def test_both_layouts_equal_the_plain_computation(self, masked: bool, row_attention: bool) -> None:
        policy = tiny_policy(torch.float64)
        model = policy.model if row_attention else tiny_model(torch.float64)
        assert (model.config._attn_implementation == "sdpa") != row_attention
        rows = random_rows(9, masked=masked)
        packed = logprobs_of(model, packs_of(rows, 9, "packed")[0])
        padded_pack = packs_of(rows, 9, "padded")[0]
        padded = logprobs_of(model, padded_pack)
        expected = []
        for row in rows:
            ids = torch.from_numpy(np.concatenate([row.prompt_P, row.response_R]))[None]
            logits = model(ids).logits[0, :-1] / 0.7
            values = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
            keep = torch.arange(1, ids.shape[1]) >= row.prompt_P.size
            if row.loss_mask_R is not None:
                keep[row.prompt_P.size - 1 :] &= torch.from_numpy(row.loss_mask_R)
            expected.append(torch.where(keep, values, 0.0))
        torch.testing.assert_close(packed, torch.cat(expected), atol=1e-9, rtol=0)
        for b, values in enumerate(expected):
            torch.testing.assert_close(padded[b, : values.numel()], values, atol=1e-9, rtol=0)
            assert not padded[b, values.numel() :].any()
        assert padded.dtype == torch.float64

    @pytest.mark.parametrize("layout", ["packed", "padded"])
    def test_masked_sites_are_constants(self, layout: str) -> None:
        model = tiny_model()
        (pack,) = packs_of(random_rows(6, masked=True), 6, layout)
        logprobs = logprobs_of(model, pack)
        mask = trainable_sites(pack)
        assert not logprobs[~mask].any()
        torch.where(mask, torch.zeros_like(logprobs), logprobs).sum().backward()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())

    def test_chunks_and_checkpoints_change_nothing(self) -> None:
        (pack,) = packs_of(random_rows(6), 6, "packed")
        results = []
        for chunk, checkpointing in ((3, True), (10_000, False)):
            policy = policy_of(tiny_model(torch.float64), tiny_tokenizer(), activation_checkpointing=checkpointing)
            values = logprobs_of(policy.model, pack, chunk_sites=chunk)
            values.square().sum().backward()
            results.append((values, policy.model.get_input_embeddings().weight.grad))
        torch.testing.assert_close(results[0], results[1], atol=1e-10, rtol=1e-9)

    def test_sliding_layers_keep_their_window_in_packed_rows(self) -> None:
        window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
        plain = tiny_model(torch.float64, **window)
        policy = policy_of(tiny_model(torch.float64, **window), tiny_tokenizer())
        rows = random_rows(9)
        (packed,), (padded,) = packs_of(rows, 9, "packed"), packs_of(rows, 9, "padded")
        values = logprobs_of(policy.model, packed)
        torch.testing.assert_close(values, logprobs_of(plain, packed), atol=1e-6, rtol=0)
        padded_values = logprobs_of(plain, padded)[trainable_sites(padded)]
        torch.testing.assert_close(values[trainable_sites(packed)], padded_values, atol=1e-6, rtol=0)

    def test_a_model_whose_attention_does_not_see_positions_keeps_the_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("areno.engine.attention._segments", lambda *_: [])
        assert tiny_policy().model.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize("layout", ["packed", "padded"])
    def test_a_model_that_scales_its_logits_stays_right(self, layout: str) -> None:
        torch.manual_seed(0)
        config = GraniteConfig(
            vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, logits_scaling=0.25, initializer_range=0.4,
        )  # fmt: skip
        model = GraniteForCausalLM(config).double()
        assert not has_plain_head(model)
        assert has_plain_head(tiny_model())
        rows = random_rows(1)[:1] + random_rows(4)[1:3]
        (pack,) = packs_of(rows, 3, layout)
        values = logprobs_of(model, pack)[trainable_sites(pack)]
        expected = []
        for row in rows:
            ids = torch.from_numpy(np.concatenate([row.prompt_P, row.response_R]))[None]
            logprobs = (model(ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
            expected.append(logprobs[row.prompt_P.size - 1 :])
        torch.testing.assert_close(values, torch.cat(expected), atol=1e-9, rtol=0)


@pytest.mark.parametrize("algo", ["grpo", "gspo"])
class TestOneStep:
    def test_the_gradient_does_not_depend_on_how_rows_are_packed(self, algo: str) -> None:
        rows = random_rows(16, masked=True)
        shuffled = [rows[i] for i in np.random.default_rng(1).permutation(16)]
        expected, baseline = None, None
        for order in (rows, shuffled):
            for size in (1, 2, 8, 16):
                for layout in ("packed", "padded"):
                    packs = packs_of(order, size, layout)
                    got, stats = gradients(tiny_policy(torch.float64), packs, counts_of(rows, packs), LOSSES[algo])
                    if expected is None or baseline is None:
                        expected, baseline = got, stats
                    torch.testing.assert_close(got, expected, atol=1e-7, rtol=0)
                    assert stats.loss == pytest.approx(baseline.loss, abs=1e-7)
                    assert stats.stats == pytest.approx(baseline.stats, abs=1e-7)

    def test_workers_together_make_the_same_step(self, algo: str) -> None:
        rows = random_rows(12)
        packs = packs_of(rows, 12, "packed")
        expected, one = gradients(tiny_policy(torch.float64), packs, counts_of(rows, packs), LOSSES[algo])
        split = packs_of(rows, 4, "packed")
        shards, counts = [split[:2], split[2:]], counts_of(rows, split)
        parts = [gradients(tiny_policy(torch.float64), shard, counts, LOSSES[algo]) for shard in shards]
        torch.testing.assert_close(sum(g for g, _ in parts), expected, atol=1e-7, rtol=0)
        assert sum(s.loss for _, s in parts) == pytest.approx(one.loss, abs=1e-7)

    def test_pack_normalization_averages_the_packs(self, algo: str) -> None:
        rows = random_rows(10)
        packs = packs_of(rows, 4, "packed")
        one = WindowCounts(1, 1, 1)
        pack_wise = [
            gradients(tiny_policy(torch.float64), [p], one, LOSSES[algo], loss_normalization="pack") for p in packs
        ]
        got, stats = gradients(
            tiny_policy(torch.float64), packs, counts_of(rows, packs), LOSSES[algo], loss_normalization="pack"
        )
        torch.testing.assert_close(got, torch.stack([g for g, _ in pack_wise]).mean(0), atol=1e-7, rtol=0)
        assert stats.stats["policy_loss"] == pytest.approx(np.mean([s.loss for _, s in pack_wise]))

    def test_fillers_change_nothing(self, algo: str) -> None:
        rows = random_rows(4)
        packs = packs_of(rows, 2, "packed")
        filler = packs_of([rows[1]._replace(loss_mask_R=np.zeros(rows[1].response_R.size, bool))], 1, "packed")
        counts = counts_of(rows, packs)
        without, _ = gradients(tiny_policy(torch.float64), packs, counts, LOSSES[algo])
        with_fillers, _ = gradients(tiny_policy(torch.float64), [*filler, *packs, *filler], counts, LOSSES[algo])
        torch.testing.assert_close(without, with_fillers, atol=0, rtol=0)
        nothing, stats = gradients(tiny_policy(torch.float64), filler, counts, LOSSES[algo])
        assert not nothing.any()
        assert stats.loss == 0

    @pytest.mark.parametrize("layout", ["packed", "padded"])
    @pytest.mark.parametrize("key", ["logprobs", "advantages"])
    def test_a_poisoned_row_is_named_and_the_weights_stay(self, algo: str, layout: str, key: str) -> None:
        policy, rows = tiny_policy(), random_rows(8)
        packs = packs_of(rows, 4, layout)
        counts = counts_of(rows, packs)
        before = {k: v.clone() for k, v in policy.model.state_dict().items()}
        poisoned = packs[1]["packed_" + key if layout == "packed" else key]
        where = trainable_sites(packs[1]).nonzero()[-1]
        poisoned[where[0] if layout == "packed" else (where[0], where[1] + 1)] = math.nan
        learner = Learner(policy, TRAIN, LOSSES[algo], temperature=1.0)
        with pytest.raises(RunError, match=r"Micro-batch 1, row 3: a.* not finite"):
            learner.train_window(packs, counts)
        assert all(torch.equal(v, before[k]) for k, v in policy.model.state_dict().items())
        assert all(p.grad is None for p in policy.model.parameters())
        # The learner is as good as new.
        learner.train_window(packs_of(rows, 4, layout), counts)

    def test_a_gradient_that_is_not_finite_is_refused(self, algo: str) -> None:
        policy, rows = tiny_policy(), random_rows(4)
        packs = packs_of(rows, 4, "packed")
        before = {k: v.clone() for k, v in policy.model.state_dict().items()}
        learner = Learner(policy, TRAIN, LOSSES[algo], temperature=1.0)
        policy.model.lm_head.weight.register_hook(lambda g: g * math.inf)
        with pytest.raises(RunError, match=r"norm is (nan|inf)"):
            learner.train_window(packs, counts_of(rows, packs))
        assert all(torch.equal(v, before[k]) for k, v in policy.model.state_dict().items())

    def test_steps_raise_the_likelihood_of_what_was_good(self, algo: str) -> None:
        policy = tiny_policy()
        rows = [r._replace(advantage=1.0 if i % 2 else -1.0) for i, r in enumerate(random_rows(8)) if i % 5]
        packs = packs_of(rows, 3, "packed")
        loss = policy_loss(algo, clip_eps=0.2)
        learner = Learner(policy, dataclasses.replace(TRAIN, lr=1e-2, grad_clip_norm=1.0), loss, temperature=1.0)
        good = packs_of([r for r in rows if r.advantage == 1.0], 8, "packed")[0]
        first = logprobs_of(policy.model, good).sum().item()
        stats = [learner.train_window(packs, counts_of(rows, packs)) for _ in range(4)]
        assert logprobs_of(policy.model, good).sum().item() > first
        assert stats[0].stats["ratio_mean"] == pytest.approx(1.0)
        assert stats[0].stats["ratio_std"] == pytest.approx(0.0, abs=1e-7)
        assert stats[0].lr == pytest.approx(1e-2, rel=1e-3)
        assert stats[0].peak_mem_gb > 0.05


def test_nothing_to_train_on_is_said() -> None:
    with pytest.raises(ValueError, match="Nothing to train on"):
        Learner(tiny_policy(), TRAIN, LOSSES["grpo"], temperature=1.0).train_window([], WindowCounts(0, 0, 0))


def test_clipping_limits_the_norm() -> None:
    rows = random_rows(4)
    packs = packs_of(rows, 4, "packed")
    got, stats = gradients(tiny_policy(), packs, counts_of(rows, packs), LOSSES["grpo"], grad_clip_norm=1e-3)
    assert got.norm().item() == pytest.approx(1e-3, rel=1e-3)
    assert stats.grad_norm > 1e-3


@pytest.mark.parametrize("unit", ["tokens", "sequences"])
def test_statistics_of_packs_combine_as_if_they_were_one(unit: Any) -> None:
    rng = np.random.default_rng(0)
    ratios = [1 + 1e-6 * rng.normal(size=n) for n in (100, 7, 1)]
    logprobs = [rng.normal(size=n) for n in (100, 7, 1)]
    total = sum(
        weighted_sums(
            PackStats(
                loss=0.25, share=0.5, tokens=len(r), sequences=len(r),
                stats={"policy_loss": 0.5, "ratio_mean": r.mean(), "ratio_std": r.std(), "logp_diff_mean": p.mean()},
            ), unit,
        ) for r, p in zip(ratios, logprobs, strict=True)
    )  # fmt: skip
    assert isinstance(total, torch.Tensor)
    out = combine(total, unit)
    assert out["ratio_std"] == pytest.approx(np.concatenate(ratios).std(), rel=1e-6)
    assert out["ratio_mean"] == pytest.approx(np.concatenate(ratios).mean(), rel=1e-12)
    assert out["logp_diff_mean"] == pytest.approx(np.concatenate(logprobs).mean())
    assert (out["loss"], out["policy_loss"], out["tokens"]) == (0.75, 0.75, 108)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_bf16_step_on_cuda(layout: str) -> None:
    policy = policy_of(tiny_model(torch.bfloat16).to("cuda"), tiny_tokenizer(), activation_checkpointing=True)
    rows = random_rows(8)
    packs = packs_of(rows, 3, layout)
    before = policy.model.get_input_embeddings().weight.clone()
    stats = Learner(policy, TRAIN, LOSSES["grpo"], temperature=1.0).train_window(packs, counts_of(rows, packs))
    assert math.isfinite(stats.grad_norm)
    assert stats.peak_mem_gb > 0
    assert not torch.equal(before, policy.model.get_input_embeddings().weight)
    assert policy.pad_token_id != END
