"""Row-wise types that users of AReno know. The internal path works on flat arrays and never builds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SamplingParams:
    """Controls of one rollout.

    `greedy` overrides temperature, top_k and top_p. `top_k=-1` turns top-k off. Logprobs are taken at `temperature`,
    before top-k and top-p.
    """

    greedy: bool = False
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 16
    temperature: float = 1.0
    seed: int = 0

    @property
    def logprob_temperature(self) -> float:
        """Temperature of the distribution that rollout and train logprobs are taken from."""
        return 1.0 if self.greedy else self.temperature


@dataclass(slots=True)
class RolloutSequence:
    """One completion: sampled ids, and the logprob of each under the sampling policy."""

    resp_tokens: Sequence[int] = field(default_factory=list)
    resp_logprobs: Sequence[float] = field(default_factory=list)


@dataclass(slots=True)
class RolloutResult:
    """All completions of one prompt."""

    sequences: list[RolloutSequence] = field(default_factory=list)


@dataclass(slots=True)
class TrainSequence:
    """One prompt+response row for people who build batches by hand.

    Every per-token field has the length of `tokens` and may be a list, a numpy array or a tensor. `prompt_mask` is True
    on the prompt. `loss_mask` (optional) is False where a token must not be learned from.
    """

    prompt_mask: Any = field(default_factory=list)
    loss_mask: Any = field(default_factory=list)
    tokens: Any = field(default_factory=list)
    logprobs: Any = field(default_factory=list)
    advantages: Any = field(default_factory=list)
    reward: float = 0.0
    eos_token_id: int = 0
