"""The check command: what it finds, what it says about the rest, and its exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areno.cli import check
from areno.cli.check import Finding, _imported
from areno.cli.main import main


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["check", *args])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys=capsys)
    assert code == 0
    for name in ("python", "cpu", "torch", "transformers", "datasets", "ray", "attention native", "hub"):
        assert name in out
    assert out.endswith("Ready to train.\n")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run("--json", capsys=capsys)
    report: dict[str, Any] = json.loads(out)
    assert (code, report["ready"]) == (0, True)
    assert all(set(entry) == {"name", "status", "detail", "next_step"} for entry in report["checks"])
    assert all(entry["next_step"] for entry in report["checks"] if entry["status"] != "ok")


@pytest.mark.parametrize("args", [(), ("--json",)])
def test_something_is_missing(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "look", lambda: [Finding("torch", "missing", "not installed", "pip install torch")])
    code, out = run(*args, capsys=capsys)
    assert code == 1
    assert "pip install torch" in out
    assert "Not ready" in out or json.loads(out)["ready"] is False


def test_absent_and_broken_packages(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "areno_test_broken.py").write_text("raise OSError('libcuda.so.1: cannot open')\n", encoding="utf-8")
    (tmp_path / "areno_test_halved.py").write_text("import areno_test_no_such_part\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert _imported("areno_test_absent", "missing", "x").detail == "not installed"
    assert "libcuda" in _imported("areno_test_broken", "missing", "x").detail
    assert "areno_test_no_such_part" in _imported("areno_test_halved", "optional", "x").detail
