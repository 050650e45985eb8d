"""GRPO: token-level clipped policy gradient (DeepSeekMath, arXiv 2402.03300, equation 3 without the KL term)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from areno.api.loss_fns.layout import common_stats, divide, log_ratio, mean_and_std, response_view


def grpo_loss_fn(
    data_pack: Mapping[str, Any], logprobs: torch.Tensor, *, clip_eps: float = 0.2, ratio: str = "unit"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`-min(ratio*A, clip(ratio, 1-eps, 1+eps)*A)` summed over trainable tokens, divided by their number.

    Args:
        data_pack: a packed or padded train pack; `loss_denominator`, if there, replaces the pack's own token count.
        logprobs: [A] or [B, L-1], under the model that trains.
        ratio: `unit` (value 1, gradient of the logprob) or `rollout` (against the pack's logprobs; clip then acts).

    Returns:
        The 0-d loss and detached 0-d statistics.
    """
    view = response_view(data_pack, logprobs)
    ratio_A = torch.exp(log_ratio(view, ratio))
    clipped_A = ratio_A.clamp(1.0 - clip_eps, 1.0 + clip_eps)
    gain_A = ratio_A * view.advantages_A
    objective_A = torch.minimum(gain_A, clipped_A * view.advantages_A)
    loss = divide(-objective_A.sum(), data_pack, view.num_tokens)
    ratio_mean, ratio_std = mean_and_std(ratio_A, view.mask_A)
    stats = {
        "policy_loss": loss.detach(),
        "ratio_mean": ratio_mean,
        "ratio_std": ratio_std,
        "clip_fraction": view.token_mean((objective_A < gain_A).to(logprobs.dtype)).detach(),
        "advantage_mean": view.token_mean(view.advantages_A),
        **common_stats(view),
    }
    return loss, stats
