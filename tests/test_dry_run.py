"""The dry run: faults of a reward function are told before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from areno.api import PromptItem
from areno.errors import UsageError
from areno.materialize.dry_run import dry_run
from areno.materialize.scoring import ScoringOptions

ITEM = PromptItem("What is 6 times 7?", ["42"], [1, 2, 3], {"gold": 42})


def test_the_record_is_that_of_the_row(reward_file: Any) -> None:
    path = reward_file(
        "def reward_fn(r):\n"
        "    assert (r.prompt, r.answer, r.source_record) == ('What is 6 times 7?', ['42'], {'gold': 42})\n"
        "    assert len(r.tokens) == len(r.logprobs) == len(r.loss_mask)\n"
        "    return float(r.completion == '42')\n"
    )
    for options in (ScoringOptions(), ScoringOptions(isolate=True)):
        assert dry_run(path, ITEM, options).rewards_N.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("r.source_record['answer']", "reward.py:2: KeyError: 'answer'"),
        ("{'value': 1}", "dict without the key 'reward' or 'score' .*'value'"),
        ("'1.0'", "returned a str, not a number"),
        ("float('nan')", "returned nan"),
        ("None", "returned None"),
    ],
)
def test_faults_are_told(reward_file: Any, returned: str, said: str) -> None:
    path = reward_file(f"def reward_fn(r):\n    return {returned}\n")
    with pytest.raises(UsageError, match=said) as told:
        dry_run(path, ITEM, ScoringOptions())
    assert "--no-reward-dry-run" in str(told.value)


def test_under_skip_only_a_wrong_type_is_told(reward_file: Any) -> None:
    skip = ScoringOptions(on_error="skip")
    assert not dry_run(reward_file("def reward_fn(r):\n    return None\n"), ITEM, skip).scored_N.any()
    with pytest.raises(UsageError, match="not a number"):
        dry_run(reward_file("def reward_fn(r):\n    return [1]\n", "b.py"), ITEM, skip)
