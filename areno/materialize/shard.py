"""One shard of prompt groups: check, decode, score, sum up. The one function that both back ends run.

Axes: G groups and N completions of the shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areno.api.data import PromptItem
from areno.errors import UsageError
from areno.materialize.decode import RewardText, decode_completions, make_decoder
from areno.materialize.records import RecordBatch
from areno.materialize.reward_hook import RewardSource, load_reward_hook
from areno.materialize.rollout_batch import Float64, Int64, RolloutBatch
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


SAMPLE = np.dtype(
    [
        ("reward", np.float64),
        ("scored", np.bool_),  # False is left out of baseline and loss
        ("seconds", np.float32),  # time of the reward call
        ("row_len", np.int64),  # prompt and response tokens
        ("response_len", np.int64),
        ("trainable", np.int64),  # tokens that the loss learns from
        ("finish", np.uint8),  # how the completion ended
        ("logprob_sum", np.float64),  # over the model's own tokens, and how many they are
        ("logprob_count", np.int64),
    ]
)
"""What the driver needs of one completion. One array of these travels faster than nine arrays."""


@dataclass(frozen=True)
class ShardSummary:
    """What the driver needs of a shard. Its size does not depend on the number of tokens.

    group_sizes_G       int64 [G]
    samples_N           SAMPLE [N]
    components          name -> float64 [N], the parts that rewards came with; NaN where one came without
    decode_s, score_s   seconds; pack_s: of the checks, sums and lengths, which are all that packing needs
    """

    first_group: int
    group_sizes_G: Int64
    samples_N: npt.NDArray[np.void]
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

    def run(self, task: ShardTask) -> ShardSummary:
        """Check, decode, score, and sum up what the driver needs. The tokens stay where they are.

        Raises:
            ValueError: not one item per group.
            RunError: a logprob is not finite (prompt and sample are named).
        """
        rollout, options = task.rollout, self._options
        if len(task.items) != rollout.num_groups:
            raise ValueError(f"{len(task.items)} prompt items for {rollout.num_groups} prompt groups.")
        began = time.perf_counter()
        samples_N = _checked_samples(task)
        summed = time.perf_counter()
        texts = decode_completions(self._decoder, rollout, options.end_token_ids, options.text)
        decoded = time.perf_counter()
        scores = self._scorer.score(RecordBatch(rollout, task.items, texts, task.first_group))
        scored = time.perf_counter()
        samples_N["reward"], samples_N["scored"] = scores.rewards_N, scores.scored_N
        samples_N["seconds"] = scores.seconds_N
        return ShardSummary(
            first_group=task.first_group,
            group_sizes_G=rollout.group_sizes_G,
            samples_N=samples_N,
            components=scores.components,
            failures=scores.failures,
            texts=tuple(texts[: task.num_texts]),
            decode_s=decoded - summed,
            score_s=scored - decoded,
            pack_s=summed - began,
        )

    def close(self) -> None:
        """End the scorer's process, if it has one."""
        self._scorer.close()


def _checked_samples(task: ShardTask) -> npt.NDArray[np.void]:
    """SAMPLE [N]: lengths and logprob sums, once they are known to be finite; rewards are not in it yet."""
    rollout = task.rollout
    samples_N = np.zeros(rollout.num_completions, dtype=SAMPLE)
    samples_N["logprob_sum"], samples_N["logprob_count"] = sums_N, _ = logprob_sums(rollout)
    check_logprobs(sums_N, rollout, task.first_group)
    samples_N["response_len"] = rollout.response_lens_N
    samples_N["row_len"] = rollout.prompt_lens_G[rollout.group_of_row_N] + rollout.response_lens_N
    samples_N["trainable"] = trainable_counts(rollout)
    samples_N["finish"] = rollout.finish_N
    return samples_N


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
