"""The README's library code runs as it stands, and it names only options and files that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from areno.config import knobs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_library_code_runs(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {"tokenizer": tokenizer, "reward": lambda record: float(len(record.completion))}
    exec(code, names)
    assert capsys.readouterr().out.count("[") == 2
    assert names["loss"].isfinite()


def test_options_exist() -> None:
    known = {k.option for k in knobs()} | {"--help", "--dataset-path", "--out", "--shm-size"}
    known |= {"--no-reward-dry-run", "--json"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= known


def test_files_exist() -> None:
    for name in re.findall(r"(?:scripts|examples|tests|docs)/[\w/]+\.\w+", README):
        assert (ROOT / name).exists(), name
