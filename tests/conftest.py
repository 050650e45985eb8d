"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from ray_fixtures import ray_materializer, ray_session  # noqa: F401

# No hub is asked for anything, and the test's own threads decide about threads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

hypothesis.settings.register_profile(
    "areno", deadline=None, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("areno")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A small byte-level BPE tokenizer with an end token (which is also the pad token) and an added special token."""
    return make_tokenizer()


def make_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = ["the answer is 12 because 3 times 4 makes 12", "来日方长 é 🙂 naïve", "def reward(x): return x + 1\n"] * 3
    core.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<tool｜é>", special=True)]})
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


@pytest.fixture
def reward_file(tmp_path: Path) -> Any:
    """Write a reward file and return its path: reward_file("def reward_fn(record): return 1")."""

    def write(text: str, name: str = "reward.py") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write
