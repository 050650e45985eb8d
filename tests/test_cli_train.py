"""The train command: every bad input is one sentence and exit code 2, and a whole run leaves what it should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areno import hub, rows
from areno.cli.main import main

REWARD = "def reward_fn(record):\n    return float(len(record.completion))\n"


def areno(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run the command in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, str]:
    """Option values of a run that passes every check. The checkpoint has a real tokenizer and weights that are none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ckpt = tmp_path / "ckpt"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(ckpt)
    (ckpt / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    (ckpt / "model.safetensors").write_bytes(b"")
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bc"}\n', encoding="utf-8")
    return {
        "--ckpt": str(ckpt),
        "--dataset-path": str(tmp_path / "data.jsonl"),
        "--reward-fn-path": str(tmp_path / "reward.py"),
        "--metrics-log-dir": str(tmp_path / "metrics"),
        "--device": "cpu",
    }


Inputs = dict[str, str]
Change = Callable[[Inputs, Path], Any]


def put(option: str, value: str) -> Change:
    return lambda inputs, _: inputs.update({option: value})


def write(option: str, name: str, text: str) -> Change:
    """Write a file and pass it as an option."""

    def change(inputs: Inputs, folder: Path) -> None:
        (folder / name).write_text(text, encoding="utf-8")
        inputs[option] = str(folder / name)

    return change


def under_a_file(option: str) -> Change:
    return lambda inputs, folder: inputs.update({option: str(folder / "reward.py" / "below")})


def failing_template(inputs: Inputs, _: Path) -> None:
    template = "{{ raise_exception('only two roles') }}"
    (Path(inputs["--ckpt"]) / "chat_template.jinja").write_text(template, encoding="utf-8")


def without(name: str) -> Change:
    return lambda inputs, _: (Path(inputs["--ckpt"]) / name).unlink()


BAD_INPUTS: dict[str, tuple[Change, str]] = {
    "reward file missing": (
        put("--reward-fn-path", "none/r.py"),
        "--reward-fn-path: /.*/none/r.py cannot be read",
    ),
    "reward file with a syntax error": (write("--reward-fn-path", "r.py", "\n\ndef reward_fn(:\n"), r"r\.py:3: .*mend"),
    "reward file that fails to load": (write("--reward-fn-path", "r.py", "\n1 / 0\n"), r"r\.py:2: .*ZeroDivisionError"),
    "no reward_fn": (write("--reward-fn-path", "r.py", "x = 1\n"), r"r\.py defines no reward_fn: add"),
    "reward_fn no function": (
        write("--reward-fn-path", "r.py", "reward_fn = 3\n"),
        r"r\.py: reward_fn is a int, not a fun",
    ),
    "reward_fn without argument": (
        write("--reward-fn-path", "r.py", "def reward_fn():\n    return 1\n"),
        r"r\.py: reward_fn\(\) cannot be called with one argument: take one",
    ),
    "data file missing": (
        put("--dataset-path", "none/d.jsonl"),
        "--dataset-path: there is no file or folder /.*d.jsonl",
    ),
    "data file broken": (
        write("--dataset-path", "d.jsonl", "{\n"),
        r"d\.jsonl cannot be read as jsonl: line 1: .*mend",
    ),
    "data file empty": (write("--dataset-path", "d.jsonl", ""), r"d\.jsonl gave no rows"),
    "data without prompt": (
        write("--dataset-path", "d.jsonl", '{"question": "q"}\n'),
        r"row 1 of .*d\.jsonl has no column `prompt` \(it has question\); rename it, or make prompts in a --dataset-load",
    ),
    "loader missing": (put("--dataset-loader-fn", "none/l.py"), "--dataset-loader-fn: /.*/none/l.py cannot be read"),
    "loader without the function": (
        write("--dataset-loader-fn", "l.py", ""),
        r"l\.py does not define load_training_data",
    ),
    "loader that fails": (
        write("--dataset-loader-fn", "l.py", "def load_training_dataset(path, **_):\n    raise OSError('disk')\n"),
        r"--dataset-loader-fn .*l\.py failed on .*l\.py:2: OSError: disk; mend",
    ),
    "template that fails": (failing_template, "row 1 of .* fails in the chat template .*only two roles.*mend"),
    "checkpoint missing": (put("--ckpt", "./none"), "--ckpt ./none: there is no such folder"),
    "checkpoint without config": (without("config.json"), "--ckpt .* is no checkpoint: it holds no config.json"),
    "checkpoint without weights": (without("model.safetensors"), "--ckpt .* holds no weights"),
    "hub name of a model": (put("--ckpt", "owner/name"), r"--ckpt owner/name: .* hub (cannot be reached|has no model)"),
    "hub name of a data set": (
        put("--dataset-path", "owner/name:main"),
        "--dataset-path owner/name:main: .* hub cannot be",
    ),
    "size of zero": (put("--batch-size", "0"), "--batch-size must be at least 1, got 0"),
    "negative size": (put("--n-samples", "-4"), "--n-samples must be at least 1, got -4"),
    "not a number": (put("--lr", "fast"), "--lr.*fast.*See `areno train --help`"),
    "nan": (put("--lr", "nan"), "--lr must be greater than 0, got nan"),
    "unknown choice": (put("--algo", "ppo"), "--algo.*ppo.*grpo"),
    "options that contradict": (put("--min-lr", "1"), "--min-lr 1 is above --lr"),
    "all prompts too long": (
        write("--dataset-path", "d.jsonl", json.dumps({"prompt": "x" * 2000})),
        "all 1 prompts of .* are longer than --max-prompt-tokens 1024 .* raise it",
    ),
    "save path": (under_a_file("--save-path"), "--save-path .*below cannot be written"),
    "metrics folder": (under_a_file("--metrics-log-dir"), "--metrics-log-dir .*below cannot be written"),
    "unknown option": (put("--batchsize", "4"), "No such option.*--batchsize"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_one_sentence_and_exit_code_2(
    name: str,
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loaded(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("areno.executor.LocalExecutor.from_config", loaded)
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setattr(rows, "hub_reachable", lambda: False)
    change, said = BAD_INPUTS[name]
    change(inputs, tmp_path)
    code, _, err = areno("train", *(word for pair in inputs.items() for word in pair), capsys=capsys)
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert err.startswith("areno: error: ")
    assert re.search(said, err), err


def test_a_missing_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = areno("train", capsys=capsys)
    assert (code, err) == (2, "areno: error: Missing option '--ckpt'. See `areno train --help`.\n")


def test_ray_is_said_to_be_missing_or_is_there(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("areno.cli.train.find_spec", lambda name: None if name == "ray" else object())
    inputs["--materialize-backend"] = "ray"
    code, _, err = areno("train", *(word for pair in inputs.items() for word in pair), capsys=capsys)
    assert code == 2
    assert "Ray is not installed; run `pip install 'areno-ray[ray]'`" in err


@pytest.fixture
def runnable(inputs: Inputs) -> Inputs:
    """The inputs with a tiny model of random weights in the checkpoint."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = len(AutoTokenizer.from_pretrained(inputs["--ckpt"]))
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": size, "max_position_embeddings": 64}
    config = Qwen3Config(**shape, eos_token_id=size - 1, bos_token_id=None)
    Qwen3ForCausalLM(config).save_pretrained(inputs["--ckpt"])
    return inputs | {"--batch-size": "1", "--n-samples": "2", "--max-new-tokens": "4", "--lr": "1e-3"}


class TestRun:
    @pytest.mark.parametrize("algo", ["grpo", "gspo"])
    def test_three_steps(self, algo: str, runnable: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        save = tmp_path / "保存 é"
        given = runnable | {"--algo": algo, "--max-steps": "3", "--save-path": str(save), "--log-completions": "1"}
        code, out, err = areno("train", *(word for pair in given.items() for word in pair), capsys=capsys)
        assert (code, err) == (0, "")
        assert "--max-new-tokens" in out
        assert "2 prompts, 0 skipped" in out
        records = (tmp_path / "metrics" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["step"] for line in records] == [1, 2, 3]
        assert len((tmp_path / "metrics" / "completions.jsonl").read_text(encoding="utf-8").splitlines()) == 3
        resolved = json.loads((tmp_path / "metrics" / "config.json").read_text(encoding="utf-8"))
        assert (resolved["algo"], resolved["top_p"], resolved["max_new_tokens"]) == (algo, 1.0, 4)
        (final,) = save.iterdir()
        assert str(final) in out.replace("\n", "")
        AutoModelForCausalLM.from_pretrained(final)
        AutoTokenizer.from_pretrained(final)

    def test_a_reward_that_fails_names_step_prompt_and_sample(
        self, runnable: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fails_later = (
            "calls = []\n"
            "def reward_fn(record):\n"
            "    calls.append(record)\n"
            "    if len(calls) == 4:\n"
            "        raise LookupError('no verifier')\n"
            "    return len(calls)\n"
        )
        write("--reward-fn-path", "fails.py", fails_later)(runnable, tmp_path)
        given = runnable | {"--save-path": str(tmp_path / "save"), "--save-interval": "1"}
        words = [word for pair in given.items() for word in pair]
        code, _, err = areno("train", *words, "--no-reward-dry-run", capsys=capsys)
        assert code == 1
        last = err.splitlines()[-1]
        assert last.startswith("areno: error: step 2: ")
        for part in ("fails.py", "prompt", "sample 1", "no verifier"):
            assert part in last
        assert len((tmp_path / "metrics" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 1
        assert [path.name for path in (tmp_path / "save").iterdir()] == ["step_000001"]

    @pytest.mark.slow
    @pytest.mark.skipif(os.name != "posix", reason="LANG")
    @pytest.mark.parametrize("lang", ["C", "C.UTF-8"])
    def test_any_locale_and_paths_with_any_character(self, lang: str, runnable: Inputs, tmp_path: Path) -> None:
        text = "中文 é 🙂"
        folder = tmp_path / text
        folder.mkdir()
        (folder / "d.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False), encoding="utf-8")
        (folder / "r.py").write_text(
            f"def reward_fn(record):\n    return record.prompt == {text!r}\n", encoding="utf-8"
        )
        given = runnable | {"--dataset-path": str(folder / "d.jsonl"), "--reward-fn-path": str(folder / "r.py")}
        given |= {"--metrics-log-dir": str(folder / "m"), "--max-steps": "1", "--log-completions": "1"}
        code = "from areno.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "train", *(word for pair in given.items() for word in pair)],
            env={**os.environ, "LANG": lang, "LC_ALL": lang, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        assert json.loads((folder / "m" / "metrics.jsonl").read_text(encoding="utf-8"))["reward_mean"] == 1.0


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_with_130(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("areno.cli.train.check", interrupted)
    code, _, err = areno("train", *(word for pair in inputs.items() for word in pair), capsys=capsys)
    assert (code, err.strip()) == (130, "areno: error: interrupted")
