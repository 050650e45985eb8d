"""Sums and differences for the demo: generated, endless, and checked by `reward.py` next to this file.

    python examples/arithmetic/problems.py --count 2000 --out problems.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """One question and its answer."""

    question: str
    answer: int

    @staticmethod
    def draw(rng: random.Random, largest: int = 9) -> Problem:
        """`a + b` or `a - b` of whole numbers up to `largest`; a difference is never negative."""
        a, b = rng.randint(0, largest), rng.randint(0, largest)
        if rng.random() < 0.5:
            return Problem(f"What is {a} + {b}?", a + b)
        a, b = max(a, b), min(a, b)
        return Problem(f"What is {a} - {b}?", a - b)

    def row(self) -> dict[str, object]:
        """The row of a training set."""
        return {"prompt": self.question, "solutions": [str(self.answer)]}


def problems(seed: int) -> Iterator[Problem]:
    """An endless stream, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield Problem.draw(rng)


def reply(number: int) -> str:
    """The form of an answer: what the warm start teaches and the reward asks for."""
    return f"The answer is {number}."


def main() -> None:
    parser = argparse.ArgumentParser(description="Write arithmetic problems as JSONL.")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        for _, problem in zip(range(args.count), problems(args.seed), strict=False):
            file.write(json.dumps(problem.row()) + "\n")


if __name__ == "__main__":
    main()
