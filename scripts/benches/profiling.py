"""Where CPU time goes, in words short enough for a table."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any


def hot_spots(call: Callable[[], Any], top: int = 8) -> list[list[Any]]:
    """[where, percent of the time, calls] of the functions that the most time is spent in, callees not counted."""
    call()
    profile = cProfile.Profile()
    profile.runcall(call)
    entries = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in entries.values())
    ranked = sorted(entries.items(), key=lambda item: -item[1][2])[:top]
    return [[_name(place), round(100 * own / total, 1), calls] for place, (_, calls, own, _, _) in ranked]


def _name(place: tuple[str, int, str]) -> str:
    file, line, function = place
    return function if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"
