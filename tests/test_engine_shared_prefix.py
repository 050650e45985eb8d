"""Rows that share their beginning: fewer tokens, the same logprobs and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_fixtures import VOCAB, tiny_model, tiny_policy
from hypothesis import given
from hypothesis import strategies as st

from areno.api.train_pack import TrainRow, packed_pack
from areno.engine.attention import shares_prefixes, use_row_attention
from areno.engine.logprobs import site_logprobs
from areno.engine.shared_prefix import MIN_SHARED, share_prefixes


def grouped_rows(seed: int, groups: int = 3, samples: int = 4, prompt: int = 14) -> list[TrainRow]:
    """Samples of a few prompts, some of them empty, some with a loss mask."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        head = rng.integers(3, VOCAB, int(rng.integers(1, prompt)))
        for _ in range(samples):
            tail = rng.integers(3, VOCAB, int(rng.integers(0, 9)))
            mask = rng.random(tail.size) < 0.8
            rows.append(TrainRow(head, tail, np.zeros(tail.size, dtype=np.float32), 1.0, mask))
    return rows


@given(st.lists(st.lists(st.integers(0, 1), max_size=30), max_size=8))
def test_every_token_keeps_its_history(rows: list[list[int]]) -> None:
    tokens_S = np.array([t for row in rows for t in row], dtype=np.int64)
    offsets_B1 = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
    layout = share_prefixes(tokens_S, offsets_B1)
    position_S = np.array([p for row in rows for p in range(len(row))], dtype=np.int64)
    kept_tokens, kept_positions = tokens_S[layout.kept_U], position_S[layout.kept_U]
    # What the attention does with positions alone: a token's history is its run, and before it the root's beginning.
    history: list[list[int]] = []
    root: list[int] = []
    run: list[int] = []
    first, before = 0, -2
    for token, position in zip(kept_tokens.tolist(), kept_positions.tolist(), strict=True):
        if position != before + 1:
            run, first = [], position
            root = run if position == 0 else root
        run.append(token)
        history.append(root[:first] + run)
        before = position
    for b, row in enumerate(rows):
        for t in range(len(row)):
            assert history[layout.place_S[offsets_B1[b] + t]] == row[: t + 1]
    assert layout.kept_U.size <= tokens_S.size


def test_a_prompt_is_laid_down_once() -> None:
    prompt = list(range(20))
    rows = [[*prompt, 50, 51], [*prompt, 60], [*prompt], [*prompt, 50, 51, 52], [*prompt[:MIN_SHARED], 9, 9, 9]]
    tokens_S = np.array([t for r in rows for t in r])
    offsets_B1 = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
    layout = share_prefixes(tokens_S, offsets_B1)
    # The last row shares only the template's beginning: joining would cost the others more than it saves.
    assert layout.kept_U.size == 20 + 2 + 1 + 0 + 3 + len(rows[-1])


@pytest.mark.parametrize("seed", range(4))
def test_logprobs_and_gradients_are_the_same(seed: int) -> None:
    pack = packed_pack(grouped_rows(seed))
    results = []
    for sharing in (True, False):
        model = tiny_policy(torch.float64).model
        assert shares_prefixes(model)
        if not sharing:
            model.set_attn_implementation("areno_rows")
        logprobs = site_logprobs(model, pack, temperature=0.9, chunk_sites=7)
        (logprobs * torch.linspace(-1, 1, logprobs.numel(), dtype=torch.float64)).sum().backward()
        results.append((logprobs.detach(), [p.grad for p in model.parameters()]))
    (shared, shared_grads), (plain, plain_grads) = results
    torch.testing.assert_close(shared, plain, atol=1e-6, rtol=1e-6)
    for a, b in zip(shared_grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_fewer_tokens_go_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = grouped_rows(1, groups=2, samples=8, prompt=40)
    model = tiny_policy(torch.float32).model
    seen: list[int] = []
    forward = model.base_model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.base_model, "forward", counting)
    site_logprobs(model, packed_pack(rows), temperature=1.0, chunk_sites=64, plain_head=True)
    assert seen[-1] < sum(r.prompt_P.size + r.response_R.size for r in rows) / 2


def test_a_model_with_windows_keeps_its_rows_whole() -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_model(**window)
    use_row_attention(model)
    assert not shares_prefixes(model)
