"""`areno reward check`: what it shows of a good hook, a bad one and a flaky one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from areno.cli.main import cli
from areno.errors import UsageError

HOOK = """
import random, time
def reward_fn(r):
    if r.completion == "": raise ValueError("nothing to read")
    if r.completion == "hang": time.sleep(60)
    if r.completion == "die": import os; os._exit(1)
    if r.completion.startswith("I do"): return random.random()
    return {"reward": float(r.completion in r.answer), "length": len(r.completion)}
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "数据.jsonl"
    rows = [{"prompt": f"中文 {i}?", "solutions": [str(i)]} for i in range(4)]
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
    return path


def run(*args: Any) -> Result:
    return CliRunner().invoke(cli, ["reward", "check", *map(str, args)], env={"COLUMNS": "140"})


def test_made_up_completions(reward_file: Any, data: Path) -> None:
    path = reward_file(HOOK)
    result = run(path, "--dataset-path", data, "--rows", 2)
    assert result.exit_code == 1
    assert f"rows 0, 1: {path}:4: ValueError: nothing to read" in result.output.replace("\n", "")
    assert "not repeatable: then" in result.output
    assert "length 1" in result.output
    good = run(reward_file("def reward_fn(r): return len(r.completion)\n", "b.py"), "--dataset-path", data)
    assert good.exit_code == 0
    assert "0 failed, 0 not repeatable" in " ".join(good.output.split())


def test_completions_of_a_file_as_json(reward_file: Any, data: Path, tmp_path: Path) -> None:
    lines = [
        {"completion": "0"},
        {"text": "3", "row": 3},
        {"completion": "hang", "row": 1},
        {"completion": "die", "row": 2},
    ]
    file = tmp_path / "completions.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    result = run(
        reward_file(HOOK),
        "--dataset-path",
        data,
        "--completions",
        file,
        "--reward-timeout-s",
        0.5,
        "--repeat",
        1,
        "--json",
    )
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [(r["row"], r["reward"], r["cause"]) for r in report["results"]] == [
        (0, 1.0, ""), (3, 1.0, ""), (1, None, "timeout"), (2, None, "killed"),
    ]  # fmt: skip
    assert report["results"][0]["parts"] == {"length": 1.0}
    assert (report["ok"], report["failed"], report["not_repeatable"]) == (False, 2, 0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: needs JSON with `completion`"), ('{"row": 1}', "line 1: needs JSON"), ("[]", "line 1: needs JSON"),
        ('{"completion": 3}', "must be text"), ('{"completion": "a", "row": 9}', "no row 9; it has 4"),
        ("", "has no lines"),
    ],
)  # fmt: skip
def test_a_bad_completions_file(reward_file: Any, data: Path, tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "completions.jsonl"
    file.write_text(line)
    result = run(reward_file(HOOK), "--dataset-path", data, "--completions", file)
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)


def test_missing_files(reward_file: Any, data: Path, tmp_path: Path) -> None:
    for args in (
        (tmp_path / "none.py", "--dataset-path", data),
        (reward_file(HOOK), "--dataset-path", tmp_path / "none.jsonl"),
        (reward_file(HOOK), "--dataset-path", data, "--completions", tmp_path / "none.jsonl"),
    ):
        result = run(*args)
        assert isinstance(result.exception, UsageError)
        assert "none." in str(result.exception)
