"""A prompt on its way through a step, and the batch that a step works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class PromptItem:
    """One data set row after tokenization.

    `prompt` is the text (or the chat messages rendered to text) that the reward sees, `input_tokens` the ids that the
    model continues, `record` the untouched data set row.
    """

    prompt: str
    solutions: list[str] | None
    input_tokens: Sequence[int]
    record: dict[str, Any]


@dataclass(slots=True)
class PromptBatch:
    """The prompts of one step, with counts of what was passed over to find them.

    `scanned` rows were read for this batch, `skipped_long` of them were over the prompt limit, `total_skipped_long`
    since the epoch began.
    """

    items: list[PromptItem]
    scanned: int
    skipped_long: int
    total_skipped_long: int
    epoch: int = 0

    @property
    def prompts(self) -> list[str]:
        return [item.prompt for item in self.items]
