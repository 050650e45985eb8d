"""Flat packs: a shard's prompt+response rows end to end, ready for a train worker.

Axes: G groups, N completions, S tokens of prompt+response. See `rollout_batch` for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.api.train_pack import TrainRow
from areno.materialize.rollout_batch import Bool, Float32, Int32, Int64, RolloutBatch, offsets_of


@dataclass(frozen=True)
class FlatPack:
    """Rows of prompt+response tokens. Advantages are not in it: they are one float per row and arrive separately.

    input_ids_S    int32 [S]
    logprobs_S     float32 [S]   under the sampling policy, 0 on the prompt
    offsets_N1     int64 [N+1]   row i is positions o[i]:o[i+1]
    prompt_lens_N  int32 [N]
    loss_mask_S    bool [S]      False on the prompt and where a response token is not the model's own; None masks nothing
    """

    input_ids_S: Int32
    logprobs_S: Float32
    offsets_N1: Int64
    prompt_lens_N: Int32
    loss_mask_S: Bool | None

    @property
    def num_rows(self) -> int:
        return self.prompt_lens_N.size

    @property
    def nbytes(self) -> int:
        arrays = (self.input_ids_S, self.logprobs_S, self.offsets_N1, self.prompt_lens_N, self.loss_mask_S)
        return sum(array.nbytes for array in arrays if array is not None)

    def row(self, i: int, advantage: float, *, learn: bool = True) -> TrainRow:
        """Row i as views. With `learn=False` (its reward is missing) no token of it is trained on."""
        span = slice(self.offsets_N1.item(i), self.offsets_N1.item(i + 1))
        loss_mask_L = None if self.loss_mask_S is None else self.loss_mask_S[span]
        if not learn:
            loss_mask_L = np.zeros(span.stop - span.start, dtype=np.bool_)
        return TrainRow(
            self.input_ids_S[span], self.logprobs_S[span], self.prompt_lens_N.item(i), advantage, loss_mask_L
        )


def pack_rollout(rollout: RolloutBatch) -> FlatPack:
    """Lay each completion behind its group's prompt. One copy of every token, a loop over rows only."""
    group_N = rollout.group_of_row_N
    prompt_lens_N = rollout.prompt_lens_G[group_N]
    offsets_N1 = offsets_of(prompt_lens_N + rollout.response_lens_N)
    num_tokens = int(offsets_N1[-1])
    input_ids_S = np.empty(num_tokens, dtype=np.int32)
    logprobs_S = np.empty(num_tokens, dtype=np.float32)
    loss_mask_S = None if rollout.loss_mask_T is None else np.empty(num_tokens, dtype=np.bool_)
    prompts, responses = rollout.prompt_offsets_G1.tolist(), rollout.response_offsets_N1.tolist()
    rows = zip(group_N.tolist(), offsets_N1.tolist(), responses, responses[1:], strict=False)
    for group, start, first, last in rows:
        middle = start + prompts[group + 1] - prompts[group]
        stop = middle + last - first
        input_ids_S[start:middle] = rollout.prompt_tokens_P[prompts[group] : prompts[group + 1]]
        input_ids_S[middle:stop] = rollout.response_tokens_T[first:last]
        logprobs_S[start:middle] = 0.0
        logprobs_S[middle:stop] = rollout.response_logprobs_T[first:last]
        if loss_mask_S is not None and rollout.loss_mask_T is not None:
            loss_mask_S[start:middle] = False
            loss_mask_S[middle:stop] = rollout.loss_mask_T[first:last]
    return FlatPack(input_ids_S, logprobs_S, offsets_N1, prompt_lens_N.astype(np.int32), loss_mask_S)
