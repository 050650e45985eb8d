"""From data set rows to the tokenized prompts of each step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from areno.api.data import PromptBatch, PromptItem
from areno.errors import UsageError
from areno.rows import load_rows as load_rows

_TURN_MARKERS = ("<|im_start|>", "<start_of_turn>", "<turn|>", "<|user|>", "<|assistant|>")


def encode_prompt(tokenizer: Any, prompt: Any, disable_thinking: bool = False) -> tuple[str, list[int]]:
    """Text that a reward function sees as the prompt, and ids [P] that the model continues.

    Chat messages are rendered with the chat template, up to the point where the assistant starts to speak. Plain text
    becomes one user message, unless it already has the markers of chat turns. Without a chat template, messages are
    joined as `role: content` lines and text is taken as it is.

    Raises:
        TypeError: the prompt is neither text nor chat messages.
        Exception: whatever the chat template raises.
    """
    templated = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str):
        text, messages = prompt, [{"role": "user", "content": prompt}]
        templated = templated and not any(marker in prompt for marker in _TURN_MARKERS)
    else:
        messages = _chat_messages(prompt)
        text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    if not templated:
        return text, list(tokenizer.encode(text))
    switch = {"enable_thinking": False} if disable_thinking else {}
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switch)
    ids = list(tokenizer.encode(rendered, add_special_tokens=False))
    return (prompt if isinstance(prompt, str) else rendered), ids


def _chat_messages(prompt: Any) -> list[dict[str, Any]]:
    if not isinstance(prompt, Sequence) or not prompt:
        raise TypeError(f"`prompt` must be text or a list of chat messages, got {type(prompt).__name__} {prompt!r:.60}")
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise TypeError(f"a chat message needs `role` and `content`, got {message!r:.60}")
    return list(prompt)


class ByteTokenizer:
    """Stands in where there is no model: the ids of a text are its UTF-8 bytes, and there is no chat template."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))


class PromptSource:
    """The prompts of a run: every row looked at once up front, then served in a seeded order per epoch.

    `steps_per_epoch` is exact: it knows which prompts are over the limit (`skipped_long` of them).

    Raises:
        UsageError: a row has no usable `prompt` or `solutions`, the chat template fails on it, or every prompt is over
            the limit. The message names the source, the row (from 1) and its columns.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        tokenizer: Any,
        *,
        batch_size: int,
        max_prompt_tokens: int,
        seed: int = 0,
        disable_thinking: bool = False,
        origin: str = "the data set",
    ) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._seed = seed
        self._disable_thinking = disable_thinking
        self._origin = origin
        lengths = [len(self.item(index).input_tokens) for index in range(len(rows))]
        self._fits = [length <= max_prompt_tokens for length in lengths]
        self.skipped_long = self._fits.count(False)
        if self.skipped_long == len(rows):
            raise UsageError(
                f"all {len(rows)} prompts of {origin} are longer than --max-prompt-tokens {max_prompt_tokens} "
                f"(the shortest has {min(lengths, default=0)} tokens); raise it."
            )

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._fits.count(True) // self._batch_size)

    def batches(self, epoch: int) -> Iterator[PromptBatch]:
        """The batches of an epoch (from 0) in its own order; the last one may be short, no prompt comes twice."""
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        batch = PromptBatch([], 0, 0, 0, epoch)
        for index in order:
            if self._fits[index] and len(batch.items) == self._batch_size:
                yield batch
                batch = PromptBatch([], 0, 0, batch.total_skipped_long, epoch)
            batch.scanned += 1
            if self._fits[index]:
                batch.items.append(self.item(index))
            else:
                batch.skipped_long += 1
                batch.total_skipped_long += 1
        yield batch

    def item(self, index: int) -> PromptItem:
        """Row `index` as a prompt.

        Raises:
            UsageError: it cannot be one; the message names the row.
        """
        row = dict(self._rows[index])
        if "prompt" not in row:
            raise self._bad(
                index,
                f"has no column `prompt` (it has {', '.join(map(str, row)) or 'none'}); "
                f"rename it, or make prompts in a --dataset-loader-fn",
            )
        try:
            text, ids = encode_prompt(self._tokenizer, row["prompt"], self._disable_thinking)
        except TypeError as exc:
            raise self._bad(index, f"cannot be used: {exc}; mend the row or the --dataset-loader-fn") from exc
        except Exception as exc:  # a chat template is a program of the checkpoint and may raise anything
            said = f"{type(exc).__name__}: {exc}"
            raise self._bad(
                index, f"fails in the chat template of the checkpoint ({said}); mend one of the two"
            ) from exc
        if not ids:
            raise self._bad(index, "has an empty prompt; remove the row or give it a prompt")
        return PromptItem(prompt=text, solutions=self._solutions(index, row), input_tokens=ids, record=row)

    def _solutions(self, index: int, row: dict[str, Any]) -> list[str] | None:
        value = row.get("solutions")
        if value is None:
            return None
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(entry, (str, int, float)) for entry in values):
            raise self._bad(index, f"has `solutions` that are neither text nor a list of texts, {value!r:.60}; mend it")
        return [str(entry) for entry in values]

    def _bad(self, index: int, problem: str) -> UsageError:
        return UsageError(f"row {index + 1} of {self._origin} {problem}.")
