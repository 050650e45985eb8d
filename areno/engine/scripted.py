"""A rollout that plays back a script: the deterministic stand-in for a model, for tests and dry runs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from areno.api.models import SamplingParams
from areno.materialize.rollout_batch import LENGTH, STOPPED, RolloutBatch


@dataclass(frozen=True)
class ScriptedCompletion:
    """One completion: ids, one logprob per id (0 for each by default), and how it ended."""

    tokens: Sequence[int] | npt.NDArray[Any]
    logprobs: Sequence[float] | npt.NDArray[Any] = field(default=())
    finish: int = STOPPED

    def __post_init__(self) -> None:
        if not len(self.logprobs) and len(self.tokens):
            object.__setattr__(self, "logprobs", [0.0] * len(self.tokens))


Script = Callable[[int, int, int], ScriptedCompletion]
"""(step, prompt index, sample index) -> completion."""

Table = Mapping[tuple[int, int], ScriptedCompletion]
"""(prompt index, sample index) -> completion, the same at every step."""


class ScriptedRollout:
    """Completions from a script or a table, `groups_per_chunk` prompts to a chunk. Sampling parameters are ignored."""

    def __init__(self, script: Script | Table, *, groups_per_chunk: int = 1) -> None:
        self._script: Script = script if callable(script) else lambda _, prompt, sample: script[prompt, sample]
        self._groups_per_chunk = groups_per_chunk

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        prompt_indices: Sequence[int],
        n_samples: int,
        params: SamplingParams,  # noqa: ARG002
        step: int,
    ) -> Iterator[RolloutBatch]:
        """See `areno.engine.rollout.Rollout.generate`."""
        for start in range(0, len(prompts), self._groups_per_chunk):
            part = slice(start, start + self._groups_per_chunk)
            groups = [[self._script(step, i, s) for s in range(n_samples)] for i in prompt_indices[part]]
            yield RolloutBatch.from_rows(
                prompts[part],
                [[c.tokens for c in group] for group in groups],
                [[c.logprobs for c in group] for group in groups],
                finish=[[c.finish for c in group] for group in groups],
                policy_version=step,
            )


def seeded_script(seed: int, vocab_size: int, max_len: int, end_token_id: int) -> Script:
    """A script of random ids and logprobs: lengths 1..max_len, about half of them ended by `end_token_id`."""

    def script(step: int, prompt_index: int, sample_index: int) -> ScriptedCompletion:
        rng = np.random.default_rng((seed, step, prompt_index, sample_index))
        length = int(rng.integers(1, max_len + 1))
        others = np.delete(np.arange(vocab_size, dtype=np.int32), end_token_id)
        tokens = rng.choice(others, size=length)
        logprobs = -rng.exponential(size=length).astype(np.float32)
        stopped = bool(rng.random() < 0.5)
        if stopped:
            tokens[-1] = end_token_id
        return ScriptedCompletion(tokens, logprobs, STOPPED if stopped else LENGTH)

    return script
