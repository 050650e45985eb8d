"""What a person sees of a run: tables, one line per step, and a progress bar where there is a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from areno.metrics import CompletionSample, StepMetrics

PIPE_WIDTH = 100
SHOWN_CHARACTERS = 400
_BARS = "▁▂▃▄▅▆▇█"
_HEADER = (
    f"{'step':>6} {'reward':>8} {'± std':>7} {'length':>7} {'cut off':>7} {'flat groups':>11}"
    f" {'loss':>10} {'grad':>8} {'tok/s':>7} {'time':>8}"
)


def make_console(stderr: bool = False) -> Console:
    """A console that does not wrap at 80 columns when it writes into a pipe, and never guesses at markup or emoji."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


class StepView:
    """The terminal side of a run log. Without a terminal there is no bar, only the lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._rewards: list[float] = []

    @contextmanager
    def running(self, total_steps: int) -> Iterator[None]:
        """Show the bar while the run goes on."""
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._console) as self._bar:
            self._task = self._bar.add_task("starting", total=total_steps)
            try:
                yield
            finally:
                self._bar = None

    def step(self, metrics: StepMetrics, samples: Sequence[CompletionSample]) -> None:
        """Print a finished step and move the bar on."""
        if not self._rewards:
            self._console.print(_HEADER, style="dim", soft_wrap=True)
        self._rewards.append(metrics.reward_mean)
        self._console.print(step_line(metrics), soft_wrap=True)
        if samples:
            self._console.print(samples_table(samples))
        if self._bar is not None and self._task is not None:
            said = f"reward {_number(metrics.reward_mean, '.3f')}  {_number(metrics.tokens_per_s, ',.0f')} tok/s"
            self._bar.update(self._task, advance=1, description=said)

    def say(self, text: str) -> None:
        """Print a line that belongs to no step."""
        self._console.print(Text(printable(text)), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a remark between the steps."""
        self._console.print(Text(printable(text), style="yellow"), soft_wrap=True)

    def reward_curve(self) -> str:
        """Mean reward of the first and the last steps, and the curve between them."""
        scored = [reward for reward in self._rewards if math.isfinite(reward)]
        if not scored:
            return "No step had a reward."
        ends = min(10, (len(scored) + 1) // 2)
        first, last = sum(scored[:ends]) / ends, sum(scored[-ends:]) / ends
        return f"Mean reward {first:.3f} (first {ends}) {sparkline(scored)} {last:.3f} (last {ends})."


def step_line(m: StepMetrics) -> str:
    """One step in one line, under the header's columns."""
    return (
        f"{m.step:>6} {_number(m.reward_mean, '.3f'):>8} {_number(m.reward_std, '.3f'):>7}"
        f" {_number(m.response_len_mean, '.1f'):>7} {_number(m.truncated_fraction, '.0%'):>7} {m.zero_variance_groups:>11}"
        f" {_number(m.loss, '.3g'):>10} {_number(m.grad_norm, '.3g'):>8} {_number(m.tokens_per_s, ',.0f'):>7}"
        f" {_number(m.step_e2e_time_s, '.2f') + ' s':>8}"
    )


def samples_table(samples: Sequence[CompletionSample]) -> Table:
    """Completions side by side; long texts are cut (all of them are in completions.jsonl)."""
    table = Table(title=f"step {samples[0].step}", title_justify="left", expand=True, show_lines=True)
    for name in ("prompt", "sample", "reward", "advantage"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", ratio=1, overflow="fold")
    for sample in samples:
        reward = "none" if sample.reward is None else _number(sample.reward, ".3f")
        numbers = (str(sample.prompt_index), str(sample.sample_index), reward, _number(sample.advantage, "+.3f"))
        table.add_row(*numbers, Text(printable(_cut(sample.text))))
    return table


def config_table(groups: Mapping[str, Mapping[str, Any]], changed: set[str], wide: set[str]) -> Group:
    """The resolved configuration: the `wide` values (paths) first, then half of the groups beside the other half.

    Changed values are bold.
    """
    narrow = {group: {name: values[name] for name in values if name not in wide} for group, values in groups.items()}
    blocks = [list(_config_rows(group, values, changed)) for group, values in narrow.items() if values]
    half = (len(blocks) + 1) // 2
    left, right = (list(itertools.chain(*some)) for some in (blocks[:half], blocks[half:]))
    paths = {name: value for values in groups.values() for name, value in values.items() if name in wide}
    return Group(
        _grid(_config_rows("Paths", paths, changed)),
        _grid(itertools.starmap(tuple.__add__, itertools.zip_longest(left, right, fillvalue=(Text(), Text())))),
    )


def _grid(rows: Iterable[tuple[Text, ...]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _config_rows(group: str, values: Mapping[str, Any], changed: set[str]) -> Iterator[tuple[Text, Text]]:
    yield Text(group, style="bold underline"), Text()
    for name, value in values.items():
        yield Text(name, style="dim"), Text(_shown(value), style="bold" if name in changed else "")
    yield Text(), Text()


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text: the mean of each of `width` runs of values, lowest to highest."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    edges = [round(i * len(finite) / width) for i in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def printable(text: str) -> str:
    """Text of unknown origin without the characters that could move the cursor or recolour the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _cut(text: str) -> str:
    over = len(text) - SHOWN_CHARACTERS
    return text if over <= 0 else f"{text[:SHOWN_CHARACTERS]}… (+{over:,} characters)"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "-" if value is None else "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def _number(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else "-"
