"""PyTorch attention for packed rows: each row attends within itself, one causal kernel call per row.

What transformers does for packed rows under `sdpa` is a mask of S x S, over all rows together: S = 64k tokens in a
micro-batch need 4 GB for the mask alone, and nearly all of the work goes into pairs that it forbids.
Axes: S tokens of the concatenated rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "areno_rows"


def use_row_attention(model: Any) -> bool:
    """Switch a model that runs on `sdpa` over, if it then keeps packed rows apart; else leave it as it was.

    Returns:
        Whether it was switched. A model that does not hand its positions down to its attention cannot be.
    """
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)
    if _rows_are_apart(model):
        return True
    model.set_attn_implementation("sdpa")
    return False


def _rows_are_apart(model: Any) -> bool:
    """Whether the second of two packed rows stays the same, to the bit, when the first one changes."""
    position_ids = torch.tensor([[0, 1, 0, 1, 2]], device=model.device)
    training = model.training
    model.eval()
    with torch.no_grad():
        one, other = (
            model.base_model(
                input_ids=torch.tensor([[first, first, 1, 2, 3]], device=model.device),
                position_ids=position_ids,
                use_cache=False,
            ).last_hidden_state[:, 2:]
            for first in (1, 2)
        )
    model.train(training)
    return torch.equal(one, other)


def _mask(*, q_length: int, kv_length: int, **arguments: Any) -> Any:
    """As `sdpa_mask`, but none where only packing asks for one: `_attention` sees the rows in the positions.

    transformers forbids to skip the causal mask of a square without padding exactly when rows are packed.
    """
    packed = (
        q_length == kv_length
        and arguments.get("attention_mask") is None
        and arguments.get("local_size") is None
        and not arguments.get("allow_is_causal_skip", True)
    )
    return None if packed else sdpa_mask(q_length=q_length, kv_length=kv_length, **arguments)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    bounds = _row_bounds(arguments.get("position_ids"), query, key) if attention_mask is None else []
    if len(bounds) <= 2:
        whole: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **arguments
        )
        return whole
    rows = [
        sdpa_attention_forward(module, query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], None, **arguments)[0]
        for a, b in pairwise(bounds)
    ]
    return torch.cat(rows, dim=1), None


def _row_bounds(position_ids: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> list[int]:
    """Where rows begin in S, and S; nothing where there is no packing."""
    length = query.shape[2]
    if position_ids is None or query.shape[0] != 1 or position_ids.shape != (1, length) or key.shape[2] != length:
        return []
    restarts = (position_ids[0].diff() != 1).nonzero().squeeze(-1) + 1
    return [0, *restarts.tolist(), length]
