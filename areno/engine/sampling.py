"""Draw the next token of each row, from a random stream of the row's own.

Axes: B rows side by side, V vocabulary, T positions of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from areno.api.models import SamplingParams

_FEW = 1024


def uniform_streams(seed: int, step: int, rows: Sequence[tuple[int, int]], length: int) -> npt.NDArray[np.float64]:
    """float64 [B, T] in [0, 1): row b's stream is set by (seed, step, prompt index, sample index) and nothing else.

    Philox is counter-based: the identity is the upper part of the counter, so no two streams overlap, and a stream's
    beginning does not depend on `length`.
    """
    streams = np.empty((len(rows), length), dtype=np.float64)
    for b, (prompt_index, sample_index) in enumerate(rows):
        counter = np.array([0, sample_index, prompt_index, step], dtype=np.uint64)
        np.random.Generator(np.random.Philox(key=seed, counter=counter)).random(out=streams[b])
    return streams


def draw(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's token by inverse CDF of its uniform, and the token's logprob.

    The logprob is that of the distribution at `params.logprob_temperature`, before top-k and top-p. A logit of -inf is
    a token that cannot come; a NaN or +inf anywhere in a row, or no finite logit at all, gives the logprob NaN.

    Args:
        logits_BV: float32 or float64 [B, V].
        uniforms_B: float64 [B].

    Returns:
        int64 [B] tokens and float32 [B] logprobs.
    """
    top_B1, likeliest_B1 = logits_BV.max(dim=-1, keepdim=True)
    # Relative to the maximum before the division: a small temperature cannot overflow.
    scaled_BV = (logits_BV - top_B1).div_(params.logprob_temperature)
    probs_BV = scaled_BV.exp()
    total_B1 = probs_BV.sum(dim=-1, keepdim=True, dtype=torch.float64)
    if params.greedy:
        tokens_B1 = likeliest_B1
    else:
        if params.top_k > 0 or params.top_p < 1:
            probs_BV = keep_likeliest(probs_BV, params.top_k, params.top_p)
        tokens_B1 = _invert_cdf(probs_BV, uniforms_B[:, None])
        # A parallel scan may place a rounding step on a token of probability 0.
        tokens_B1 = torch.where(probs_BV.gather(-1, tokens_B1) > 0, tokens_B1, likeliest_B1)
    logprobs_B1 = scaled_BV.gather(-1, tokens_B1).double() - total_B1.log()
    return tokens_B1.squeeze(-1), logprobs_B1.squeeze(-1).float()


def keep_likeliest(probs_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set the probability of all but the likeliest tokens to 0.

    Tokens are ranked by probability, equal ones by id, lower first. Top-k keeps exactly the first k (all if k < 1). Of
    those, top-p keeps the shortest beginning whose share of their sum reaches `top_p`, at least one token.
    """
    vocabulary = probs_BV.shape[-1]
    size = min(top_k, vocabulary) if top_k > 0 else vocabulary
    if top_p < 1:
        ranked_BK, count_B1 = _shortest_beginning(probs_BV, size, top_p)
    else:
        ranked_BK = probs_BV.topk(size).values
        count_B1 = torch.full_like(ranked_BK[:, :1], size, dtype=torch.int64)
    least_B1 = ranked_BK.gather(-1, count_B1 - 1)
    above_BV, tied_BV = probs_BV > least_B1, probs_BV == least_B1
    room_B1 = count_B1 - above_BV.sum(dim=-1, keepdim=True)
    return probs_BV.masked_fill(~(above_BV | (tied_BV & (tied_BV.cumsum(dim=-1) <= room_B1))), 0.0)


def _shortest_beginning(probs_BV: torch.Tensor, size: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest probabilities [B, K], falling, and how many of them int64 [B, 1] reach `top_p` of the first `size`.

    To sort a whole vocabulary costs as much as a layer, and a few hundred tokens nearly always hold the share.
    """
    vocabulary = probs_BV.shape[-1]
    for width in (min(size, _FEW), size) if size == vocabulary else (size,):
        ranked_BK = probs_BV.topk(width).values
        cdf_BK = ranked_BK.cumsum(dim=-1, dtype=torch.float64)
        total_B1 = probs_BV.sum(dim=-1, keepdim=True, dtype=torch.float64) if size == vocabulary else cdf_BK[:, -1:]
        if bool((cdf_BK[:, -1:] >= top_p * total_B1).all()):
            break
    return ranked_BK, 1 + (cdf_BK[:, :-1] < top_p * total_B1).sum(dim=-1, keepdim=True)


def _invert_cdf(weights_BV: torch.Tensor, uniforms_B1: torch.Tensor) -> torch.Tensor:
    """int64 [B, 1]: the first token whose cumulated weight exceeds the uniform's share of the total."""
    cdf_BV = weights_BV.cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cdf_BV[:, -1:].contiguous()
    # A product that rounds up to the total would point past the last token.
    target_B1 = torch.minimum(uniforms_B1 * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    return torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=weights_BV.shape[-1] - 1)
