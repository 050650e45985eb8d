"""Policy losses. Each takes a train pack in either layout and the logprobs of its action sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from areno.api.loss_fns.grpo import grpo_loss_fn
from areno.api.loss_fns.gspo import gspo_loss_fn

LossFn = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class PolicyLoss:
    """A loss function with its options, and what it averages over (the unit of a global `loss_denominator`)."""

    fn: LossFn
    denominator: Literal["tokens", "sequences"]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, data_pack: Mapping[str, Any], logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.fn(data_pack, logprobs, **self.options)


def policy_loss(algo: Literal["grpo", "gspo"], *, clip_eps: float, ratio: str = "unit") -> PolicyLoss:
    """The loss that `--algo` names."""
    options = {"clip_eps": clip_eps, "ratio": ratio}
    if algo == "grpo":
        return PolicyLoss(grpo_loss_fn, "tokens", options)
    return PolicyLoss(gspo_loss_fn, "sequences", options)


__all__ = ["LossFn", "PolicyLoss", "grpo_loss_fn", "gspo_loss_fn", "policy_loss"]
