"""Print how the mean reward of a run went, ten steps a line.

    python scripts/reward_curve.py runs/demo/metrics/metrics.jsonl [--must-gain 0.3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

WINDOW = 10


def rewards(path: Path) -> list[float]:
    """The mean reward of each step."""
    return [json.loads(line)["reward_mean"] for line in path.read_text(encoding="utf-8").splitlines()]


def gain(values: list[float]) -> float:
    """Mean of the last ten steps less mean of the first ten."""
    return statistics.mean(values[-WINDOW:]) - statistics.mean(values[:WINDOW])


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how the mean reward of a run went.")
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--must-gain", type=float, default=None, help="exit with 1 if the reward rose by less")
    args = parser.parse_args()
    values = rewards(args.metrics)
    for start in range(0, len(values), WINDOW):
        mean = statistics.mean(values[start : start + WINDOW])
        steps = f"{start + 1}-{min(start + WINDOW, len(values))}"
        print(f"steps {steps:>8}  reward {mean:.2f}  {'█' * round(40 * mean)}")
    print(f"Mean reward of the last {WINDOW} steps against the first {WINDOW}: {gain(values):+.2f}")
    if args.must_gain is not None and gain(values) < args.must_gain:
        sys.exit(f"The reward should have risen by at least {args.must_gain}.")


if __name__ == "__main__":
    main()
