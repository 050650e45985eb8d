"""PERFORMANCE.md from the JSON files that the suites have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

NOT_REACHED = Path(__file__).with_name("not_reached.md")

INTRO = """# Performance

Made by `python scripts/bench.py report` from the results of `python scripts/bench.py all`; every number below is a
median of rounds in which the sides ran in turn, each in a process of its own, on the same data. "AReno 0.0.3" is that
project before, "0.10.0" after its own optimization of this step: their published source archives, their own functions.
Ratios are peer over ours, so above 1 this project is faster. In brackets: least and most.
"""

TITLES = {
    "micro": (
        "Pieces of the step",
        "A train pack of 64 rows and 52k tokens, the mean logprob of 1M tokens, and group-relative advantages.",
    ),
    "tokens": (
        "Rollout to ready micro-batches, one process",
        "From flat arrays (validated) through decoding, a reward that costs next to nothing, packing and advantages to "
        "micro-batches of eight rows. The peers' time holds the lists that their engine makes of the rollout. Both sides "
        "score the same texts, so equal rewards show equal decoding.",
    ),
    "ray": (
        "Through Ray actors",
        "The same step from arrays in the driver's memory: one copy into the object store, shards on the actors, and "
        "micro-batches laid out in the driver's process (in a run each train worker lays out its own). The peer is our "
        "own local back end.",
    ),
    "driver": (
        "The driver's CPU time over Ray",
        "The rollout is in the object store already, put there by another process. All threads of the driver count.",
    ),
    "memory": ("Memory", "Peak of a process over the rollout's own arrays, and bytes in Ray's object store."),
    "reward": ("What scoring costs beside the reward function", "A hook that returns at once."),
    "simulate": (
        "Larger nodes, predicted",
        "From unit costs measured on this machine (`scripts/benches/simulate.py` states the model). The first rows "
        "check such predictions against steps measured here.",
    ),
    "trl": ("A whole training step", "SmolLM2-135M on the CPU, against TRL's GRPOTrainer."),
}


def write_report(results: Path, out: Path) -> Path:
    """Write the report from RESULTS/*.json.

    Raises:
        SystemExit: there are no results.
    """
    suites = {name: rows for name in TITLES if (rows := _read(results / f"{name}.json"))}
    if not suites:
        raise SystemExit(f"no results in {results}: run `python scripts/bench.py all` first.")
    parts = [INTRO, _machine(suites), _bars(suites), NOT_REACHED.read_text(encoding="utf-8")]
    for name, rows in suites.items():
        title, text = TITLES[name]
        parts.append(f"## {title}\n\n{text}\n\n{_table(rows)}")
        if name == "tokens":
            parts.append(_profiles(rows))
        if name == "ray":
            parts.append(_where_ray_does_not_pay(rows))
    out.write_text("\n".join(part.rstrip() + "\n" for part in parts if part), encoding="utf-8")
    return out


def _read(path: Path) -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _machine(suites: dict[str, list[Row]]) -> str:
    last = max((row for rows in suites.values() for row in rows), key=lambda row: row["date"])
    machine = dict(last["machine"])
    where = f"{machine.pop('cpu')}, {machine.pop('cores')} cores, {machine.pop('memory')} of memory"
    return f"Measured {last['date']} on {where}; " + ", ".join(f"{k} {v}" for k, v in machine.items()) + "."


def _table(rows: Iterable[Row]) -> str:
    lines = ["| case | ours ms | peer | peer ms | ratio | note |", "|---|---:|---|---:|---:|---|"]
    for row in rows:
        ours = f"{_ms(row['ours_ms'])} ({_ms(row['ours_spread_ms'][0])}-{_ms(row['ours_spread_ms'][1])})"
        theirs = ""
        if row["peer_ms"] is not None:
            low, high = row["peer_spread_ms"]
            theirs = f"{_ms(row['peer_ms'])} ({_ms(low)}-{_ms(high)})"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}" if row["ratio"] < 10 else f"{row['ratio']:.0f}"
        lines.append(f"| {row['case']} | {ours} | {row['peer'] or ''} | {theirs} | {ratio} | {row['note']} |")
    return "\n".join(lines)


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _find(rows: list[Row], start: str, peer: str | None = None) -> Row | None:
    return next((r for r in rows if r["case"].startswith(start) and peer in (None, r["peer"])), None)


def _bars(suites: dict[str, list[Row]]) -> str:
    """The bars this project sets itself, and whether this run reached them."""
    lines = ["## Bars", "", "| what | at least | here | reached |", "|---|---|---:|---|"]
    before, after = "areno 0.0.3", "areno 0.10.0"
    ratios = [
        ("micro", "train pack of 64 rows, padded", before, 60.0),
        ("micro", "train pack of 64 rows, padded", after, 15.0),
        ("micro", "logprob statistics", before, 100.0),
        ("micro", "advantages of 128", before, 100.0),
        ("micro", "advantages of 128", after, 5.0),
        ("tokens", "800k, deepseek, one core, packed", after, 12.0),
        ("ray", "800k, trivial reward, 2 actors", "ours, local", 1.0),
        ("ray", "100k, reward of 5 ms, 2 actors", "ours, local", 1.9),
    ]
    for suite, case, peer, bar in ratios:
        if row := _find(suites.get(suite, []), case, peer):
            lines.append(
                _bar(f"{suite}: {case}, against {peer}", f"{bar:g}x", f"{row['ratio']:.1f}x", row["ratio"] >= bar)
            )
    values: list[tuple[str, str, str, float, Callable[[Row], float], bool]] = [
        ("tokens", "decode 800k, deepseek", "Mtok/s", 50.0, lambda r: r["details"]["mtok_per_s"], True),
        ("driver", "8M in 1 chunk", "ms CPU", 10.0, lambda r: r["ours_ms"], False),
        ("driver", "8M in 8 chunks", "ms CPU", 10.0, lambda r: r["ours_ms"], False),
        ("memory", "object store, 8M", "bytes a token", 17.0, lambda r: r["details"]["peak_bytes_per_token"], False),
        ("reward", "own process, time limit, 4096", "us a sample", 20.0, lambda r: r["details"]["overhead_us"], False),
    ]
    for suite, case, unit, bar, value, at_least in values:
        if row := _find(suites.get(suite, []), case):
            found = value(row)
            sign = "" if at_least else "at most "
            reached = found >= bar if at_least else found <= bar
            lines.append(_bar(f"{suite}: {case}", f"{sign}{bar:g} {unit}", f"{found:.1f}", reached))
    for way in ("in 8 chunks", "in 1 chunk, one shard per actor, cold caches"):
        many, few = (_find(suites.get("driver", []), f"{n} {way}") for n in ("4M", "100k"))
        if many and few:
            more = many["ours_ms"] / few["ours_ms"] - 1
            lines.append(_bar(f"driver: 4M {way}, against 100k", "less than +20 %", f"{more:+.0%}", more < 0.2))
    if row := _find(suites.get("tokens", []), "800k tokens of a step of 8M"):
        lines.append(
            _bar("tokens: time per token at 8M, against 800k", "1x", f"{row['ratio']:.2f}x", row["ratio"] >= 1)
        )
    return "\n".join(lines)


def _bar(what: str, bar: str, here: str, reached: bool) -> str:
    return f"| {what} | {bar} | {here} | {'yes' if reached else '**no**'} |"


def _profiles(rows: list[Row]) -> str:
    """Where CPU time went in the peers' step and where it goes in ours."""
    found = [row for row in rows if "profile" in row["details"]]
    if not found:
        return ""
    parts = ["### Where the CPU time went, and where it goes", ""]
    parts.append(f"{found[0]['case']}: share of time spent in each function itself, and how often it was called.")
    sides = [(row["peer"], row["details"]["peer_profile"]) for row in found] + [
        ("ours", found[0]["details"]["profile"])
    ]
    for side, spots in sides:
        parts += ["", f"**{side}**", "", "| function | % | calls |", "|---|---:|---:|"]
        parts += [f"| `{name}` | {percent} | {calls} |" for name, percent, calls in spots]
    stages = found[0]["details"]["ours_parts_ms"]
    parts += ["", "Our stages in ms: " + ", ".join(f"{k.replace('_', '-')} {v}" for k, v in stages.items()) + "."]
    return "\n".join(parts)


def _where_ray_does_not_pay(rows: list[Row]) -> str:
    """The reward time per sample from which two actors are faster than one process."""
    lines = [
        "### Where Ray does not pay",
        "",
        "Two actors halve the time of reward calls, and cost what the calls and copies of a step cost. They are faster "
        "than one process once a reward takes longer than the break-even below; for smaller steps and cheaper rewards "
        "`--materialize-backend local` is the faster choice.",
        "",
        "| step | local ms | 2 actors ms | break-even, ms a sample |",
        "|---|---:|---:|---:|",
    ]
    for row in rows:
        if row["case"].endswith("trivial reward, 2 actors"):
            loss = row["ours_ms"] - row["peer_ms"]
            even = f"{2 * loss / row['completions']:.3f}" if loss > 0 else "always faster"
            step = f"{row['tokens']:,} tokens, {row['completions']} completions"
            lines.append(f"| {step} | {_ms(row['peer_ms'])} | {_ms(row['ours_ms'])} | {even} |")
    lines += ["", "While a rollout goes on, shards are materialized beside it, and only the last one is waited for."]
    return "\n".join(lines)
