"""How `areno reward check` looks in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from areno.materialize.reward_check import Verdict

# So much of a completion is shown.
SHOWN = 48


def print_verdicts(console: Console, file: str, verdicts: Sequence[Verdict]) -> None:
    """A table of all cases, every fault in full, and a summary."""
    table = Table(box=box.SIMPLE_HEAD)
    for title, justify in (("row", "right"), ("completion", "left"), ("reward", "right"), ("ms", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    table.add_column("finding")
    for v in verdicts:
        reward = "-" if v.reward is None else f"{v.reward:g}"
        table.add_row(str(v.row), _short(v.completion), reward, f"{v.seconds * 1e3:.1f}", finding(v))
    console.print(table)
    for fault, rows in _by_fault(verdicts).items():
        console.print(Text(f"rows {', '.join(map(str, rows))}: {fault}"))
    console.print(Text(summary(file, verdicts)))


def finding(verdict: Verdict) -> str:
    """In a few words what is wrong with a case, or its parts."""
    if verdict.fault:
        return verdict.cause
    if not verdict.repeatable:
        others = ", ".join("-" if r is None else f"{r:g}" for r in verdict.repeats)
        return f"not repeatable: then {others}"
    return ", ".join(f"{name} {value:g}" for name, value in verdict.parts.items())


def summary(file: str, verdicts: Sequence[Verdict]) -> str:
    """One line of counts and one of times."""
    rewards = [v.reward for v in verdicts if v.reward is not None]
    p50, p95, longest = np.quantile([v.seconds for v in verdicts], [0.5, 0.95, 1.0]) * 1e3
    values = (
        f"{len(set(rewards))} distinct rewards from {min(rewards):g} to {max(rewards):g}" if rewards else "no rewards"
    )
    return (
        f"{file}: {len(verdicts)} cases, {sum(bool(v.fault) for v in verdicts)} failed, "
        f"{sum(not v.repeatable for v in verdicts)} not repeatable, {values}; "
        f"{p50:.1f} ms a call (95 %: {p95:.1f}, longest: {longest:.1f})."
    )


def _by_fault(verdicts: Sequence[Verdict]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for v in verdicts:
        if v.fault:
            found.setdefault(v.fault, []).append(v.row)
    return found


def _short(text: str) -> Text:
    line = " ".join(text.split())
    return Text(line if len(line) <= SHOWN else line[: SHOWN - 1] + "…") if line else Text("(empty)", style="dim")
