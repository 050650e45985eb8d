"""Measure this project against the tools it replaces, one suite at a time.

    python scripts/bench.py SUITE [--quick] [--rounds 5] [--json FILE]
    python scripts/bench.py all [--quick]            every suite, one after the other
    python scripts/bench.py report [--json FOLDER]   PERFORMANCE.md from what the suites have written

A suite is a module in scripts/benches/ with `run(rounds, quick) -> list[Case]`. Both sides of a comparison run in the
same call, in turn, and their medians are compared. Cases are written as JSON, to build/bench/SUITE.json by default.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path

from benches.case import SCRIPTS, table

SUITES = ("micro", "tokens", "ray", "driver", "memory", "reward", "simulate", "trl")
RESULTS = SCRIPTS.parent / "build" / "bench"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure against the peers, in the same run on the same data.")
    parser.add_argument("suite", choices=[*SUITES, "all", "report"])
    parser.add_argument("--rounds", type=int, default=None, help="how often the sides take turns")
    parser.add_argument("--quick", action="store_true", help="smaller inputs and fewer rounds, to see that it works")
    parser.add_argument("--json", "--out", dest="json", type=Path, default=None, help="where the cases are written")
    args = parser.parse_args()
    if args.suite == "report":
        from benches.report import write_report

        print(write_report(args.json or RESULTS, SCRIPTS.parent / "PERFORMANCE.md"))
        return
    for suite in SUITES if args.suite == "all" else [args.suite]:
        cases = importlib.import_module(f"benches.{suite}").run(args.rounds or (3 if args.quick else 5), args.quick)
        print(table(cases), file=sys.stderr)
        out = args.json if args.json and args.suite != "all" else RESULTS / f"{suite}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps([dataclasses.asdict(case) for case in cases], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
