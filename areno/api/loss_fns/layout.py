"""One flat view over packed and padded train packs, so that each loss is written once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from areno.api.sites import predicted, trainable_sites


@dataclass(frozen=True)
class ResponseView:
    """The action sites of a pack as 1-D tensors. A = sites; in a padded pack, B*(L-1), padding masked out.

    mask_A            bool   trainable sites
    logprobs_A        float  under the model that trains, with gradient; 0 where masked
    old_logprobs_A    float  under the sampling policy; 0 where masked
    advantages_A      float  0 where masked
    seq_ids_A         int64  row of each site
    token_counts_B    float  trainable sites per row
    """

    mask_A: torch.Tensor
    logprobs_A: torch.Tensor
    old_logprobs_A: torch.Tensor
    advantages_A: torch.Tensor
    seq_ids_A: torch.Tensor
    token_counts_B: torch.Tensor

    @property
    def num_tokens(self) -> torch.Tensor:
        """0-d: trainable sites, at least 1 so that an empty pack divides by something."""
        return self.token_counts_B.sum().clamp(min=1)

    @property
    def num_sequences(self) -> torch.Tensor:
        """0-d: rows with a trainable site, at least 1."""
        return (self.token_counts_B > 0).sum().clamp(min=1).to(self.logprobs_A.dtype)

    def sequence_mean(self, values_A: torch.Tensor) -> torch.Tensor:
        """[B]: mean over each row's trainable sites of values that are 0 where masked."""
        sums_B = torch.zeros_like(self.token_counts_B).index_add(0, self.seq_ids_A, values_A)
        return sums_B / self.token_counts_B.clamp(min=1)

    def token_mean(self, values_A: torch.Tensor) -> torch.Tensor:
        """0-d: mean over all trainable sites of values that are 0 where masked."""
        return values_A.sum() / self.num_tokens


def response_view(data_pack: Mapping[str, Any], logprobs: torch.Tensor) -> ResponseView:
    """Flatten a pack in either layout. Masked entries become 0 before any arithmetic, so that garbage there (an
    infinite or NaN logprob of a tool token) can reach neither value nor gradient.

    Args:
        logprobs: [A] for a packed pack, [B, L-1] for a padded one.
    """
    device, dtype = logprobs.device, logprobs.dtype
    if "packed_response_mask" in data_pack:
        rows = int(data_pack["packed_num_sequences"])
        seq_ids_A = data_pack["packed_seq_ids"].to(device)
        old, advantages = data_pack["packed_logprobs"], data_pack["packed_advantages"]
    else:
        rows, sites = logprobs.shape
        seq_ids_A = torch.arange(rows, device=device).repeat_interleave(sites)
        old, advantages = predicted(data_pack["logprobs"]), predicted(data_pack["advantages"])
    mask_A = trainable_sites(data_pack).to(device).reshape(-1)
    zero = torch.zeros((), dtype=dtype, device=device)

    def flat(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_A, values.to(device=device, dtype=dtype).reshape(-1), zero)

    return ResponseView(
        mask_A=mask_A,
        logprobs_A=flat(logprobs),
        old_logprobs_A=flat(old),
        advantages_A=flat(advantages),
        seq_ids_A=seq_ids_A,
        token_counts_B=torch.zeros(rows, dtype=dtype, device=device).index_add(0, seq_ids_A, mask_A.to(dtype)),
    )


def log_ratio(view: ResponseView, ratio: str) -> torch.Tensor:
    """[A]: log of the importance ratio per token, 0 where masked.

    `unit`: value 0 with the gradient of the logprob (REINFORCE, as AReno does). `rollout`: against the rollout's
    logprobs, the published formula.

    Raises:
        ValueError: `ratio` is neither.
    """
    if ratio == "unit":
        return view.logprobs_A - view.logprobs_A.detach()
    if ratio == "rollout":
        return view.logprobs_A - view.old_logprobs_A
    raise ValueError(f"ratio must be 'unit' or 'rollout', got {ratio!r}.")


def divide(total: torch.Tensor, data_pack: Mapping[str, Any], own_count: torch.Tensor) -> torch.Tensor:
    """The loss's sum over the pack's `loss_denominator` where one is stamped on it, else over the pack's own count."""
    denominator = data_pack.get("loss_denominator")
    return total / (own_count if denominator is None else denominator)


def common_stats(view: ResponseView) -> dict[str, torch.Tensor]:
    """The statistics that do not depend on the loss, as detached 0-d tensors."""
    train_A = view.logprobs_A.detach()
    diff_A = view.old_logprobs_A - train_A
    return {
        "response_len": view.token_counts_B.sum() / view.num_sequences,
        "rollout_logprobs_mean": view.token_mean(view.old_logprobs_A),
        "train_logprobs_mean": view.token_mean(train_A),
        "logp_diff_mean": view.token_mean(diff_A),
        "logp_abs_diff_mean": view.token_mean(diff_A.abs()),
    }


def mean_and_std(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Population mean and standard deviation of the values that `mask` keeps; 0 and 0 where it keeps none."""
    kept = values.detach()[mask]
    if kept.numel() == 0:
        nothing = values.new_zeros(())
        return nothing, nothing.clone()
    return kept.mean(), kept.std(unbiased=False)
