"""Where the record of a run goes: metrics.jsonl, completions.jsonl, TensorBoard and the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from areno.metrics import CompletionSample, StepMetrics

if TYPE_CHECKING:
    from areno.terminal import StepView

METRICS, COMPLETIONS, CONFIG, TENSORBOARD = "metrics.jsonl", "completions.jsonl", "config.json", "tensorboard"


class RunLog:
    """The record of one run: every step is on disk before `log_step` returns. A context manager.

    A folder that already holds a run keeps it, moved into `previous-N/`. Files are UTF-8 with readable text; a number
    that is not finite is written as null and left out of TensorBoard.

    Args:
        folder: made if it is missing.
        config: written to config.json.
        total_steps: length of the progress bar.
        view: the terminal; None shows nothing.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any], total_steps: int, view: StepView | None = None):
        self.folder = Path(folder)
        self._config = dict(config)
        self._total_steps = total_steps
        self._view = view
        self._closing = ExitStack()

    def __enter__(self) -> RunLog:
        from torch.utils.tensorboard import SummaryWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        _set_aside(self.folder)
        (self.folder / CONFIG).write_text(_json(self._config, indent=2) + "\n", encoding="utf-8")
        self._metrics = self._closing.enter_context(_open_lines(self.folder / METRICS))
        self._writer = self._closing.enter_context(SummaryWriter(str(self.folder / TENSORBOARD)))
        self._completions: IO[str] | None = None
        if self._view is not None:
            self._closing.enter_context(self._view.running(self._total_steps))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def log_step(self, metrics: StepMetrics, samples: Sequence[CompletionSample] = ()) -> None:
        """Record a finished step, with the completions that are to be shown."""
        numbers = metrics.as_dict()
        _write_line(self._metrics, numbers)
        for key, number in numbers.items():
            if key != "step" and math.isfinite(number):
                self._writer.add_scalar(key, number, metrics.step)
        self._writer.flush()
        if samples:
            if self._completions is None:
                self._completions = self._closing.enter_context(_open_lines(self.folder / COMPLETIONS))
            for sample in samples:
                _write_line(self._completions, dataclasses.asdict(sample))
        if self._view is not None:
            self._view.step(metrics, samples)

    def note(self, text: str) -> None:
        """Tell the person at the terminal something that the numbers do not say."""
        if self._view is not None:
            self._view.note(text)


def _set_aside(folder: Path) -> None:
    """Move the files of an earlier run into a folder of their own, so that two runs never mix in one file."""
    earlier = [folder / name for name in (METRICS, COMPLETIONS, CONFIG, TENSORBOARD) if (folder / name).exists()]
    if not earlier:
        return
    number = 1
    while (home := folder / f"previous-{number}").exists():
        number += 1
    home.mkdir()
    for path in earlier:
        path.rename(home / path.name)


def _open_lines(path: Path) -> IO[str]:
    # A lone surrogate cannot be encoded; backslashreplace turns it into the JSON escape that reads back as the same.
    return path.open("w", encoding="utf-8", errors="backslashreplace")


def _write_line(file: IO[str], record: Mapping[str, Any]) -> None:
    file.write(_json(record) + "\n")
    file.flush()


def _json(record: Mapping[str, Any], indent: int | None = None) -> str:
    plain = {key: _plain(value) for key, value in record.items()}
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    """A value that JSON has: numpy and 0-d torch numbers as Python's, null for a number that is not finite."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
