"""The Python parts of scripts/ and of the demo's example."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("scripts", "examples/arithmetic"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


def test_problems_are_the_same_for_the_same_seed_and_right() -> None:
    from problems import problems

    first, again = (list(itertools.islice(problems(seed=3), 50)) for _ in range(2))
    assert first == again
    for problem in first:
        assert eval(problem.question.removeprefix("What is ").removesuffix("?")) == problem.answer >= 0


def test_problems_script_writes_rows_with_prompt_and_solutions(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "problems.jsonl"
    subprocess.run([sys.executable, ROOT / "examples/arithmetic/problems.py", "--count", "3", "--out", out], check=True)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 3
    assert all(set(row) == {"prompt", "solutions"} for row in rows)


@pytest.mark.parametrize(
    ("said", "reward"),
    [("The answer is 12.", 1.0), (" The answer is 12.\n", 1.0), ("The answer is 13.", 0.0), ("12", 0.0), ("", 0.0)],
)
def test_arithmetic_reward_asks_for_number_and_form(said: str, reward: float) -> None:
    sys.modules.pop("reward", None)
    from reward import reward_fn

    assert reward_fn(SimpleNamespace(completion=said, answer=["12"])) == reward


def test_tiny_tokenizer_gives_back_any_text_and_renders_chats() -> None:
    from make_tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    text = "What is 3 + 4? 来 é 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.eos_token_id) == "<|im_end|>"


def test_reward_curve_fails_when_the_reward_did_not_rise(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"reward_mean": step / 40}) + "\n" for step in range(40)), encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts/reward_curve.py"), str(metrics), "--must-gain"]
    assert subprocess.run([*command, "0.7"], check=False).returncode == 0
    assert subprocess.run([*command, "0.8"], check=False).returncode == 1


def test_bench_case_is_the_ratio_of_medians() -> None:
    from benches.case import compare

    case = compare("trl", "a step", 10, 2, [1.0, 2.0, 9.0], "peer 1", [6.0, 4.0])
    assert (case.ours_ms, case.peer_ms, case.ratio) == (2.0, 5.0, 2.5)
    assert case.ours_spread_ms == (1.0, 9.0)
