"""The completions of a shard as the records that a reward function is given, made one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areno.api.data import PromptItem
from areno.api.rewards import RewardRecord, TokenView
from areno.materialize.rollout_batch import RolloutBatch


class RecordBatch:
    """Everything that the records of a shard are made of. Travels to another process as flat arrays and texts.

    Args:
        rollout: the shard's N completions in G groups.
        items: one per group.
        texts: one per completion.
        first_group: position of the first group in the step's batch.
    """

    def __init__(
        self, rollout: RolloutBatch, items: Sequence[PromptItem], texts: Sequence[str], first_group: int
    ) -> None:
        self._parts = (rollout, tuple(items), tuple(texts), first_group)
        self._rollout, self._items, self._texts, self._first_group = self._parts
        self._group_of = rollout.group_of_row_N.tolist()
        self._rows = rollout.group_offsets_G1.tolist()
        self._prompts = rollout.prompt_offsets_G1.tolist()
        self._tokens = rollout.response_offsets_N1.tolist()

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordBatch, self._parts

    def __len__(self) -> int:
        return len(self._texts)

    def place(self, i: int) -> tuple[int, int]:
        """Prompt index and sample index of completion i in the step's batch."""
        group = self._group_of[i]
        return self._first_group + group, i - self._rows[group]

    def record(self, i: int) -> RewardRecord:
        """A record of its own for completion i."""
        group = self._group_of[i]
        item, rollout = self._items[group], self._rollout
        span = slice(self._tokens[i], self._tokens[i + 1])
        mask_T = rollout.loss_mask_T
        return RewardRecord(
            item.prompt,
            self._texts[i],
            answer=item.solutions,
            source_record=item.record,
            metadata={"prompt_index": self._first_group + group, "sample_index": i - self._rows[group]},
            view=TokenView(
                rollout.prompt_tokens_P[self._prompts[group] : self._prompts[group + 1]],
                rollout.response_tokens_T[span],
                rollout.response_logprobs_T[span],
                None if mask_T is None else mask_T[span],
            ),
        )
