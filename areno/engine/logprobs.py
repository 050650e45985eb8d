"""Logprobs of the tokens that a train pack asks about, and of no others.

Axes: B rows, L padded length, S tokens of the concatenated rows, A action sites, K trainable sites, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from areno.api.sites import predicted_positions, trainable_sites
from areno.api.train_pack import TrainPack
from areno.engine.attention import shares_prefixes
from areno.engine.shared_prefix import share_prefixes


def site_logprobs(
    model: Any, pack: TrainPack, *, temperature: float, chunk_sites: int, plain_head: bool | None = None
) -> torch.Tensor:
    """Logprob of each predicted token under softmax(logits / temperature).

    Only trainable sites reach the vocabulary; every other entry is the constant 0. At most `chunk_sites` rows of
    logits in float32 are alive at a time, in the forward and in the backward pass.

    Args:
        pack: in either layout, on the model's device.
        plain_head: what `has_plain_head(model)` says; found out if None.

    Returns:
        float32 (float64 for a float64 model), [A] for a packed pack, [B, L-1] for a padded one.
    """
    mask = trainable_sites(pack)
    if "train_cu_seqlens" in pack:
        inputs, sites_K, targets_K = _packed_inputs(pack, mask, sharing=shares_prefixes(model))
    else:
        inputs, sites_K, targets_K = _padded_inputs(pack, mask)
    if plain_head is None:
        plain_head = has_plain_head(model)
    if plain_head:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        rows_KH = hidden.reshape(-1, hidden.shape[-1])[sites_K]
        head = model.get_output_embeddings()
    else:
        # The model does more than a matrix product between hidden state and logits: let it.
        sites_BL = torch.zeros(inputs["input_ids"].shape, dtype=torch.bool, device=sites_K.device)
        sites_BL.view(-1)[sites_K] = True
        columns = sites_BL.any(dim=0).nonzero().squeeze(-1)
        logits = model(**inputs, use_cache=False, logits_to_keep=columns).logits
        rows_KH, head = logits[sites_BL[:, columns]], torch.nn.Identity()
    values_K = _chunked(head, rows_KH, targets_K, temperature, chunk_sites)
    return values_K.new_zeros(mask.shape).masked_scatter(mask, values_K)


def has_plain_head(model: Any) -> bool:
    """Whether the model's logits are nothing but its output embedding of the last hidden state.

    Some models scale or cap their logits, under names that differ from model to model; so ask the model.
    """
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model(input_ids=ids, use_cache=False).logits
        return torch.equal(model.get_output_embeddings()(hidden), logits)


def _packed_inputs(
    pack: TrainPack, mask_A: torch.Tensor, *, sharing: bool
) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Model inputs, where in them the trainable sites are [K], and the tokens that they predict [K].

    Rows are kept apart by their restarting positions alone. With `sharing`, what rows begin with in common is laid down
    once.
    """
    ids, position_ids = pack["input_ids"], pack["position_ids"]
    positions_A = torch.from_numpy(predicted_positions(pack["train_cu_seqlens"])).to(ids.device)
    positions_K = positions_A[mask_A]
    sites_K, targets_K = positions_K - 1, ids[0, positions_K]
    if sharing:
        layout = share_prefixes(ids[0].cpu().numpy(), pack["train_cu_seqlens"].cpu().numpy())
        kept_U = torch.from_numpy(layout.kept_U).to(ids.device)
        ids, position_ids = ids[:, kept_U], position_ids[:, kept_U]
        sites_K = torch.from_numpy(layout.place_S).to(ids.device)[sites_K]
    return {"input_ids": ids, "position_ids": position_ids, "attention_mask": None}, sites_K, targets_K


def _padded_inputs(pack: TrainPack, mask_BL: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """As `_packed_inputs`; positions are those of the flattened [B, L]."""
    ids = pack["input_ids"]
    length = ids.shape[1]
    row_K, site_K = mask_BL.nonzero(as_tuple=True)
    attention_mask = torch.arange(length, device=ids.device) < pack["lengths"].to(ids.device)[:, None]
    inputs = {"input_ids": ids, "attention_mask": attention_mask.long()}
    return inputs, row_K * length + site_K, ids[row_K, site_K + 1]


def _chunked(
    head: torch.nn.Module, rows_KH: torch.Tensor, targets_K: torch.Tensor, temperature: float, chunk_sites: int
) -> torch.Tensor:
    if rows_KH.shape[0] <= chunk_sites:
        # One chunk is freed first thing in the backward pass: to recompute it would save nothing.
        return _token_logprobs(head, rows_KH, targets_K, temperature)
    parts = [
        checkpoint(
            _token_logprobs,
            head,
            rows_KH[k : k + chunk_sites],
            targets_K[k : k + chunk_sites],
            temperature,
            use_reentrant=False,
        )
        for k in range(0, rows_KH.shape[0], chunk_sites)
    ]
    return torch.cat(parts)


def _token_logprobs(
    head: torch.nn.Module, rows_KH: torch.Tensor, targets_K: torch.Tensor, temperature: float
) -> torch.Tensor:
    logits_KV: torch.Tensor = head(rows_KH)
    logits_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32)) / temperature
    return logits_KV.gather(-1, targets_K[:, None]).squeeze(-1) - logits_KV.logsumexp(dim=-1)
