"""The help page of the train command: quick, grouped, and made from the declared knobs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from areno.cli.main import main
from areno.cli.train import command
from areno.config import knobs

HEAVY = ("torch", "transformers", "ray", "numpy", "datasets", "pandas", "pyarrow", "rich")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_heavy_is_imported() -> None:
    out = run(
        "import sys\nfrom areno.cli.main import main\n"
        "try:\n    main(['train', '--help'])\n"
        f"finally:\n    print('HEAVY', [m for m in {HEAVY} if m in sys.modules])\n"
    )
    assert "HEAVY []" in out


def test_it_answers_well_under_a_second() -> None:
    best = min(seconds() for _ in range(3))
    assert best < 0.8


def seconds() -> float:
    began = time.perf_counter()
    run("from areno.cli.main import main\nmain(['train', '--help'])")
    return time.perf_counter() - began


def test_every_knob_is_listed_in_its_group_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    groups = ["Basic:", "Rollout:", "Materialize:", "Train:", "Checkpoint:", "Observability:"]
    places = [out.index("\n" + group) for group in groups]
    assert places == sorted(places)
    flat = " ".join(out.split()).replace("- ", "-")  # undo the wrapping, also inside a word with a hyphen
    for knob in knobs():
        assert knob.option + " " in flat
        if knob.default is not None and knob.type is not bool:
            assert f"[default: {knob.default}]" in flat


def test_options_and_knobs_are_the_same_set() -> None:
    assert [param.name for param in command.params] == [knob.name for knob in knobs()]
