"""Flat packs: a rollout chunk's completions as rows of prompt and response, for whoever lays out micro-batches.

Nothing is copied between rollout and micro-batch: a row is its group's prompt and its own response, both where the
rollout has them, and the samples of a group share one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from areno.api.train_pack import TrainRow
from areno.materialize.rollout_batch import RolloutBatch


@dataclass(frozen=True)
class FlatPack:
    """The rows of a chunk, in its order. Advantages are not in it: they are one float per row and arrive separately."""

    rollout: RolloutBatch

    @property
    def num_rows(self) -> int:
        return self.rollout.num_completions

    def row(self, i: int, advantage: float, learn: bool = True) -> TrainRow:
        """Row i as views. With `learn=False` (its reward is missing) no token of it is trained on."""
        p0, p1, r0, r1 = self._bounds[i]
        rollout = self.rollout
        mask_T = rollout.loss_mask_T
        loss_mask_R = None if mask_T is None else mask_T[r0:r1]
        if not learn:
            loss_mask_R = np.zeros(r1 - r0, dtype=np.bool_)
        response_R, logprobs_R = rollout.response_tokens_T[r0:r1], rollout.response_logprobs_T[r0:r1]
        return TrainRow(rollout.prompt_tokens_P[p0:p1], response_R, logprobs_R, advantage, loss_mask_R)

    @cached_property
    def _bounds(self) -> list[tuple[int, int, int, int]]:
        """Where each row's prompt and response begin and end, as Python numbers: numpy's are slow one by one."""
        group_N = self.rollout.group_of_row_N
        prompts_G1, responses_N1 = self.rollout.prompt_offsets_G1, self.rollout.response_offsets_N1
        edges = (prompts_G1[group_N], prompts_G1[group_N + 1], responses_N1[:-1], responses_N1[1:])
        return list(zip(*(edge.tolist() for edge in edges), strict=True))
