"""Trying a reward function on a made-up completion of a real row, before anything expensive is loaded."""

from __future__ import annotations

from areno.api.data import PromptItem
from areno.errors import UsageError
from areno.materialize.records import RecordBatch
from areno.materialize.rollout_batch import RolloutBatch
from areno.materialize.scoring import Scores, ScoringOptions
from areno.materialize.shard import Reward, make_scorer


def dry_run(reward: Reward, item: PromptItem, options: ScoringOptions) -> Scores:
    """Score two completions of this row: its first solution, and an empty one.

    Under `fail` every failure is told here; under another policy only a result that can never be a reward is.

    Raises:
        UsageError: the reward file cannot be used, or it failed; the message says how to go on.
    """
    texts = ((item.solutions or ["42"])[0], "")
    tokens = list(item.input_tokens[:4]) or [0]
    rollout = RolloutBatch.from_rows([item.input_tokens], [[tokens, []]], [[[-1.0] * len(tokens), []]])
    scorer = make_scorer(reward, options)
    try:
        scores = scorer.score(RecordBatch(rollout, [item], texts, first_group=0))
    finally:
        scorer.close()
    told = [f for f in scores.failures if options.on_error == "fail" or f.cause == "bad_type"]
    if told:
        raise UsageError(
            f"the reward function failed on the first row of the data: {told[0].message}. Mend it, or pass "
            "--no-reward-dry-run if it cannot take a made-up completion.",
            details=told[0].traceback,
        )
    return scores
