from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import END, OTHER_END, tiny_model, tiny_policy, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from areno.config import BasicConfig, TrainConfig
from areno.engine.checkpoint import check_writable, save_checkpoint
from areno.engine.model import check_checkpoint, load_policy, load_tokenizer, policy_of, resolve_device, resolve_dtype
from areno.errors import UsageError


def basic(ckpt: Path, **values: Any) -> BasicConfig:
    return BasicConfig(ckpt=str(ckpt), dataset_path="", reward_fn_path="", **values)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tiny_policy(), tmp_path / "ckpt")


def test_a_checkpoint_loads_in_transformers_and_here(saved: Path) -> None:
    expected = tiny_policy()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(ids).logits, expected.model(ids).logits)
    assert tokenizer("abc")["input_ids"] == expected.tokenizer("abc")["input_ids"]
    check_checkpoint(str(saved))
    policy = load_policy(basic(saved, device="cpu"), TrainConfig(), load_tokenizer(str(saved)))
    assert policy.end_token_ids == (END, OTHER_END)
    assert (policy.pad_token_id, policy.dtype) == (0, torch.float32)
    assert policy.model.training
    assert load_policy(basic(saved, device="cpu", dtype="float64"), TrainConfig(), tokenizer).dtype == torch.float64


def test_a_checkpoint_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    for seed in (0, 1):
        save_checkpoint(tiny_policy(seed=seed), tmp_path / "ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    weight = AutoModelForCausalLM.from_pretrained(tmp_path / "ckpt").get_input_embeddings().weight
    assert torch.equal(weight, tiny_model(seed=1).get_input_embeddings().weight)


def test_a_failed_save_leaves_the_last_checkpoint_whole(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(seed=1)
    before = {p.name: p.read_bytes() for p in saved.iterdir()}

    def full(_folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(policy, saved)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(policy, saved.with_name("new"))
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_failed_rename_puts_the_last_checkpoint_back(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    rename = Path.rename

    def broken(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(OSError, match="Input/output"):
        save_checkpoint(tiny_policy(seed=1), saved)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def test_leftovers_of_a_killed_save_do_not_get_in(tmp_path: Path) -> None:
    leftover = tmp_path / ".ckpt.tmp"
    leftover.mkdir()
    (leftover / "junk").write_text("half")
    saved = save_checkpoint(tiny_policy(), tmp_path / "ckpt")
    assert not (saved / "junk").exists()


def test_check_writable(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--save-path .*file.* cannot be written"):
        check_writable(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "config.json").unlink(), "no config.json"),
        (lambda p: (p / "config.json").write_text("{"), "not valid JSON"),
        (lambda p: (p / "config.json").write_text("{}"), "names no model_type"),
        (lambda p: (p / "model.safetensors").unlink(), "no weights"),
        (lambda p: [(p / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")], "no tokenizer"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_what_is_no_checkpoint_is_named(saved: Path, damage: Any, message: str) -> None:
    damage(saved)
    with pytest.raises(UsageError, match=message):
        check_checkpoint(str(saved))


def test_a_hub_name_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.engine.model.hub_reachable", lambda: False)
    with pytest.raises(UsageError, match="no such folder here, and the model hub cannot be reached"):
        check_checkpoint("Nobody/Nothing-7B")
    with pytest.raises(UsageError, match="no hub name"):
        check_checkpoint("a/b/c")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        check_checkpoint(str(tmp_path / "file"))


def test_weights_that_do_not_belong_are_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["num_hidden_layers"], config["layer_types"] = 3, ["full_attention"] * 3
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"lacks \d+ weights, model.layers.2"):
        load_policy(basic(saved, device="cpu"), TrainConfig(), tiny_tokenizer())
    (saved / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_policy(basic(saved, device="cpu"), TrainConfig(), tiny_tokenizer())


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="do not belong together"):
        policy_of(tiny_model(vocab_size=50), tiny_tokenizer())


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_device_and_dtype(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu = resolve_device("auto")
    assert (cpu.type, resolve_device("cpu").type) == ("cpu", "cpu")
    assert resolve_dtype("auto", cpu) == torch.float32
    assert resolve_dtype("bfloat16", cpu) == torch.bfloat16
    with pytest.raises(UsageError, match="no CUDA device"):
        resolve_device("cuda")
    with pytest.raises(UsageError, match="flash needs a CUDA device"):
        load_policy(basic(saved), TrainConfig(attn_backend="flash"), tiny_tokenizer())


def test_dropout_is_off() -> None:
    model = policy_of(tiny_model(attention_dropout=0.5), tiny_tokenizer()).model
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(model(ids).logits, model(ids).logits)
