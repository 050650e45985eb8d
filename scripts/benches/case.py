"""What every suite reports, and how the two sides are run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """One comparison. Times are medians in milliseconds; spreads are (least, most). `ratio` is peer over ours.

    A case that has no peer has None there. `note` says whether the results of the two sides agree, and what else there
    is to know; `details` holds numbers of this case alone; `machine` and `date` say where and when it was measured.
    """

    suite: str
    case: str
    tokens: int
    completions: int
    ours_ms: float
    ours_spread_ms: tuple[float, float]
    peer: str | None = None
    peer_ms: float | None = None
    peer_spread_ms: tuple[float, float] | None = None
    ratio: float | None = None
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=lambda: machine())
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))


def compare(
    suite: str,
    case: str,
    tokens: int,
    completions: int,
    ours: list[float],
    peer: str | None = None,
    theirs: list[float] | None = None,
    *,
    note: str = "",
    details: dict[str, Any] | None = None,
) -> Case:
    """A case from the lists of measured times in milliseconds, ours and, where there is one, the peer's."""
    ours_ms = statistics.median(ours)
    peer_ms = statistics.median(theirs) if theirs else None
    return Case(
        suite=suite,
        case=case,
        tokens=tokens,
        completions=completions,
        ours_ms=round(ours_ms, 4),
        ours_spread_ms=(round(min(ours), 4), round(max(ours), 4)),
        peer=peer,
        peer_ms=None if peer_ms is None else round(peer_ms, 4),
        peer_spread_ms=(round(min(theirs), 4), round(max(theirs), 4)) if theirs else None,
        ratio=None if peer_ms is None else round(peer_ms / ours_ms, 3),
        note=note,
        details=details or {},
    )


def take_turns(sides: dict[str, Callable[[], Any]], rounds: int, limit_s: float = 60.0) -> dict[str, list[Any]]:
    """What each side returns in each round, after a round to warm up. Every round begins with another side, and after
    `limit_s` no further round is begun once there are two."""
    names = list(sides)
    results: dict[str, list[Any]] = {name: [] for name in names}
    for name in names:
        sides[name]()
    began = time.monotonic()
    for turn in range(rounds):
        if turn >= 2 and time.monotonic() - began > limit_s:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(sides[name]())
    return results


@lru_cache(maxsize=1)
def machine() -> dict[str, str]:
    """What the numbers depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    names = ("numpy", "torch", "transformers", "tokenizers", "ray", "math-verify", "trl")
    versions = {name: version for name in names if (version := _version(name))}
    memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    cores = str(len(os.sched_getaffinity(0)))
    return {"cpu": model, "cores": cores, "memory": memory, "python": platform.python_version(), **versions}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_process(module: str, *args: object) -> Any:
    """Run `python -m benches.<module> ARGS` in a process of its own. Returns the JSON on the last line it prints.

    Threads that wait do so without spinning, on both sides alike: spinning ones make times on a shared machine a lottery.
    """
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", f"benches.{module}", *map(str, args)]
    done = subprocess.run(
        command, cwd=SCRIPTS, env=env, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(cases: list[Case]) -> str:
    """The cases as lines for people."""
    lines = [f"{'case':<50} {'tokens':>9} {'ours ms':>10} {'peer':>14} {'peer ms':>10} {'ratio':>9}  note"]
    for c in cases:
        peer = f"{c.peer or '':>14} {'' if c.peer_ms is None else f'{c.peer_ms:.3f}':>10}"
        ratio = "" if c.ratio is None else f"{c.ratio:.2f}x"
        lines.append(f"{c.suite + ': ' + c.case:<50} {c.tokens:>9} {c.ours_ms:>10.3f} {peer} {ratio:>9}  {c.note}")
    return "\n".join(lines)
