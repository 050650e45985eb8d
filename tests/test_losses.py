"""GRPO and GSPO: layouts agree, masks hold, clipping acts where it should, denominators are what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno.api import TrainSequence, grpo_loss_fn, gspo_loss_fn, make_train_pack
from areno.api.sites import predicted_positions, trainable_sites

LOSSES = {"grpo": (grpo_loss_fn, 0.2), "gspo": (gspo_loss_fn, 3e-4)}
STATS = {
    "policy_loss", "ratio_mean", "ratio_std", "advantage_mean", "response_len", "rollout_logprobs_mean",
    "train_logprobs_mean", "logp_diff_mean", "logp_abs_diff_mean", "clip_fraction",
}  # fmt: skip


def sequence(prompt: int, advantage: float, mask: list[bool], rng: np.random.Generator) -> TrainSequence:
    n = prompt + len(mask)
    return TrainSequence(
        prompt_mask=[True] * prompt + [False] * len(mask),
        loss_mask=[False] * prompt + mask,
        tokens=rng.integers(0, 50, n).tolist(),
        logprobs=[0.0] * prompt + (-rng.exponential(size=len(mask))).tolist(),
        advantages=[0.0] * prompt + [advantage] * len(mask),
        eos_token_id=2,
    )


@st.composite
def batches(draw: Any) -> list[TrainSequence]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.lists(st.tuples(st.integers(1, 4), st.lists(st.booleans(), max_size=6)), min_size=1, max_size=5))
    return [sequence(p, float(rng.normal()), mask, rng) for p, mask in rows]


def both_logprobs(sequences: list[TrainSequence], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same random float64 logprobs in packed and padded layout, as leaves."""
    rng = np.random.default_rng(seed)
    lens = [len(s.tokens) for s in sequences]
    padded = np.zeros((len(lens), max(max(lens) - 1, 0)))
    flat = []
    for b, n in enumerate(lens):
        values = -rng.exponential(size=max(n - 1, 0))
        padded[b, : n - 1] = values
        flat.append(values)
    return (
        torch.tensor(np.concatenate(flat), requires_grad=True),
        torch.tensor(padded, requires_grad=True),
    )


@pytest.mark.parametrize("algo", ["grpo", "gspo"])
@pytest.mark.parametrize("ratio", ["unit", "rollout"])
@pytest.mark.parametrize("denominator", [None, 7.0])
@given(sequences=batches())
def test_packed_equals_padded(algo: str, ratio: str, denominator: float | None, sequences: list[TrainSequence]) -> None:
    fn, eps = LOSSES[algo]
    packed, padded = make_train_pack(sequences, "packed"), make_train_pack(sequences, "padded")
    if denominator is not None:
        packed["loss_denominator"] = padded["loss_denominator"] = denominator
    flat, square = both_logprobs(sequences)
    loss_a, stats_a = fn(packed, flat, clip_eps=eps, ratio=ratio)
    loss_b, stats_b = fn(padded, square, clip_eps=eps, ratio=ratio)
    loss_a.backward()
    loss_b.backward()
    assert flat.grad is not None
    assert square.grad is not None
    sites = torch.cat([square.grad[b, : len(s.tokens) - 1] for b, s in enumerate(sequences)])
    torch.testing.assert_close(loss_a, loss_b, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(flat.grad, sites, atol=1e-6, rtol=1e-6)
    assert (flat.grad[~trainable_sites(packed)] == 0).all()
    assert (square.grad[~trainable_sites(padded)] == 0).all()
    assert stats_a.keys() == stats_b.keys() == STATS
    for key in STATS:
        torch.testing.assert_close(stats_a[key], stats_b[key], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("algo", ["grpo", "gspo"])
@given(sequences=batches())
def test_equals_the_reference(algo: str, sequences: list[TrainSequence]) -> None:
    fn, eps = LOSSES[algo]
    padded = make_train_pack(sequences, "padded")
    _, ours = both_logprobs(sequences)
    _, theirs = both_logprobs(sequences)
    loss = fn(padded, ours, clip_eps=eps)[0]
    plain = reference.loss(algo, padded, theirs, eps)
    loss.backward()
    plain.backward()
    torch.testing.assert_close(loss, plain, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-6)


def one_token_pack(old: float, advantage: float) -> dict[str, Any]:
    return make_train_pack(
        [TrainSequence([True, False], [], [3, 4], [0.0, old], [0.0, advantage], eos_token_id=2)], "packed"
    )


def test_rollout_ratio_clips() -> None:
    logprobs = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    loss, stats = grpo_loss_fn(one_token_pack(-1.0, 1.0), logprobs, clip_eps=0.2, ratio="rollout")
    loss.backward()
    assert stats["ratio_mean"].item() == pytest.approx(1.6487, abs=1e-4)
    assert loss.item() == pytest.approx(-1.2)
    assert stats["clip_fraction"].item() == 1.0
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_unit_ratio_is_reinforce() -> None:
    logprobs = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    loss, stats = grpo_loss_fn(one_token_pack(-1.0, 1.5), logprobs)
    loss.backward()
    assert (stats["ratio_mean"].item(), loss.item()) == (1.0, -1.5)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == -1.5


def test_unknown_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match="unit"):
        grpo_loss_fn(one_token_pack(-1.0, 1.0), torch.zeros(1), ratio="both")


@pytest.mark.parametrize("ratio", ["unit", "rollout"])
@pytest.mark.parametrize("algo", ["grpo", "gspo"])
@pytest.mark.parametrize("garbage", [-6.0, float("nan"), float("inf"), -float("inf")])
def test_masked_tokens_change_nothing(algo: str, ratio: str, garbage: float) -> None:
    fn, eps = LOSSES[algo]
    rng = np.random.default_rng(3)
    seq = sequence(2, 0.7, [True, False, True], rng)
    clean = make_train_pack([seq], "packed")
    dirty = make_train_pack([seq], "packed")
    masked = int(np.flatnonzero(~trainable_sites(dirty).numpy())[-1])
    dirty["packed_logprobs"][masked] = garbage
    flat, _ = both_logprobs([seq])
    loss = fn(clean, flat, clip_eps=eps, ratio=ratio)[0]
    changed = flat.detach().clone()
    changed[masked] = garbage
    changed.requires_grad_()
    dirty_loss, stats = fn(dirty, changed, clip_eps=eps, ratio=ratio)
    dirty_loss.backward()
    assert torch.equal(loss, dirty_loss)
    assert changed.grad is not None
    assert changed.grad[masked] == 0
    assert all(torch.isfinite(value) for value in stats.values())


def test_a_long_gspo_sequence_does_not_outweigh_a_short_one() -> None:
    rng = np.random.default_rng(0)
    pack = make_train_pack([sequence(1, 1.0, [True] * 200, rng), sequence(1, 1.0, [True] * 2, rng)], "packed")
    logprobs = torch.zeros(202, dtype=torch.float64, requires_grad=True)
    gspo_loss_fn(pack, logprobs)[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad[:200].sum().item() == pytest.approx(logprobs.grad[200:].sum().item())


@pytest.mark.parametrize("algo", ["grpo", "gspo"])
def test_a_pack_without_trainable_tokens_is_zero(algo: str) -> None:
    fn, eps = LOSSES[algo]
    pack = make_train_pack([sequence(2, 1.0, [False, False], np.random.default_rng(0))], "packed")
    logprobs = torch.zeros(3, requires_grad=True)
    loss, stats = fn(pack, logprobs, clip_eps=eps)
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).all()
    assert all(torch.isfinite(value) for value in stats.values())


def test_denominator_is_the_tokens_of_kept_rows() -> None:
    rng = np.random.default_rng(0)
    rows = [sequence(1, -1.0, [True] * 10, rng), sequence(1, -1.0, [False] * 10, rng)]
    for layout in ("packed", "padded"):
        pack = make_train_pack(rows, layout)
        logprobs = torch.zeros((20,) if layout == "packed" else (2, 10))
        assert grpo_loss_fn(pack, logprobs)[0].item() == pytest.approx(1.0)
    # 100 tokens of loss 0.5 and 900 of 0.3 make 0.32, in one pack or two under one denominator.
    parts = [sequence(1, -0.5, [True] * 100, rng), sequence(1, -0.3, [True] * 900, rng)]
    total = 0.0
    for part in parts:
        pack = make_train_pack([part], "packed")
        pack["loss_denominator"] = 1000
        total += grpo_loss_fn(pack, torch.zeros(len(part.tokens) - 1))[0].item()
    assert total == pytest.approx(0.32)
    whole = grpo_loss_fn(make_train_pack(parts, "packed"), torch.zeros(1000))[0].item()
    assert whole == pytest.approx(0.32)


def test_loss_at_ratio_one_is_what_the_readme_says() -> None:
    rng = np.random.default_rng(0)
    advantages, lens = [1.0, -1.0], [3, 9]
    pack = make_train_pack([sequence(1, a, [True] * n, rng) for a, n in zip(advantages, lens, strict=True)], "packed")
    logprobs = torch.zeros(12)
    assert gspo_loss_fn(pack, logprobs)[0].item() == pytest.approx(0.0, abs=1e-6)
    expected = -sum(a * n for a, n in zip(advantages, lens, strict=True)) / sum(lens)
    assert grpo_loss_fn(pack, logprobs)[0].item() == pytest.approx(expected)


@given(st.lists(st.integers(0, 6), max_size=6))
def test_predicted_positions(lens: list[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    plain = [int(offsets[b]) + t for b, n in enumerate(lens) for t in range(1, n)]
    assert predicted_positions(offsets).tolist() == plain
    assert predicted_positions(torch.tensor(offsets)).tolist() == plain
