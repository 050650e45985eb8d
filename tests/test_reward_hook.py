"""Reward files: found by path, run once, and every fault told with file and line before anything starts."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from areno.api import RewardRecord
from areno.errors import UsageError
from areno.materialize.reward_hook import RewardSource, load_reward_hook

RECORD = RewardRecord("p", "c", metadata={"prompt_index": 0, "sample_index": 0})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def reward_fn(record)\n    return 1\n", r"reward\.py:1: .*expected ':'"),
        ("x = 1\n", "defines no reward_fn"),
        ("reward_fn = 3\n", "reward_fn is a int, not a function"),
        ("def reward_fn():\n    return 1\n", "cannot be called with one argument"),
        ("def reward_fn(a, b):\n    return 1\n", "cannot be called with one argument"),
        ("import nothing_of_this_name\n", r"reward\.py:1: ModuleNotFoundError"),
        ("x = 1\ny = x / 0\n", r"reward\.py:2: ZeroDivisionError"),
        ("import sys\nsys.exit(3)\n", r"reward\.py:2: SystemExit"),
        ("x = '\0'\n", "null bytes"),
    ],
)
def test_a_broken_file_is_told_with_its_place(reward_file: Any, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_reward_hook(reward_file(text))


def test_a_missing_file_is_told_with_its_absolute_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path / "none.py")):
        load_reward_hook(tmp_path / "none.py")
    with pytest.raises(UsageError, match="path to a Python file or a function, got int"):
        load_reward_hook(3)  # type: ignore[arg-type]


def test_a_file_called_math_may_import_its_neighbour(reward_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = reward_file(
        "import math\nimport neighbour_é\ndef reward_fn(r): return math.floor(neighbour_é.X)\n", "math.py"
    )
    reward_file("X = 2.5\n", "neighbour_é.py")
    reward_file("raise RuntimeError('shadowed')\n", "random.py")
    monkeypatch.chdir(os.path.dirname(path))
    assert load_reward_hook("math.py").fn(RECORD) == 2
    import random

    assert random.random() < 1


def test_loaded_once_per_process_and_picklable(reward_file: Any) -> None:
    path = reward_file(
        "calls = []\nclass Gold:\n    def __eq__(self, other): return type(other) is Gold\n"
        "def reward_fn(r):\n    calls.append(1)\n    return len(calls)\ndef make(): return Gold()\n"
    )
    first, second = load_reward_hook(path), load_reward_hook(path)
    assert first.fn is second.fn
    assert (first.fn(RECORD), second.fn(RECORD)) == (1, 2)
    gold = first.fn.__globals__["make"]()
    assert pickle.loads(pickle.dumps(gold)) == gold


def test_an_edit_during_the_run_is_not_picked_up(reward_file: Any) -> None:
    path = reward_file("def reward_fn(r): return 1\n")
    source = pickle.loads(pickle.dumps(RewardSource.read(path)))
    reward_file("def reward_fn(r): return 2\n")
    assert source.load().fn(RECORD) == 1
    assert load_reward_hook(path).fn(RECORD) == 2


def test_callables_of_every_kind() -> None:
    class Scorer:
        def __call__(self, record: RewardRecord) -> int:
            return len(record.completion)

    assert load_reward_hook(Scorer()).fn(RECORD) == 1
    assert load_reward_hook(lambda record, weight=2: weight).fn(RECORD) == 2
    with pytest.raises(UsageError, match="one argument"):
        load_reward_hook(lambda: 1)
