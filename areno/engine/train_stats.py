"""Combine the statistics of many micro-batches, over packs and workers, as if they had been one.

Every mean is carried as (weight, weighted sum), so that sums over packs and over workers are all that is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

TOKEN_MEANS = ("rollout_logprobs_mean", "train_logprobs_mean", "logp_diff_mean", "logp_abs_diff_mean")
SEQUENCE_MEANS = ("response_len",)
UNIT_MEANS = ("advantage_mean", "clip_fraction", "ratio_mean")
"""Means over what the loss averages over: tokens for GRPO, sequences for GSPO. `ratio_std` goes with them."""

_SUMS = ("loss", "policy_loss", "tokens", "sequences", *TOKEN_MEANS, *SEQUENCE_MEANS, *UNIT_MEANS, "ratio_square")
SIZE = len(_SUMS)


@dataclass(frozen=True)
class PackStats:
    """What one micro-batch adds.

    loss: already divided by the step's denominator, so that packs add up. share: what the pack's own `policy_loss`
    is multiplied with for the same purpose. tokens, sequences: the trainable ones.
    """

    loss: float
    share: float
    tokens: int
    sequences: int
    stats: Mapping[str, float]


def weighted_sums(pack: PackStats, unit: Literal["tokens", "sequences"]) -> torch.Tensor:
    """float64 [SIZE] that may be added to those of other packs and workers. A statistic that the loss lacks is 0."""
    units = pack.tokens if unit == "tokens" else pack.sequences
    weights = {
        **dict.fromkeys(TOKEN_MEANS, pack.tokens),
        **dict.fromkeys(SEQUENCE_MEANS, pack.sequences),
        **dict.fromkeys(UNIT_MEANS, units),
    }
    sums = {name: weight * pack.stats.get(name, 0.0) for name, weight in weights.items()}
    sums.update(loss=pack.loss, policy_loss=pack.share * pack.stats.get("policy_loss", pack.loss))
    sums.update(tokens=pack.tokens, sequences=pack.sequences)
    # Around 1, where ratios are: the squares of their small spread would drown in a sum around 0.
    shift = pack.stats.get("ratio_mean", 1.0) - 1.0
    sums["ratio_mean"] = units * shift
    sums["ratio_square"] = units * (pack.stats.get("ratio_std", 0.0) ** 2 + shift**2)
    return torch.tensor([sums[name] for name in _SUMS], dtype=torch.float64)


def combine(total: torch.Tensor, unit: Literal["tokens", "sequences"]) -> dict[str, float]:
    """Means and the pooled population standard deviation out of the summed vector, plus `loss` and the two counts."""
    sums = dict(zip(_SUMS, total.tolist(), strict=True))
    tokens, sequences = max(sums["tokens"], 1.0), max(sums["sequences"], 1.0)
    units = tokens if unit == "tokens" else sequences
    out = {name: sums[name] for name in ("loss", "policy_loss", "tokens", "sequences")}
    out.update({name: sums[name] / tokens for name in TOKEN_MEANS})
    out.update({name: sums[name] / sequences for name in SEQUENCE_MEANS})
    out.update({name: sums[name] / units for name in UNIT_MEANS})
    shift = out["ratio_mean"]
    out["ratio_mean"] = 1.0 + shift
    out["ratio_std"] = max(sums["ratio_square"] / units - shift**2, 0.0) ** 0.5
    return out
