"""`areno reward check`: a reward function on real rows, before GPU hours are spent on it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areno.cli.options import HELP, KnobOption
from areno.config import knobs, reward_on_error_policy
from areno.errors import UsageError

if TYPE_CHECKING:
    from areno.materialize.reward_check import Case, Verdict

_SHARED = ("dataset_loader_fn", "reward_timeout_s", "reward_memory_gb", "reward_isolation", "reward_concurrency")


@click.group(context_settings=HELP)
def command() -> None:
    """Look at reward functions outside of a run."""


def _shared_options() -> list[click.Parameter]:
    return [KnobOption(knob) for knob in knobs() if knob.name in _SHARED]


@click.command(context_settings=HELP, params=_shared_options())
@click.argument("file", type=str)
@click.option("--dataset-path", required=True, metavar="PATH", help="As in `areno train`.")
@click.option(
    "--completions",
    metavar="FILE.jsonl",
    help="Lines with `completion` (or `text`) and `row` (of the data set, from 0; by default the line's number).",
)
@click.option("--rows", type=click.IntRange(min=1), default=8, show_default=True, help="Rows of the data set to try.")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Tries of each case, to see it repeat."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def check(
    file: str, dataset_path: str, completions: str | None, rows: int, repeat: int, as_json: bool, **knob_values: Any
) -> None:
    """Load FILE as training would and score real rows: each with its solutions, a wrong answer and an empty one, or with
    the completions of a file. Exit code 1 if a call fails or does not repeat itself.
    """
    from areno.materialize.reward_check import check_reward
    from areno.materialize.reward_hook import RewardSource
    from areno.materialize.scoring import ScoringOptions

    source = RewardSource.read(file)
    cases = _cases(dataset_path, knob_values["dataset_loader_fn"], completions, rows)
    options = ScoringOptions(
        on_error=reward_on_error_policy("skip"),
        timeout_s=knob_values["reward_timeout_s"],
        memory_gb=knob_values["reward_memory_gb"],
        isolate=knob_values["reward_isolation"],
        concurrency=knob_values["reward_concurrency"],
    )
    verdicts = check_reward(source, cases, options, repeat=repeat, repeat_cases=len(cases))
    good = all(not v.fault and v.repeatable for v in verdicts)
    if as_json:
        click.echo(json.dumps(_report(file, verdicts, good), ensure_ascii=False, indent=2))
    else:
        from areno.terminal import make_console
        from areno.terminal_reward import print_verdicts

        print_verdicts(make_console(), file, verdicts)
    sys.exit(0 if good else 1)


command.add_command(check)


def _report(file: str, verdicts: list[Verdict], good: bool) -> dict[str, Any]:
    return {
        "hook": file,
        "ok": good,
        "failed": sum(bool(v.fault) for v in verdicts),
        "not_repeatable": sum(not v.repeatable for v in verdicts),
        "results": [dataclasses.asdict(v) | {"repeatable": v.repeatable} for v in verdicts],
    }


def _cases(dataset_path: str, loader: str | None, completions: str | None, limit: int) -> list[Case]:
    """Cases from the first rows, or for every line of a completions file."""
    from areno.data import ByteTokenizer, PromptSource
    from areno.materialize.reward_check import Case, made_up
    from areno.rows import load_rows

    data = load_rows(dataset_path, loader)
    read = None if completions is None else _read_completions(completions)
    wanted = range(min(limit, len(data))) if read is None else [row for row, _ in read]
    for row in wanted:
        if not 0 <= row < len(data):
            raise UsageError(f"{completions}: the data set has no row {row}; it has {len(data)}, counted from 0.")
    source = PromptSource(
        [dict(data[row]) for row in wanted],
        ByteTokenizer(),
        batch_size=1,
        max_prompt_tokens=1 << 30,
        origin=dataset_path,
    )
    items = [source.item(i) for i in range(len(wanted))]
    if read is None:
        return [case for row, item in zip(wanted, items, strict=True) for case in made_up(row, item)]
    return [Case(row, item, text) for (row, text), item in zip(read, items, strict=True)]


def _read_completions(path: str) -> list[tuple[int, str]]:
    """(row of the data set, completion) per line; without `row`, the line's own number."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--completions {path} cannot be read ({error}): check the path.") from error
    read: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["completion"] if "completion" in entry else entry["text"]
            row = entry.get("row")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}, line {number}: needs JSON with `completion` (or `text`), got {line:.60}"
            ) from error
        if not isinstance(text, str) or not (row is None or isinstance(row, int)):
            raise UsageError(f"{path}, line {number}: `completion` must be text and `row` a number.")
        read.append((len(read) if row is None else row, text))
    if not read:
        raise UsageError(f"--completions {path} has no lines: give at least one completion.")
    return read
