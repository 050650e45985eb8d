"""Prompts: what the model continues, in which order, and what happens to rows that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno.data import PromptSource, encode_prompt
from areno.errors import UsageError


class Characters:
    """A tokenizer of one id per character; 1 is a begin token that `encode` adds, as many real ones do."""

    def __init__(self, chat_template: str | None = "yes") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **switches: Any
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        if any(message["content"] == "boom" for message in messages):
            raise ValueError("Conversation roles must alternate")
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return turns + "<assistant>" + ("" if switches.get("enable_thinking", True) else "<no-think>")


def text_of(ids: list[int]) -> str:
    return "".join("^" if i == 1 else chr(i) for i in ids)


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "prompt", "text", "continued"),
    [
        ("yes", "hi", "hi", "<user>hi<assistant>"),
        ("yes", USER, "<user>hi<assistant>", "<user>hi<assistant>"),
        ("yes", "<|im_start|>user\nhi", "<|im_start|>user\nhi", "^<|im_start|>user\nhi"),
        (None, "hi", "hi", "^hi"),
        (None, [{"role": "system", "content": "s"}, *USER], "system: s\nuser: hi", "^system: s\nuser: hi"),
    ],
)
def test_encode_prompt(template: str | None, prompt: Any, text: str, continued: str) -> None:
    seen, ids = encode_prompt(Characters(template), prompt)
    assert (seen, text_of(ids)) == (text, continued)


def test_disable_thinking_reaches_the_template() -> None:
    assert text_of(encode_prompt(Characters(), "hi", disable_thinking=True)[1]).endswith("<no-think>")


def source(rows: list[dict[str, Any]], batch_size: int = 2, limit: int = 100, seed: int = 0) -> PromptSource:
    tokenizer = Characters(None)
    return PromptSource(rows, tokenizer, batch_size=batch_size, max_prompt_tokens=limit, seed=seed, origin="d.jsonl")


def prompts(made: PromptSource, epoch: int) -> list[str]:
    return [item.prompt for batch in made.batches(epoch) for item in batch.items]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(lambda ls: min(ls) < 6),
    batch_size=st.integers(1, 7),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_every_prompt_that_fits_comes_once_an_epoch(lengths: list[int], batch_size: int, seed: int, epoch: int) -> None:
    rows = [{"prompt": "x" * length, "id": index} for index, length in enumerate(lengths)]
    made = source(rows, batch_size, limit=6, seed=seed)
    batches = list(made.batches(epoch))
    served = [item.record["id"] for batch in batches for item in batch.items]
    assert sorted(served) == [index for index, length in enumerate(lengths) if length + 1 <= 6]
    assert len(batches) == made.steps_per_epoch
    assert [len(batch.items) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert sum(batch.scanned for batch in batches) == len(rows)
    assert sum(batch.skipped_long for batch in batches) == made.skipped_long == batches[-1].total_skipped_long
    assert {batch.epoch for batch in batches} == {epoch}


def test_the_order_is_of_seed_and_epoch() -> None:
    rows = [{"prompt": str(index)} for index in range(30)]
    first = prompts(source(rows), 0)
    assert first == prompts(source(rows), 0)
    assert first != [row["prompt"] for row in rows]
    assert len({tuple(prompts(source(rows, seed=seed), epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert first[:3] == ["13", "5", "23"], "the order of a seed is a promise: runs are resumed and compared by it"


def test_items_carry_row_and_solutions() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "solutions": ["x", 2]}, {"prompt": "b", "solutions": "x"}, {"prompt": "c", "solutions": None},
        {"prompt": "d", "level": 3},
    ]  # fmt: skip
    items = {item.prompt: item for batch in source(rows).batches(0) for item in batch.items}
    assert {name: item.solutions for name, item in items.items()} == {"a": ["x", "2"], "b": ["x"], "c": None, "d": None}
    assert items["d"].record == {"prompt": "d", "level": 3}


def test_equal_prompts_stay_apart() -> None:
    assert prompts(source([{"prompt": "same"}] * 5), 0) == ["same"] * 5


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"question": "q", "answer": "a"},
            "row 2 of d.jsonl has no column `prompt` .it has question, answer.; rename it",
        ),
        ({}, "it has none"),
        ({"prompt": None}, "row 2 of d.jsonl cannot be used: `prompt` must be text or a list of chat messages"),
        ({"prompt": []}, "must be text or a list of chat messages"),
        ({"prompt": [{"content": "no role"}]}, "a chat message needs `role` and `content`"),
        ({"prompt": "a", "solutions": {"x": 1}}, "row 2 of d.jsonl has `solutions` that are neither"),
        ({"prompt": "a", "solutions": [None]}, "row 2 of d.jsonl has `solutions` that are neither"),
    ],
)
def test_bad_rows(row: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        source([{"prompt": "fine"}, row])


def test_a_template_that_fails() -> None:
    with pytest.raises(UsageError, match=r"row 2 of .* fails in the chat template .*ValueError: Conversation roles"):
        PromptSource([{"prompt": "a"}, {"prompt": "boom"}], Characters(), batch_size=1, max_prompt_tokens=99)


def test_an_empty_prompt() -> None:
    class Bare(Characters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            del add_special_tokens
            return super().encode(text, add_special_tokens=False)

    with pytest.raises(UsageError, match="row 1 of the data set has an empty prompt"):
        PromptSource([{"prompt": ""}], Bare(None), batch_size=1, max_prompt_tokens=99)


def test_all_too_long() -> None:
    with pytest.raises(
        UsageError, match=r"all 2 prompts .* longer than --max-prompt-tokens 3 .the shortest has 5 tokens"
    ):
        source([{"prompt": "long"}, {"prompt": "longer"}], limit=3)
