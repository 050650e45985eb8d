"""What scoring costs beside the reward function itself: inline, and in a watched process of its own."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from areno.api import PromptItem
from areno.materialize import RolloutBatch, ScoringOptions
from areno.materialize.records import RecordBatch
from areno.materialize.shard import make_scorer
from benches.case import Case, compare, take_turns

BAR_US = 20.0
TOKENS = 256  # of a completion
REWARD = "def reward_fn(record):\n    return 1.0\n"
BARE = "a bare call"


def run(rounds: int, quick: bool) -> list[Case]:
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reward.py")
        path.write_text(REWARD)
        options = {
            "inline": ScoringOptions(),
            "own process": ScoringOptions(isolate=True),
            "own process, time limit": ScoringOptions(timeout_s=10.0),
            "own process, limits of time and memory": ScoringOptions(timeout_s=10.0, memory_gb=1.0),
        }
        scorers = {name: make_scorer(str(path), option) for name, option in options.items()}
        try:
            for samples in (256,) if quick else (256, 4096):
                cases += measure(scorers, samples, 3 * rounds)
        finally:
            for scorer in scorers.values():
                scorer.close()
    return cases


def measure(scorers: dict[str, Any], samples: int, rounds: int) -> list[Case]:
    rollout, items, texts = shard(samples)
    calls: dict[str, Callable[[], float]] = {BARE: lambda: bare(samples)}
    for name, scorer in scorers.items():
        calls[name] = lambda scorer=scorer: scored(scorer, rollout, items, texts)
    times = take_turns(calls, rounds, limit_s=15)
    bare_ms = [1e3 * t for t in times[BARE]]
    cases = []
    for name in scorers:
        ours = [1e3 * t for t in times[name]]
        over_us = 1e3 * (float(np.median(ours)) - float(np.median(bare_ms))) / samples
        note = f"{over_us:.1f} us a sample over a bare call; {'within' if over_us <= BAR_US else 'OVER'} {BAR_US:g}"
        details = {"overhead_us": round(over_us, 2)}
        label = f"{name}, {samples} samples"
        tokens = samples * TOKENS
        cases.append(compare("reward", label, tokens, samples, ours, BARE, bare_ms, note=note, details=details))
    return cases


def shard(samples: int) -> tuple[RolloutBatch, list[PromptItem], list[str]]:
    """Groups of eight with completions of a few hundred tokens, and their texts."""
    rng = np.random.default_rng(0)
    groups = samples // 8
    rollout = RolloutBatch(
        prompt_tokens_P=rng.integers(0, 1000, groups * 100).astype(np.int32),
        prompt_offsets_G1=np.arange(groups + 1) * 100,
        group_offsets_G1=np.arange(groups + 1) * 8,
        response_tokens_T=rng.integers(0, 1000, samples * TOKENS).astype(np.int32),
        response_logprobs_T=-rng.random(samples * TOKENS).astype(np.float32),
        response_offsets_N1=np.arange(samples + 1) * TOKENS,
        finish_N=np.zeros(samples, dtype=np.uint8),
    )
    items = [PromptItem(f"prompt {g}", [str(g)], [], {"index": g}) for g in range(groups)]
    return rollout, items, ["the answer is 42. " * 60] * samples


def scored(scorer: Any, rollout: RolloutBatch, items: list[PromptItem], texts: list[str]) -> float:
    began = time.perf_counter()
    scores = scorer.score(RecordBatch(rollout, items, texts, 0))
    seconds = time.perf_counter() - began
    if not (scores.scored_N.all() and (scores.rewards_N == 1.0).all()):
        raise SystemExit("a reward was lost or changed.")
    return seconds


def bare(samples: int) -> float:
    """The same number of calls of the same function, with nothing around them."""
    space: dict[str, Any] = {}
    exec(REWARD, space)
    reward_fn, record = space["reward_fn"], object()
    began = time.perf_counter()
    for _ in range(samples):
        reward_fn(record)
    return time.perf_counter() - began
