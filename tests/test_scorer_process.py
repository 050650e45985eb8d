"""Reward calls that hang, crash, lie or crawl: stopped in time, named, and nothing else changed by them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_hooks import ALARMING, ASYNC, BATCH, CAUSES, HOOK, QUICK
from strategies import items_for

from areno.errors import UsageError
from areno.materialize.records import RecordBatch
from areno.materialize.reward_hook import RewardSource
from areno.materialize.rollout_batch import RolloutBatch
from areno.materialize.scorer import InlineScorer
from areno.materialize.scorer_process import ProcessScorer
from areno.materialize.scoring import Scores, ScoringOptions
from areno.materialize.shard import make_scorer


def shard(behaviours: dict[int, str], count: int, tokenizer: Any) -> RecordBatch:
    """One group of `count` completions; sample i behaves as told."""
    rng = np.random.default_rng(count)
    rows = [rng.integers(1, 500, size=5) for _ in range(count)]
    rollout = RolloutBatch.from_rows([[1]], [rows], [[np.full(5, -1.0)] * count])
    (item,) = items_for(rollout)
    item.record["what"] = behaviours
    return RecordBatch(rollout, [item], [tokenizer.decode(row.tolist()) for row in rows], first_group=3)


@pytest.fixture
def scorer_of(reward_file: Any) -> Iterator[Any]:
    made = []

    def make(text: str = HOOK, **options: Any) -> Any:
        source = RewardSource.read(reward_file(text, f"hook{len(made)}.py"))
        made.append(make_scorer(source, ScoringOptions(**{"on_error": "skip", **options})))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def check(scores: Scores, records: RecordBatch, behaviours: dict[int, str]) -> None:
    """Right rewards where there should be some, the right named failure where not, and nothing lost or swapped."""
    failures = {f.sample_index: f for f in scores.failures}
    for i in range(len(records)):
        cause = CAUSES.get(behaviours.get(i, "ok"))
        if cause is None:
            record = records.record(i)
            assert scores.rewards_N[i] == record.tokens[-1] / 7 + len(record.completion), i
            assert scores.scored_N[i]
            assert i not in failures
        else:
            assert not scores.scored_N[i]
            assert (failures[i].cause, failures[i].prompt_index) == (cause, 3), failures[i]
            assert "hook" in failures[i].message


@pytest.mark.parametrize("what", ["sleep", "swallow", "c_sleep", "blocked"])
def test_one_of_64_hangs(scorer_of: Any, tokenizer: Any, what: str) -> None:
    scorer = scorer_of(timeout_s=1.0)
    behaviours = {17: what}
    records, clean = shard(behaviours, 64, tokenizer), shard({}, 64, tokenizer)
    began = time.monotonic()
    check(scorer.score(records), records, behaviours)
    assert time.monotonic() - began < 1.0 + 5
    began = time.monotonic()
    check(scorer.score(clean), clean, {})
    assert time.monotonic() - began < 1.0
    assert scorer.score(records).seconds_N[17] >= 1.0


def test_every_kind_of_crash_costs_one_sample(scorer_of: Any, tokenizer: Any) -> None:
    scorer = scorer_of(memory_gb=2.0)
    behaviours = dict(enumerate(w for w in CAUSES if CAUSES[w] != "timeout"))
    behaviours |= {20: "fork", 21: "thread", 22: "alarm"}
    records = shard(behaviours, 30, tokenizer)
    scores = scorer.score(records)
    check(scores, records, behaviours)
    said = {f.sample_index: f.message for f in scores.failures}
    assert "SIGSEGV (2 tries)" in said[list(behaviours.values()).index("segv")]
    assert "exit code 1" in said[list(behaviours.values()).index("exit")]
    time.sleep(1.2)  # the alarm that sample 22 left must not have struck
    check(scorer.score(records), records, behaviours)


@pytest.mark.parametrize("text", [BATCH, ASYNC], ids=["batch", "async"])
def test_batch_and_async_hooks_find_the_guilty(scorer_of: Any, tokenizer: Any, text: str) -> None:
    scorer = scorer_of(text, timeout_s=1.0, retries=0)
    behaviours = {2: "segv", 5: "raise", 6: "none", 9: "c_sleep"}
    records = shard(behaviours, 12, tokenizer)
    check(scorer.score(records), records, behaviours)
    check(scorer.score(shard({}, 12, tokenizer)), shard({}, 12, tokenizer), {})


def test_async_hooks_run_side_by_side(scorer_of: Any, tokenizer: Any) -> None:
    text = "import asyncio\nasync def reward_fn(record):\n    await asyncio.sleep(0.2)\n    return record.tokens[-1]\n"
    records = shard({}, 32, tokenizer)
    for options in ({"isolate": True}, {}):
        scorer = scorer_of(text, concurrency=16, **options)
        began = time.monotonic()
        scores = scorer.score(records)
        assert time.monotonic() - began < 16 * 0.2
        assert scores.rewards_N.tolist() == [records.record(i).tokens[-1] for i in range(32)]
    slow = text.replace("0.2", "60 * (record.metadata['sample_index'] == 3)")
    scores = scorer_of(slow, timeout_s=0.5).score(records)
    assert [(f.sample_index, f.cause) for f in scores.failures] == [(3, "timeout")]


@pytest.mark.parametrize("options", [{}, {"isolate": True}])
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[1.0]", "expected 4, got 1"), ("[1.0] * 3", "expected 4, got 3"), ("[1.0] * 5", "expected 4, got 5"),
        ("{'a': 1}", "a dict, not a list: expected 4"), ("'abcd'", "a str, not a list: expected 4"),
    ],
)  # fmt: skip
def test_a_batch_of_the_wrong_length_is_refused(
    scorer_of: Any, tokenizer: Any, options: dict[str, Any], returned: str, said: str
) -> None:
    scores = scorer_of(f"def reward_fn_batch(records):\n    return {returned}\n", **options).score(
        shard({}, 4, tokenizer)
    )
    assert not scores.scored_N.any()
    assert all(said in f.message and "reward_fn_batch" in f.message and f.cause == "bad_type" for f in scores.failures)


def test_parts_of_a_reward(scorer_of: Any, tokenizer: Any) -> None:
    behaviours = {1: "parts", 3: "parts"}
    records = shard(behaviours, 5, tokenizer)
    for options in ({}, {"isolate": True}):
        scores = scorer_of(**options).score(records)
        check(scores, records, {})
        np.testing.assert_array_equal(scores.components["length"], [np.nan, 6, np.nan, 6, np.nan])


def test_many_steps_leave_nothing_behind(scorer_of: Any, tokenizer: Any) -> None:
    scorer = scorer_of(timeout_s=0.3, retries=0)
    children = []
    for step in range(3):
        rng = np.random.default_rng(step)
        chosen = rng.permutation(200)[:12].tolist()
        behaviours = dict(zip(chosen, ["sleep"] * 4 + ["segv"] * 4 + ["raise"] * 4, strict=True))
        records = shard(behaviours, 200, tokenizer)
        check(scorer.score(records), records, behaviours)
        children.append(len(own_children()))
        assert all(Path(f"/proc/{pid}").exists() for pid in scorer.process_ids)
    assert children[0] == children[1] == children[2]
    scorer.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in scorer.process_ids)


def own_children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def test_results_do_not_depend_on_isolation(scorer_of: Any, tokenizer: Any) -> None:
    behaviours = {1: "raise", 4: "none", 5: "parts", 7: "nan", 8: "sys_exit"}
    records = shard(behaviours, 12, tokenizer)
    for on_error in ("skip", "fail", -1.5):
        inline = scorer_of(on_error=on_error)
        apart = scorer_of(on_error=on_error, isolate=True)
        assert isinstance(inline, InlineScorer)
        assert isinstance(apart, ProcessScorer)
        a, b = inline.score(records), apart.score(records)
        np.testing.assert_array_equal(a.rewards_N, b.rewards_N)
        np.testing.assert_array_equal(a.scored_N, b.scored_N)
        assert [(f.sample_index, f.cause, f.prompt_index) for f in a.failures] == [
            (f.sample_index, f.cause, f.prompt_index) for f in b.failures
        ]


def test_a_verifier_with_its_own_alarm_works(scorer_of: Any, tokenizer: Any) -> None:
    for options in ({}, {"timeout_s": 2.0}):
        scores = scorer_of(ALARMING, **options).score(shard({2: "spin"}, 5, tokenizer))
        assert scores.rewards_N.tolist() == [1, 1, -1, 1, 1]


@pytest.mark.parametrize("options", [{}, {"isolate": True}])
def test_a_hang_is_spoken_of(
    scorer_of: Any, tokenizer: Any, options: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("areno.materialize.hang_watch.FIRST_S", 1.0)
    monkeypatch.setattr("areno.materialize.scorer_process.FIRST_S", 1.0)
    text = "import time\ndef reward_fn(record):\n    time.sleep(2.6 * (record.metadata['sample_index'] == 1))\n    return 1\n"
    with caplog.at_level(logging.WARNING, "areno.reward"):
        scorer_of(text, **options).score(shard({}, 3, tokenizer))
    assert any("prompt 3, sample 1 has been running for" in message for message in caplog.messages)


def test_a_file_that_breaks_while_it_is_loaded(scorer_of: Any) -> None:
    with pytest.raises(UsageError, match=r"hook0\.py:1: ValueError"):
        scorer_of("raise ValueError(1)", isolate=True)
    with pytest.raises(UsageError, match="ended itself with exit code 7 while it imported"):
        scorer_of("import os\nos._exit(7)\ndef reward_fn(r): return 1\n", isolate=True)
    with pytest.raises(UsageError, match="must be a file"):
        make_scorer(lambda _: 1.0, ScoringOptions(isolate=True))


def test_the_scorer_ends_with_its_watcher(scorer_of: Any, reward_file: Any, tmp_path: Path) -> None:
    import subprocess
    import sys

    path = reward_file(HOOK)
    code = (
        "import os, sys, time\nfrom areno.materialize.reward_hook import RewardSource\n"
        "from areno.materialize.scoring import ScoringOptions\nfrom areno.materialize.scorer_process import ProcessScorer\n"
        f"s = ProcessScorer(RewardSource.read({str(path)!r}), ScoringOptions(isolate=True))\n"
        "print(*s.process_ids, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    pids = done.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture(scope="module")
def standing_scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessScorer]:
    path = tmp_path_factory.mktemp("hook") / "hook.py"
    path.write_text(HOOK)
    scorer = ProcessScorer(RewardSource.read(path), ScoringOptions(on_error="skip", timeout_s=0.2, retries=0))
    yield scorer
    scorer.close()


@pytest.mark.slow
@settings(max_examples=20)
@given(behaviours=st.dictionaries(st.integers(0, 249), st.sampled_from([*QUICK * 6, "sleep"]), max_size=12))
def test_random_behaviours(tokenizer: Any, standing_scorer: ProcessScorer, behaviours: dict[int, str]) -> None:
    # 20 examples of 250 samples: 5,000 outcomes, each the right reward or the right named failure.
    records = shard(behaviours, 250, tokenizer)
    check(standing_scorer.score(records), records, behaviours)
    assert os.getpid()
