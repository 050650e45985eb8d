"""GSPO: sequence-level clipped policy gradient (Group Sequence Policy Optimization, arXiv 2507.18071, equations 5 to 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from areno.api.loss_fns.layout import common_stats, divide, log_ratio, mean_and_std, response_view


def gspo_loss_fn(
    data_pack: Mapping[str, Any], logprobs: torch.Tensor, *, clip_eps: float = 3e-4, ratio: str = "unit"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One ratio per sequence, the exp of its mean token log-ratio, clipped once; the mean over sequences.

    Args:
        data_pack: a packed or padded train pack; `loss_denominator`, if there, replaces the pack's own number of
            sequences. A sequence without a trainable token adds nothing and is not counted.
        logprobs: [A] or [B, L-1], under the model that trains.
        ratio: `unit` (value 1, gradient of the logprob) or `rollout` (against the pack's logprobs; clip then acts).

    Returns:
        The 0-d loss and detached 0-d statistics.
    """
    view = response_view(data_pack, logprobs)
    ratio_B = torch.exp(view.sequence_mean(log_ratio(view, ratio)))
    clipped_B = ratio_B.clamp(1.0 - clip_eps, 1.0 + clip_eps)
    advantages_B = view.sequence_mean(view.advantages_A)
    gain_B = ratio_B * advantages_B
    objective_B = torch.minimum(gain_B, clipped_B * advantages_B)
    loss = divide(-objective_B.sum(), data_pack, view.num_sequences)
    ratio_mean, ratio_std = mean_and_std(ratio_B, view.token_counts_B > 0)
    stats = {
        "policy_loss": loss.detach(),
        "ratio_mean": ratio_mean,
        "ratio_std": ratio_std,
        "clip_fraction": (objective_B < gain_B).sum().detach() / view.num_sequences,
        "advantage_mean": advantages_B.sum() / view.num_sequences,
        **common_stats(view),
    }
    return loss, stats
