from __future__ import annotations

import numpy as np
import pytest
import torch

from areno.api.models import SamplingParams
from areno.engine.sampling import draw, keep_likeliest, uniform_streams


def logits_of(probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs).log()


def shares(probs: list[float], params: SamplingParams, draws: int = 20_000) -> np.ndarray:
    uniforms = torch.from_numpy(np.random.default_rng(0).random(draws))
    tokens, _ = draw(logits_of(probs).expand(draws, -1), uniforms, params)
    return np.bincount(tokens.numpy(), minlength=len(probs)) / draws


def test_streams_depend_on_the_row_alone() -> None:
    streams = uniform_streams(7, 3, [(0, 0), (0, 1), (5, 2)], 50)
    alone = uniform_streams(7, 3, [(5, 2)], 20)
    assert np.array_equal(streams[2, :20], alone[0])
    others = [uniform_streams(*key, 50)[0] for key in ((8, 3, [(5, 2)]), (7, 4, [(5, 2)]), (7, 3, [(2, 5)]))]
    assert not any(np.array_equal(streams[2], other) for other in others)
    assert len(np.unique(streams)) == streams.size
    assert ((streams >= 0) & (streams < 1)).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_tokens_come_as_often_as_the_distribution_says(temperature: float) -> None:
    probs = [0.02, 0.5, 0.0, 0.3, 0.18]
    expected = np.array(probs) ** (1 / temperature)
    expected /= expected.sum()
    draws = 20_000
    got = shares(probs, SamplingParams(temperature=temperature), draws)
    assert got[2] == 0
    used = expected > 0
    chi_square = (draws * (got - expected)[used] ** 2 / expected[used]).sum()
    assert chi_square < 20  # 3 degrees of freedom: p = 2e-4


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (1, 1.0, [1]),
        (2, 1.0, [1, 3]),
        (9, 1.0, [0, 1, 3, 4]),
        (-1, 0.49, [1]),
        (-1, 0.51, [1, 3]),
        (-1, 0.8, [1, 3]),
        (2, 0.7, [1, 3]),
        (2, 0.6, [1]),  # 0.5 of the 0.8 that top-k left
    ],
)
def test_top_k_and_top_p_keep_exactly_these(top_k: int, top_p: float, kept: list[int]) -> None:
    probs = [0.02, 0.5, 0.0, 0.3, 0.18]
    got = shares(probs, SamplingParams(top_k=top_k, top_p=top_p))
    assert np.flatnonzero(got).tolist() == kept
    expected = np.array([p if i in kept else 0 for i, p in enumerate(probs)])
    np.testing.assert_allclose(got, expected / expected.sum(), atol=0.015)


def test_equal_probabilities_are_ranked_by_id() -> None:
    probs = torch.full((1, 6), 1 / 6)
    assert keep_likeliest(probs, 4, 1.0).nonzero()[:, 1].tolist() == [0, 1, 2, 3]
    assert keep_likeliest(probs, -1, 0.45).nonzero()[:, 1].tolist() == [0, 1, 2]
    mixed = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.1, 0.1]])
    assert keep_likeliest(mixed, 4, 1.0).nonzero()[:, 1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_top_p_keeps_the_same_with_and_without_the_short_cut(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    probs = (spread * torch.randn(4, 500, generator=torch.Generator().manual_seed(0))).softmax(-1)
    expected = keep_likeliest(probs, -1, 0.9)
    monkeypatch.setattr("areno.engine.sampling._FEW", 100)
    assert torch.equal(keep_likeliest(probs, -1, 0.9), expected)
    for row, kept in zip(probs.double(), expected.double(), strict=True):
        assert kept.sum() >= 0.9 * row.sum()
        assert kept.sum() - kept[kept > 0].min() < 0.9 * row.sum()


def test_edges_of_the_uniform() -> None:
    probs = [0.0, 0.25, 0.0, 0.75, 0.0]
    uniforms = torch.tensor([0.0, 0.25 - 1e-7, 0.25 + 1e-7, 1 - 2**-53], dtype=torch.float64)
    tokens, _ = draw(logits_of(probs).double().expand(4, -1), uniforms, SamplingParams())
    assert tokens.tolist() == [1, 1, 3, 3]


def test_logprobs_are_those_before_top_k_and_top_p() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 5
    uniforms = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = draw(logits, uniforms, SamplingParams(temperature=0.7, top_k=5, top_p=0.8))
    expected = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_greedy_takes_the_likeliest_and_its_logprob_at_temperature_one() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(greedy=True, temperature=0.3, top_k=1)
    tokens, logprobs = draw(logits, torch.rand(8, dtype=torch.float64), params)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values)


def test_a_tiny_temperature_does_not_overflow() -> None:
    tokens, logprobs = draw(
        torch.tensor([[3e4, 2e4, -3e4]]), torch.tensor([0.9], dtype=torch.float64), SamplingParams(temperature=1e-30)
    )
    assert tokens.item() == 0
    assert logprobs.item() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_a_nan_logprob_in_their_row_only(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 3] = bad
    for params in (SamplingParams(), SamplingParams(greedy=True), SamplingParams(top_p=0.5, top_k=3)):
        tokens, logprobs = draw(logits, torch.full((3,), 0.5, dtype=torch.float64), params)
        assert logprobs.isnan().tolist() == [False, True, False]
        assert ((tokens >= 0) & (tokens < 5)).all()
