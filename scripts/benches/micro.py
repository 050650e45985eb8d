"""Pieces of the step: laying out a train pack, the mean logprob, the advantages."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np

from benches.case import Case, compare, take_turns
from benches.inputs import Size, write_rollout
from benches.sides import PEERS, Side, sides

PACK = Size(16, 4, 2048, 52_000 - 64 * 120)  # 64 rows, 52k tokens with their prompts of 120
STATISTICS = Size(32, 8, 8192, 1_000_000)
REPEAT = {"ours": 200, "areno 0.0.3": 5, "areno 0.10.0": 10}


def run(rounds: int, quick: bool) -> list[Case]:
    rounds = 3 if quick else max(rounds, 7)
    with tempfile.TemporaryDirectory() as folder, sides() as there:
        cases = []
        for size in (PACK, STATISTICS):
            path = write_rollout(folder, size, "deepseek")
            for side in there.values():
                side.ask("load", path=path, tokenizer="deepseek")
            if size is PACK:
                note = same_tensors({name: side.ask("result", layout="padded") for name, side in there.items()})
                notes = dict.fromkeys(PEERS, note)
                cases += measure(there, "pack_padded", "train pack of 64 rows, padded", 52_000, 64, rounds, notes)
                notes = dict.fromkeys(PEERS, "ours without padding, against their padded pack")
                cases += measure(there, "pack_packed", "train pack of 64 rows, packed", 52_000, 64, rounds, notes)
            else:
                tokens, rows = size.tokens, size.completions
                notes = dict.fromkeys(PEERS, "")
                cases += measure(there, "statistics", "logprob statistics", tokens, rows, rounds, notes)
        cases += measure(there, "advantages", "advantages of 128 groups of 16", 0, 2048, rounds, advantage_notes(there))
        return cases


def measure(
    there: dict[str, Side], piece: str, name: str, tokens: int, rows: int, rounds: int, notes: dict[str, str]
) -> list[Case]:
    """One case per peer. A peer that has no packed layout is timed on its padded one."""

    def ask(who: str) -> float:
        case = "pack_padded" if piece == "pack_packed" and who != "ours" else piece
        return 1e3 * float(there[who].ask("micro", case=case, repeat=REPEAT[who]))

    times = take_turns({who: (lambda who=who: ask(who)) for who in there}, rounds)
    return [compare("micro", name, tokens, rows, times["ours"], peer, times[peer], note=notes[peer]) for peer in PEERS]


def same_tensors(results: dict[str, dict[str, Any]]) -> str:
    """Whether the padded tensors of all sides have the same bits, and their advantages the same values but in the first
    group, whose rewards are all equal."""
    ours = results["ours"]
    for peer in PEERS:
        if results[peer]["sums"] != ours["sums"]:
            return f"tensors DIFFER from {peer}: {results[peer]['sums']} {ours['sums']}"
        gap = np.abs(np.array(results[peer]["advantages"]) - np.array(ours["advantages"]))
        if gap[8:].max() > 1e-3:
            return f"advantages DIFFER from {peer} by {gap[8:].max()}"
    return "tensors equal bit for bit, advantages to 1e-3"


def advantage_notes(there: dict[str, Side]) -> dict[str, str]:
    """Per peer: how far its advantages are from ours on random groups, and on one of equal rewards, which must all be 0."""
    rewards = np.random.default_rng(0).integers(0, 5, 128 * 16).astype(float).tolist()
    found = {who: np.array(side.ask("advantages_of", rewards=rewards, sizes=[16] * 128)) for who, side in there.items()}
    equal = {who: max(map(abs, side.ask("advantages_of", rewards=[0.9] * 7, sizes=[7]))) for who, side in there.items()}
    return {
        peer: f"equal to {np.abs(found[peer] - found['ours']).max():.1g}, but for groups of equal rewards: of seven times "
        f"0.9 ours makes {equal['ours']:g}, theirs {equal[peer]:.2g} (float32 rounding over a deviation of 0 plus 1e-8)"
        for peer in PEERS
    }
