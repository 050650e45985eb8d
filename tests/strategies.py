"""Random ragged rollouts for property tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from areno.api.data import PromptItem
from areno.materialize.rollout_batch import RolloutBatch


@st.composite
def rollouts(draw: Any, vocab: int = 600, masks: bool | None = None, max_groups: int = 5) -> RolloutBatch:
    """Groups of 0..4 completions of 0..9 tokens, prompts of 1..6 tokens, with or without a loss mask."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    sizes = draw(st.lists(st.integers(0, 4), min_size=0, max_size=max_groups))
    lens = [[draw(st.integers(0, 9)) for _ in range(n)] for n in sizes]
    masked = draw(st.booleans()) if masks is None else masks
    return RolloutBatch.from_rows(
        [rng.integers(0, vocab, size=draw(st.integers(1, 6))) for _ in sizes],
        [[rng.integers(0, vocab, size=n) for n in group] for group in lens],
        [[-rng.exponential(size=n).astype(np.float32) for n in group] for group in lens],
        finish=[[int(rng.integers(0, 3)) for _ in group] for group in lens],
        loss_masks=[[rng.random(n) < 0.6 for n in group] for group in lens] if masked else None,
    )


def items_for(rollout: RolloutBatch, tokenizer: Any | None = None) -> list[PromptItem]:
    """One prompt item per group, with a record and solutions of its own."""
    prompts = np.split(rollout.prompt_tokens_P, rollout.prompt_offsets_G1[1:-1]) if rollout.num_groups else []
    return [
        PromptItem(
            prompt=f"Frage {g}: 来 é" if tokenizer is None else tokenizer.decode(ids.tolist()),
            solutions=[str(g)],
            input_tokens=ids.tolist(),
            record={"index": g, "nested": {"gold": [g]}},
        )
        for g, ids in enumerate(prompts)
    ]
