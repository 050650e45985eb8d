"""The record of a run: keys that do not change, files that are whole after each step, a terminal that stays clean."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from areno.metrics import CompletionSample, StepMetrics
from areno.run_log import RunLog
from areno.terminal import StepView, config_table, make_console, samples_table, sparkline

KEYS = [
    "step", "epoch", "reward_mean", "reward_std", "advantage_abs_mean", "zero_variance_groups", "response_len_mean",
    "truncated_fraction", "rollout_logprob_mean", "loss", "policy_loss", "ratio_mean", "ratio_std",
    "logp_diff_mean", "logp_abs_diff_mean", "grad_norm", "lr", "step_e2e_time_s", "step_rollout_time_s",
    "step_train_time_s", "step_materialize_time_s", "decode_s", "score_s", "pack_s", "advantage_s",
    "rollout_train_gap_s", "tokens_per_s", "peak_mem_gb",
]  # fmt: skip


def metrics(step: int = 1, **given: Any) -> StepMetrics:
    return StepMetrics(**(dict.fromkeys(KEYS, 0.5) | {"step": step, "epoch": 0, "zero_variance_groups": 2} | given))


def sample(text: str, reward: float | None = 1.0) -> CompletionSample:
    return CompletionSample(step=1, prompt_index=0, sample_index=3, reward=reward, advantage=-0.25, text=text)


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, markup=False, highlight=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_keys_are_a_public_contract() -> None:
    assert list(metrics().as_dict()) == KEYS
    assert list(metrics(extra={"reward_failures": 1.0}).as_dict()) == [*KEYS, "reward_failures"]


def test_every_step_is_on_disk_at_once(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", {"lr": 1e-6, "name": "é"}, total_steps=2) as log:
        for step in (1, 2):
            log.log_step(metrics(step), [sample("a")])
            assert [row["step"] for row in lines(tmp_path / "run/metrics.jsonl")] == list(range(1, step + 1))
            assert len(lines(tmp_path / "run/completions.jsonl")) == step
    assert list(lines(tmp_path / "run/metrics.jsonl")[0]) == KEYS
    assert json.loads((tmp_path / "run/config.json").read_text(encoding="utf-8")) == {"lr": 1e-6, "name": "é"}


def test_tensorboard_has_the_same_keys(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, total_steps=1) as log:
        log.log_step(metrics(7, loss=math.nan))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(KEYS) - {"step", "loss"}
    assert [(event.step, event.value) for event in events.Scalars("reward_mean")] == [(7, 0.5)]


def test_numbers_that_are_not_finite_and_numbers_of_numpy(tmp_path: Path) -> None:
    odd = metrics(
        loss=math.nan, lr=np.float32(0.25), reward_mean=np.float64(math.inf), zero_variance_groups=np.int64(3)
    )
    with RunLog(tmp_path, {}, total_steps=1, view=StepView(terminal())) as log:
        log.log_step(odd, [dataclasses.replace(sample("a", None), advantage=math.nan)])
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert (row["loss"], row["lr"], row["reward_mean"], row["zero_variance_groups"]) == (None, 0.25, None, 3)
    (completion,) = lines(tmp_path / "completions.jsonl")
    assert (completion["reward"], completion["advantage"]) == (None, None)


@pytest.mark.parametrize("text", ["中文 é 🙂", "line\n\u2028\x1b[31m\x00", "cut \ufffd", "\ud800 alone", '"\\ud800"'])
def test_texts_are_readable_utf8_and_load_back_equal(tmp_path: Path, text: str) -> None:
    with RunLog(tmp_path, {}, total_steps=1, view=StepView(terminal())) as log:
        log.log_step(metrics(), [sample(text)])
    written = (tmp_path / "completions.jsonl").read_bytes().decode("utf-8")
    assert json.loads(written)["text"] == text
    assert ("中文 é 🙂" in written) == ("中文" in text)


def test_an_earlier_run_in_the_folder_is_kept(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        with RunLog(tmp_path, {"run": number}, total_steps=1) as log:
            log.log_step(metrics(number))
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [3]
    assert [row["step"] for row in lines(tmp_path / "previous-1/metrics.jsonl")] == [1]
    assert [row["step"] for row in lines(tmp_path / "previous-2/metrics.jsonl")] == [2]
    assert (tmp_path / "previous-2/tensorboard").is_dir()


def test_a_fault_leaves_the_steps_so_far(tmp_path: Path) -> None:
    def run() -> None:
        with RunLog(tmp_path, {}, total_steps=9, view=StepView(terminal())) as log:
            log.log_step(metrics())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_a_pipe_gets_one_plain_line_per_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, {}, total_steps=2, view=StepView(make_console())) as log:
        log.note("take care")
        log.log_step(metrics(1))
        log.log_step(metrics(2, reward_mean=math.nan))
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["take", "step", "1", "2"]
    assert "\x1b" not in "".join(out)
    assert len({len(line) for line in out[1:]}) == 1


def test_a_terminal_gets_a_bar_with_reward_and_speed(tmp_path: Path) -> None:
    console = terminal()
    with RunLog(tmp_path, {}, total_steps=2, view=StepView(console)) as log:
        log.log_step(metrics(1, reward_mean=0.625, tokens_per_s=1234.0))
    assert "1/2" in shown(console)
    assert "reward 0.625  1,234 tok/s" in shown(console)


def test_samples_table_shows_the_text_and_nothing_that_moves_the_cursor() -> None:
    console = terminal()
    console.print(samples_table([sample("[bold]x[/] \x1b[2J\r:smile:", None), sample("y" * 1000)]))
    out = shown(console)
    assert "[bold]x[/] " in out
    assert ":smile:" in out
    assert "\x1b[2J" not in out
    assert "\r" not in out
    assert "+600 characters" in out
    for name in ("prompt", "sample", "reward", "advantage", "text"):
        assert name in out


@pytest.mark.parametrize("width", [60, 100])
def test_config_table_shows_every_value(width: int) -> None:
    console = terminal(width)
    groups = {
        "Basic": {"--ckpt": "a/[b]", "--max-steps": None},
        "Train": {"--lr": 1e-6},
        "Checkpoint": {"--to": "q" * 90},
    }
    console.print(config_table(groups, {"--lr"}, {"--ckpt", "--to"}))
    out = shown(console)
    for part in ("Paths", "a/[b]", "--max-steps", "1e-06"):
        assert part in out
    assert out.count("q") == 90
    assert "Checkpoint" not in out, "a group of paths only"


def test_reward_curve() -> None:
    view = StepView(terminal())
    assert view.reward_curve() == "No step had a reward."
    for step in range(1, 31):
        view.step(metrics(step, reward_mean=math.nan if step == 5 else step / 30), ())
    assert view.reward_curve().startswith("Mean reward 0.")
    assert view.reward_curve().endswith(" 0.850 (last 10).")


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([math.nan], ""), ([2.0], "▁"), ([1.0, 1.0], "▁▁"), ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█")],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line
    assert len(sparkline(values * 99, width=40)) == (40 if line else 0)
