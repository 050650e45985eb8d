"""Flat rollout to ready micro-batches of eight rows, in one process, with a reward that costs next to nothing."""

from __future__ import annotations

import statistics
import tempfile

from benches.case import Case, compare, take_turns
from benches.inputs import TOKENIZERS, Size, size_of, write_rollout
from benches.micro import same_tensors
from benches.sides import PEERS, Side, sides

# The largest step takes a peer seconds and gigabytes: on one core and one tokenizer.
SMALL, LARGE = ("25k", "100k", "800k", "1M"), "8M"

PROFILED = "800k"


def run(rounds: int, quick: bool) -> list[Case]:
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for cores in (1, None):
            for tokenizer in TOKENIZERS[:1] if quick else TOKENIZERS:
                names = SMALL[:2] if quick else SMALL
                if not quick and cores == 1 and tokenizer == TOKENIZERS[0]:
                    names = (*SMALL, LARGE)
                with sides(cores=cores) as there:
                    for name in names:
                        path = write_rollout(folder, size_of(name), tokenizer)
                        for side in there.values():
                            side.ask("load", path=path, tokenizer=tokenizer)
                        cases += measure(there, name, tokenizer, cores, rounds)
        if not quick:
            cases.append(growth(folder, rounds))
    return cases


def measure(there: dict[str, Side], name: str, tokenizer: str, cores: int | None, rounds: int) -> list[Case]:
    """Packed and padded micro-batches of ours against each peer's."""
    size = size_of(name)
    calls = {
        "packed": lambda: there["ours"].ask("time", layout="packed"),
        "padded": lambda: there["ours"].ask("time", layout="padded"),
        **{peer: (lambda peer=peer: there[peer].ask("time")) for peer in PEERS},
    }
    times = take_turns(calls, rounds, limit_s=20)
    note = same_tensors({who: side.ask("result", layout="padded") for who, side in there.items()})
    cases = []
    for layout in ("packed", "padded"):
        ours = [1e3 * turn["wall"] for turn in times[layout]]
        case = f"{name}, {tokenizer}, {'one core' if cores == 1 else 'all cores'}, {layout}"
        for peer in PEERS:
            theirs = [1e3 * turn["wall"] for turn in times[peer]]
            lists = statistics.median(turn["to_lists"] for turn in times[peer])
            details = {
                "ns_per_token": round(1e6 * statistics.median(ours) / size.tokens, 2),
                "peer_ns_per_token": round(1e6 * statistics.median(theirs) / size.tokens, 2),
                "peer_lists_ms": round(1e3 * lists, 3),
                "ours_parts_ms": parts(times[layout]),
            }
            if name == PROFILED and cores == 1 and layout == "packed" and tokenizer == TOKENIZERS[0]:
                details["profile"] = there["ours"].ask("profile")
                details["peer_profile"] = there[peer].ask("profile")
            cases.append(
                compare("tokens", case, size.tokens, size.completions, ours, peer, theirs, note=note, details=details)
            )
    if cores == 1:
        cases.append(decode_case(there["ours"], size, f"decode {name}, {tokenizer}, one core", rounds))
    return cases


def growth(folder: str, rounds: int) -> Case:
    """Our time for as many tokens when they are part of a step of 8M and when they are the whole step."""
    usual, large = size_of(PROFILED), size_of(LARGE)
    times: dict[str, list[float]] = {PROFILED: [], LARGE: []}
    with Side("ours", cores=1) as side:
        for _ in range(rounds):
            for name, found in times.items():
                side.ask("load", path=write_rollout(folder, size_of(name), TOKENIZERS[0]), tokenizer=TOKENIZERS[0])
                turns = [1e3 * side.ask("time", layout="packed")["wall"] for _ in range(5)]
                found += turns[2:]
    per_usual = [ms * usual.tokens / large.tokens for ms in times[LARGE]]
    label = f"{PROFILED} tokens of a step of {LARGE}, {TOKENIZERS[0]}, one core, packed"
    note = "both after two steps that are not counted"
    return compare(
        "tokens", label, usual.tokens, usual.completions, per_usual, f"ours, {PROFILED}", times[PROFILED], note=note
    )


def parts(turns: list[dict[str, float]]) -> dict[str, float]:
    """Median milliseconds of each stage; micro-batches are what remains."""
    stages = ("decode_s", "score_s", "pack_s", "advantage_s")
    found = {stage[:-2]: round(1e3 * statistics.median(t[stage] for t in turns), 3) for stage in stages}
    rest = statistics.median(t["wall"] - sum(t[stage] for stage in stages) for t in turns)
    return {**found, "micro_batches": round(1e3 * rest, 3)}


def decode_case(ours: Side, size: Size, case: str, rounds: int) -> Case:
    """The byte table against the tokenizer's own `batch_decode`, in our process."""
    times = take_turns({"decode": lambda: ours.ask("decode")}, rounds, limit_s=10)["decode"]
    if any(turn["table"] < 0 for turn in times):
        raise SystemExit(f"{case}: the texts differ from batch_decode's.")
    table, library = ([1e3 * turn[side] for turn in times] for side in ("table", "library"))
    details = {"mtok_per_s": round(size.tokens / 1e3 / statistics.median(table), 1)}
    note = f"{details['mtok_per_s']:.0f} Mtok/s, texts equal"
    return compare(
        "tokens", case, size.tokens, size.completions, table, "batch_decode", library, note=note, details=details
    )
