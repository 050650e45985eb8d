"""What a reward function may return, and what becomes of it. Nothing is converted by guess."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class BadRewardError(ValueError):
    """A reward function returned something that is no reward. `cause` is none, non_finite or bad_type."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward and the named parts that it was returned with."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


def as_reward(value: Any) -> Reward:
    """The reward behind a Python, numpy or 0-d torch number or bool, or a dict of such with a key `reward` or `score`.

    Raises:
        BadRewardError: None, NaN, infinity, or anything else.
    """
    if type(value) is float and math.isfinite(value):
        return Reward(value)
    if isinstance(value, dict):
        return _from_dict(value)
    return Reward(_finite(value, "returned"))


def _from_dict(value: dict[Any, Any]) -> Reward:
    key = next((k for k in ("reward", "score") if k in value), None)
    if key is None:
        keys = ", ".join(map(repr, value)) or "none"
        raise BadRewardError("bad_type", f"returned a dict without the key 'reward' or 'score' (its keys: {keys})")
    components = {str(k): _finite(v, f"returned, under {k!r},") for k, v in value.items() if k != key}
    return Reward(_finite(value[key], f"returned, under {key!r},"), components)


def _finite(value: Any, returned: str) -> float:
    if value is None:
        raise BadRewardError("none", f"{returned} None")
    if (isinstance(value, np.ndarray) and value.ndim == 0) or _is_scalar_tensor(value):
        value = value.item()
    if isinstance(value, np.bool_):
        return float(value)
    if not (isinstance(value, numbers.Real) and isinstance(value, (int, float, np.integer, np.floating))):
        raise BadRewardError("bad_type", f"{returned} a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise BadRewardError("non_finite", f"{returned} an integer that no float can hold") from None
    if not math.isfinite(number):
        raise BadRewardError("non_finite", f"{returned} {number}, not a finite number")
    return number


def _is_scalar_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # a tensor can only come from a process that has imported torch
    return torch is not None and isinstance(value, torch.Tensor) and value.ndim == 0
