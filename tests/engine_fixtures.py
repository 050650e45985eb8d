"""A tiny random Qwen3-architecture policy and packs to train it on, made in code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from areno.api.train_pack import TrainPack, TrainRow, packed_pack, padded_pack
from areno.engine.model import Policy, policy_of

VOCAB, END, OTHER_END = 100, 1, 2


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges over a part of the bytes, `<eos>` with id END."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<end>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> Any:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "tie_word_embeddings": True, "initializer_range": 0.4, "eos_token_id": END, "pad_token_id": 0,
        **config,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**settings)).to(dtype)


def tiny_policy(dtype: torch.dtype = torch.float32, seed: int = 0, ends: tuple[int, ...] = (END, OTHER_END)) -> Policy:
    model = tiny_model(dtype, seed)
    model.generation_config.eos_token_id = list(ends)
    return policy_of(model, tiny_tokenizer())


def random_rows(count: int, seed: int = 0, *, masked: bool = False) -> list[TrainRow]:
    """Rows of very unequal length, some with an empty response."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        prompt, response = int(rng.integers(1, 6)), int(rng.integers(0, 24)) if i % 5 else 0
        tokens = rng.integers(3, VOCAB, prompt + response)
        logprobs = -rng.exponential(size=tokens.size)[prompt:].astype(np.float32)
        mask = rng.random(tokens.size)[prompt:] < 0.7 if masked else None
        rows.append(TrainRow(tokens[:prompt], tokens[prompt:], logprobs, float(rng.normal()), mask))
    return rows


def packs_of(rows: list[TrainRow], size: int, layout: str) -> list[TrainPack]:
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [packed_pack(part) if layout == "packed" else padded_pack(part, pad_id=END) for part in parts]
