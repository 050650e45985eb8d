"""One shard of prompt groups: decode, score, pack. The one function that both back ends run.

Axes: G groups and N completions of the shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.api.data import PromptItem
from areno.errors import UsageError
from areno.materialize.decode import RewardText, decode_completions, make_decoder
from areno.materialize.pack import FlatPack, pack_rollout
from areno.materialize.records import RecordBatch
from areno.materialize.reward_hook import RewardSource, load_reward_hook
from areno.materialize.rollout_batch import Bool, Float32, Float64, Int64, RolloutBatch, UInt8
from areno.materialize.scorer import InlineScorer, Scorer
from areno.materialize.scorer_process import ProcessScorer
from areno.materialize.scoring import SampleFailure, ScoringOptions
from areno.materialize.statistics import check_logprobs, logprob_sums, trainable_counts

Reward = str | Path | RewardSource | Callable[[Any], Any]


DEFAULT_SCORING = ScoringOptions()


@dataclass(frozen=True)
class ShardOptions:
    """What decoding and scoring depend on beside the shard itself."""

    text: RewardText = "no-eos"
    scoring: ScoringOptions = DEFAULT_SCORING
    end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardTask:
    """A run of whole prompt groups to materialize. `first_group` is the position of the first one in the step's batch,
    `num_texts` of the first completions' texts come back with the summary."""

    rollout: RolloutBatch
    items: tuple[PromptItem, ...]
    first_group: int = 0
    num_texts: int = 0


@dataclass(frozen=True)
class ShardSummary:
    """What the driver needs of a shard. Its size does not depend on the number of tokens.

    group_sizes_G       int64 [G]
    rewards_N           float64 [N]  scored_N bool [N]: False is left out of baseline and loss
    seconds_N           float32 [N]  time of each reward call
    row_lens_N          int64 [N]    prompt and response tokens; response_lens_N int64 [N]
    trainable_N         int64 [N]    tokens that the loss learns from
    finish_N            uint8 [N]    how each completion ended
    logprob_sums_N      float64 [N]  logprob_counts_N int64 [N]
    components          name -> float64 [N], the parts that rewards came with; NaN where one came without
    """

    first_group: int
    group_sizes_G: Int64
    rewards_N: Float64
    scored_N: Bool
    seconds_N: Float32
    row_lens_N: Int64
    response_lens_N: Int64
    trainable_N: Int64
    finish_N: UInt8
    logprob_sums_N: Float64
    logprob_counts_N: Int64
    components: Mapping[str, Float64]
    failures: tuple[SampleFailure, ...]
    texts: tuple[str, ...]
    decode_s: float
    score_s: float
    pack_s: float


class ShardMaterializer:
    """Holds what shards have in common: the decoder and the loaded reward function.

    Raises:
        UsageError: the reward file cannot be used (see `reward_hook`).
    """

    def __init__(self, tokenizer: Any, reward: Reward, options: ShardOptions) -> None:
        self._scorer = make_scorer(reward, options.scoring)
        self._decoder = make_decoder(tokenizer, skip_special=options.text == "no-special")
        self._options = options

    def run(self, task: ShardTask) -> tuple[ShardSummary, FlatPack]:
        """Decode, score and pack.

        Raises:
            ValueError: not one item per group.
            RunError: a logprob is not finite (prompt and sample are named).
        """
        rollout, options = task.rollout, self._options
        if len(task.items) != rollout.num_groups:
            raise ValueError(f"{len(task.items)} prompt items for {rollout.num_groups} prompt groups.")
        sums_N, counts_N = logprob_sums(rollout)
        check_logprobs(sums_N, rollout, task.first_group)
        began = time.perf_counter()
        texts = decode_completions(self._decoder, rollout, options.end_token_ids, options.text)
        decoded = time.perf_counter()
        scores = self._scorer.score(RecordBatch(rollout, task.items, texts, task.first_group))
        scored = time.perf_counter()
        pack = pack_rollout(rollout)
        packed = time.perf_counter()
        summary = ShardSummary(
            first_group=task.first_group,
            group_sizes_G=rollout.group_sizes_G,
            rewards_N=scores.rewards_N,
            scored_N=scores.scored_N,
            seconds_N=scores.seconds_N,
            row_lens_N=pack.offsets_N1[1:] - pack.offsets_N1[:-1],
            response_lens_N=rollout.response_lens_N,
            trainable_N=trainable_counts(rollout),
            finish_N=rollout.finish_N.copy(),
            logprob_sums_N=sums_N,
            logprob_counts_N=counts_N,
            components=scores.components,
            failures=scores.failures,
            texts=tuple(texts[: task.num_texts]),
            decode_s=decoded - began,
            score_s=scored - decoded,
            pack_s=packed - scored,
        )
        return summary, pack

    def close(self) -> None:
        """End the scorer's process, if it has one."""
        self._scorer.close()


def make_scorer(reward: Reward, options: ScoringOptions) -> Scorer:
    """A scorer in this process, or in one of its own where the options ask for it.

    Raises:
        UsageError: the reward cannot be used (see `reward_hook`).
    """
    if not options.isolated:
        return InlineScorer(load_reward_hook(reward), options)
    if isinstance(reward, (str, Path)):
        reward = RewardSource.read(reward)
    if not isinstance(reward, RewardSource):
        raise UsageError("a reward that is scored in a process of its own must be a file: pass its path.")
    return ProcessScorer(reward, options)
