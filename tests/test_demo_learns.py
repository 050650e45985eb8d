"""The demo's own parts, put together as scripts/demo.sh does: the reward must really rise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def demo_options() -> list[str]:
    """The options of `areno train` in scripts/demo.sh that say how to learn."""
    script = (ROOT / "scripts" / "demo.sh").read_text(encoding="utf-8")
    command = re.search(r"areno train((?:.*\\\n)+.*)", script)
    assert command is not None
    words = command.group(1).replace("\\\n", " ").split()
    own = {"--ckpt", "--dataset-path", "--reward-fn-path", "--save-path", "--metrics-log-dir"}
    pairs = [i for i, word in enumerate(words) if word in own]
    skip = {j for i in pairs for j in (i, i + 1)}
    return [word for i, word in enumerate(words) if i not in skip and not word.startswith('"')]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mean_reward_of_the_last_ten_steps_is_at_least_three_tenths_above_the_first_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # as in the demo

    def python(*args: object) -> None:
        subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, check=True)

    python("scripts/make_tiny_model.py", "--out", tmp_path / "tiny")
    python("examples/arithmetic/problems.py", "--count", 2000, "--out", tmp_path / "problems.jsonl")
    paths = {
        "--ckpt": tmp_path / "tiny",
        "--dataset-path": tmp_path / "problems.jsonl",
        "--reward-fn-path": "examples/arithmetic/reward.py",
        "--save-path": tmp_path / "checkpoints",
        "--metrics-log-dir": tmp_path / "metrics",
    }
    command = [Path(sys.executable).with_name("areno"), "train", *demo_options()]
    subprocess.run([*map(str, command), *(str(p) for pair in paths.items() for p in pair)], cwd=ROOT, check=True)
    python("scripts/reward_curve.py", tmp_path / "metrics" / "metrics.jsonl", "--must-gain", 0.3)
