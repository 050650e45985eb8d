"""From rollout chunks to a batch that is ready to train on: the interface of both back ends, and the local one.

Axes: G groups, N completions, K chunks of a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from areno.api.advantages import Baseline, Scale, compute_batch_group_advantages
from areno.api.data import PromptItem
from areno.api.train_pack import Layout, TrainPack
from areno.errors import RewardError
from areno.materialize.decode import RewardText
from areno.materialize.micro_batch import train_pack_of
from areno.materialize.pack import FlatPack
from areno.materialize.plan import split
from areno.materialize.rollout_batch import Bool, Float32, Float64, Int64, RolloutBatch, UInt8, offsets_of
from areno.materialize.scoring import OnError, SampleFailure, ScoringOptions
from areno.materialize.shard import (
    DEFAULT_SCORING,
    SAMPLE,
    Reward,
    ShardMaterializer,
    ShardOptions,
    ShardSummary,
    ShardTask,
)


@dataclass(frozen=True)
class StageTimings:
    """Seconds spent per stage, added over shards (more than the wall time where shards ran side by side)."""

    decode_s: float
    score_s: float
    pack_s: float
    advantage_s: float


@dataclass(frozen=True)
class MaterializedBatch:
    """A step's rows in prompt order, with rewards and advantages; the token data stays in the rollout's chunks.

    rewards, advantages     float64 [N]
    scored                  bool [N]     False: no reward; left out of baseline and loss
    group_sizes             int64 [G]
    row_lens, response_lens, trainable_tokens  int64 [N]
    reward_seconds          float32 [N]
    finish                  uint8 [N]
    logprob_mean            mean over all own response tokens under the sampling policy; 0.0 without any
    flat_packs              K packs, one per chunk that has groups; pack k holds rows pack_offsets[k]:pack_offsets[k+1]
    components              name -> float64 [N], parts that rewards came with; NaN where one came without
    texts                   the first completions' texts, as many as were asked for
    """

    rewards: Float64
    advantages: Float64
    scored: Bool
    group_sizes: Int64
    row_lens: Int64
    response_lens: Int64
    trainable_tokens: Int64
    reward_seconds: Float32
    finish: UInt8
    logprob_mean: float
    timings: StageTimings
    components: Mapping[str, Float64]
    failures: tuple[SampleFailure, ...]
    texts: tuple[str, ...]
    flat_packs: Sequence[FlatPack]
    pack_offsets: Int64
    pad_id: int

    @property
    def num_rows(self) -> int:
        return self.rewards.size

    @property
    def learnable_tokens(self) -> Int64:
        """int64 [N]: trainable tokens of the rows that have a reward, 0 for the others."""
        return np.where(self.scored, self.trainable_tokens, 0)

    def train_packs(
        self, mini_bs: int | None = None, *, max_tokens: int | None = None, layout: Layout = "packed"
    ) -> Iterator[TrainPack]:
        """All rows as micro-batches of `mini_bs` rows in prompt order, or of at most `max_tokens` tokens.

        Raises:
            ValueError: not exactly one of mini_bs and max_tokens.
        """
        if (mini_bs is None) == (max_tokens is None):
            raise ValueError("give exactly one of mini_bs and max_tokens.")
        for rows in split(np.arange(self.num_rows), self.row_lens, mini_bs=mini_bs, max_tokens=max_tokens):
            yield self.train_pack(rows, layout=layout)

    def train_pack(self, rows: Int64, *, layout: Layout) -> TrainPack:
        """The micro-batch of these rows; without rows, a filler of zero weight."""
        return train_pack_of(
            self.flat_packs, self.pack_offsets, rows, self.advantages, self.scored, layout=layout, pad_id=self.pad_id
        )


class Materializer(Protocol):
    """What both back ends offer. Chunks may be submitted while the rollout goes on."""

    def materialize(self, rollout: RolloutBatch, items: Sequence[PromptItem]) -> MaterializedBatch:
        """A whole step at once."""
        ...

    def submit(self, chunk: RolloutBatch, items: Sequence[PromptItem]) -> None:
        """The next prompt groups of the step, one item per group. If it raises, the step is given up: the next one begins
        afresh."""
        ...

    def gather(self) -> MaterializedBatch:
        """The step so far as a batch, and a fresh start."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class AdvantageOptions:
    """Options of `compute_batch_group_advantages`."""

    eps: float = 1e-8
    scale: Scale = "group"
    baseline: Baseline = "mean"


GROUP_RELATIVE = AdvantageOptions()


class LocalMaterializer:
    """Materializes in this process.

    Args:
        tokenizer: any tokenizer with `decode`; its `eos_token_id` is the pad id and, by default, the only end token.
        reward: path of a Python file with `reward_fn(record)`, or such a function.
        text: what the reward sees, see `--reward-text`.
        scoring: failure policy, time and memory limits of reward calls, and whether they run in a process of their own.
        end_token_ids: ids that end a completion.
        advantages: how rewards become advantages.
        num_texts: how many of a step's first completions come back as text.

    Raises:
        UsageError: the reward file cannot be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        reward: Reward,
        *,
        text: RewardText = "no-eos",
        scoring: ScoringOptions = DEFAULT_SCORING,
        end_token_ids: Sequence[int] | None = None,
        advantages: AdvantageOptions = GROUP_RELATIVE,
        num_texts: int = 0,
    ) -> None:
        options = ShardOptions(text, scoring, resolve_end_token_ids(tokenizer, end_token_ids))
        self._shards = ShardMaterializer(tokenizer, reward, options)
        self._assembler = Assembler(scoring.on_error, advantages, pad_id_of(tokenizer))
        self._num_texts = num_texts
        self._reset()

    def materialize(self, rollout: RolloutBatch, items: Sequence[PromptItem]) -> MaterializedBatch:
        self.submit(rollout, items)
        return self.gather()

    def submit(self, chunk: RolloutBatch, items: Sequence[PromptItem]) -> None:
        task = ShardTask(chunk, tuple(items), self._groups, max(self._num_texts - self._rows, 0))
        try:
            self._summaries.append(self._shards.run(task))
        except BaseException:
            self._reset()  # the step is given up; what was there of it must not get into the next one
            raise
        if chunk.num_groups:
            self._packs.append(FlatPack(chunk))
        self._groups += chunk.num_groups
        self._rows += chunk.num_completions

    def gather(self) -> MaterializedBatch:
        summaries, packs = self._summaries, self._packs
        self._reset()
        return self._assembler.assemble(summaries, packs, [pack.num_rows for pack in packs])

    def close(self) -> None:
        self._reset()
        self._shards.close()

    def _reset(self) -> None:
        self._summaries: list[ShardSummary] = []
        self._packs: list[FlatPack] = []
        self._groups = self._rows = 0

    def __enter__(self) -> LocalMaterializer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Assembler:
    """The driver's part, the same for both back ends: summaries in, one advantage pass, the batch out."""

    on_error: OnError
    advantages: AdvantageOptions
    pad_id: int

    def assemble(
        self, summaries: Sequence[ShardSummary], packs: Sequence[FlatPack], pack_rows: Sequence[int]
    ) -> MaterializedBatch:
        """
        Args:
            summaries: of all shards, in prompt order.
            packs: the rows of all chunks, in prompt order; not touched here.
            pack_rows: how many rows each pack has.

        Raises:
            RewardError: a reward failed and the policy is to stop.
            ValueError: the packs have not as many rows as the summaries.
        """
        failures = tuple(failure for summary in summaries for failure in summary.failures)
        if failures and self.on_error == "fail":
            raise reward_error(failures[0])
        if sum(pack_rows) != sum(summary.samples_N.size for summary in summaries):
            raise ValueError("the rows of the chunks are not those of the summaries.")
        began = time.perf_counter()
        none_N = np.zeros(0, dtype=SAMPLE)
        samples_N = np.concatenate([none_N, *(summary.samples_N for summary in summaries)], dtype=SAMPLE)
        columns = {name: samples_N[name].copy() for name in SAMPLE.names or ()}
        rewards_N, scored_N = columns["reward"], columns["scored"]
        no_groups = np.zeros(0, dtype=np.int64)
        group_sizes_G = np.concatenate([no_groups, *(summary.group_sizes_G for summary in summaries)])
        options = self.advantages
        advantages_N = compute_batch_group_advantages(
            rewards_N, group_sizes_G, eps=options.eps, scale=options.scale, baseline=options.baseline, mask=scored_N
        )
        advantage_s = time.perf_counter() - began
        logprob_sum, logprob_count = float(columns["logprob_sum"].sum()), int(columns["logprob_count"].sum())
        return MaterializedBatch(
            rewards=rewards_N,
            advantages=advantages_N,
            scored=scored_N,
            group_sizes=group_sizes_G,
            row_lens=columns["row_len"],
            response_lens=columns["response_len"],
            trainable_tokens=columns["trainable"],
            reward_seconds=columns["seconds"],
            finish=columns["finish"],
            logprob_mean=logprob_sum / logprob_count if logprob_count else 0.0,
            timings=StageTimings(
                sum(s.decode_s for s in summaries),
                sum(s.score_s for s in summaries),
                sum(s.pack_s for s in summaries),
                advantage_s,
            ),
            components=_components(summaries),
            failures=failures,
            texts=tuple(text for summary in summaries for text in summary.texts),
            flat_packs=packs,
            pack_offsets=offsets_of(pack_rows),
            pad_id=self.pad_id,
        )


def reward_error(failure: SampleFailure) -> RewardError:
    """The error that stops a run under `--reward-on-error fail`."""
    return RewardError(
        f"reward of prompt {failure.prompt_index}, sample {failure.sample_index} failed: {failure.message}; mend the "
        "reward function, or pass --reward-on-error skip to leave such samples out.",
        details=failure.traceback,
    )


def resolve_end_token_ids(tokenizer: Any, end_token_ids: Sequence[int] | None) -> tuple[int, ...]:
    """The given ids, or the tokenizer's end token."""
    if end_token_ids is not None:
        return tuple(end_token_ids)
    eos = getattr(tokenizer, "eos_token_id", None)
    return () if eos is None else (int(eos),)


def pad_id_of(tokenizer: Any) -> int:
    """The id that fills padding: the end token, as AReno does; it is never recognized by its value."""
    eos = getattr(tokenizer, "eos_token_id", None)
    return 0 if eos is None else int(eos)


def _components(summaries: Sequence[ShardSummary]) -> dict[str, Float64]:
    """Parts of the rewards over all shards, under the names that any of them has."""
    names = sorted({name for summary in summaries for name in summary.components})
    return {
        name: np.concatenate([s.components.get(name, np.full(s.samples_N.size, np.nan)) for s in summaries])
        for name in names
    }
