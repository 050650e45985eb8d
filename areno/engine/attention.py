"""PyTorch attention for packed rows: each row attends within itself, one causal kernel call per row.

What transformers does for packed rows under `sdpa` is a mask of S x S, over all rows together: S = 64k tokens in a
micro-batch need 4 GB for the mask alone, and nearly all of the work goes into pairs that it forbids.
Axes: S tokens of the concatenated rows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_ROWS, _SHARING = "areno_rows", "areno_sharing_rows"
"""Names under which transformers finds this attention: rows kept apart; and rows that may continue another's beginning."""


def use_row_attention(model: Any) -> bool:
    """Switch a model that runs on `sdpa` over, if it then keeps packed rows apart; else leave it as it was.

    Returns:
        Whether it was switched. A model that does not hand its positions down to its attention cannot be.
    """
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    for name in (_ROWS, _SHARING):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, _mask)
    model.set_attn_implementation(_ROWS)
    if not _rows_are_apart(model):
        model.set_attn_implementation("sdpa")
        return False
    if _beginnings_are_shared(model):
        model.set_attn_implementation(_SHARING)
    return True


def shares_prefixes(model: Any) -> bool:
    """Whether rows may be given to this model as `shared_prefix.SharedLayout`."""
    return getattr(model.config, "_attn_implementation", None) == _SHARING


def _rows_are_apart(model: Any) -> bool:
    """Whether the second of two packed rows stays the same, to the bit, when the first one changes."""
    one, other = (_states(model, [first, first, 1, 2, 3], [0, 1, 0, 1, 2])[2:] for first in (1, 2))
    return torch.equal(one, other)


def _beginnings_are_shared(model: Any) -> bool:
    """Whether a row that continues another's beginning comes out as it does alone. A layer with a window of its own
    takes its mask from transformers, which knows nothing of such rows."""
    alone = _states(model, [1, 2, 4, 5], [0, 1, 2, 3])[2:]
    shared = _states(model, [1, 2, 3, 4, 5], [0, 1, 2, 2, 3])[3:]
    tolerance = 1e-4 if alone.dtype in (torch.float32, torch.float64) else 0.05
    return torch.allclose(alone, shared, rtol=tolerance, atol=tolerance * float(alone.abs().max()))


def _states(model: Any, ids: list[int], positions: list[int]) -> torch.Tensor:
    """Last hidden states [S, H] of packed rows."""
    training = model.training
    model.eval()
    with torch.no_grad():
        out: torch.Tensor = model.base_model(
            input_ids=torch.tensor([ids], device=model.device),
            position_ids=torch.tensor([positions], device=model.device),
            use_cache=False,
        ).last_hidden_state
    model.train(training)
    return out[0]


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
    segments = _segments(arguments.get("position_ids"), query, key) if attention_mask is None else []
    if len(segments) < 2:
        whole: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **arguments
        )
        return whole
    outputs = []
    root = 0
    for start, stop, position in segments:
        keys, values, mask = key[:, :, start:stop], value[:, :, start:stop], None
        if position == 0:
            root = start
        else:  # it continues the first `position` tokens of the row that began last
            beginning = slice(root, root + position)
            keys = torch.cat([key[:, :, beginning], keys], dim=2)
            values = torch.cat([value[:, :, beginning], values], dim=2)
            size = (stop - start, position + stop - start)
            mask = torch.ones(size, dtype=torch.bool, device=query.device).tril(diagonal=position)[None, None]
        outputs.append(sdpa_attention_forward(module, query[:, :, start:stop], keys, values, mask, **arguments)[0])
    return torch.cat(outputs, dim=1), None


def _segments(position_ids: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> list[tuple[int, int, int]]:
    """(start, stop, first position) of each run of rising positions in S; nothing where there is no packing."""
    length = query.shape[2]
    if position_ids is None or query.shape[0] != 1 or position_ids.shape != (1, length) or key.shape[2] != length:
        return []
    breaks = (position_ids[0].diff() != 1).nonzero().squeeze(-1) + 1
    starts = torch.cat([breaks.new_zeros(1), breaks])
    firsts = position_ids[0, starts].tolist()
    bounds = [*starts.tolist(), length]
    return list(zip(bounds[:-1], bounds[1:], firsts, strict=True))
