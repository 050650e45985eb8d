"""The shift by one, in one place: which position of a row an action site predicts.

A row of L tokens has L-1 action sites. Site t reads the logits at position t and predicts the token at position t+1.
Axes: B rows, L padded length, S tokens of the concatenated rows, A action sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def predicted_positions(offsets_B1: torch.Tensor | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """int64 [A]: for each action site of rows concatenated at `offsets_B1`, the position in S of the token it predicts.

    These are all positions but the first of each row; rows of length 0 and 1 have none. The logits that predict the
    token are those of the position before.
    """
    bounds = offsets_B1.cpu().numpy() if isinstance(offsets_B1, torch.Tensor) else offsets_B1
    lens_B = np.diff(bounds)
    positions_S = np.arange(int(bounds[0]), int(bounds[-1]), dtype=np.int64)
    return np.delete(positions_S, bounds[:-1][lens_B > 0] - bounds[0])


def predicted(values_BL: torch.Tensor) -> torch.Tensor:
    """[B, L-1]: the part of a padded per-token tensor that action sites predict."""
    return values_BL[:, 1:]


def trainable_sites(pack: Mapping[str, Any]) -> torch.Tensor:
    """bool, in the layout of the loss's `logprobs`: [A] for a packed pack, [B, L-1] for a padded one.

    True where the predicted token is the model's own and is to be learned from.
    """
    if "packed_response_mask" in pack:
        mask: torch.Tensor = pack["packed_response_mask"]
        return mask.bool()
    mask = ~predicted(pack["prompt_mask"]).bool()
    if "loss_mask" in pack:
        mask = mask & predicted(pack["loss_mask"]).bool()
    return mask
