"""The Ray materializer when actors die, rewards fail, files are missing or there is no room."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_support import hash_reward, items_of, random_rollout, same_batch

from areno.api import PromptItem, RewardRecord
from areno.errors import RewardError, RunError, UsageError
from areno.materialize import LocalMaterializer, RolloutBatch
from areno.materialize.scoring import ScoringOptions

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def dies_once(marker: Path) -> Callable[[RewardRecord], float]:
    """Kills its process at the first sight of prompt 2."""

    def reward(record: RewardRecord) -> float:
        if record.metadata["prompt_index"] == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return hash_reward(record)

    return reward


def test_an_actor_that_dies_on_a_shard_is_replaced(ray_materializer: Any, tokenizer: Any, tmp_path: Path) -> None:
    rollout = random_rollout(8, 3, 40)
    items = items_of(8)
    local = LocalMaterializer(tokenizer, hash_reward).materialize(rollout, items)
    materializer = ray_materializer(dies_once(tmp_path / "died"), num_workers=2)
    same_batch(local, materializer.materialize(rollout, items))
    assert (tmp_path / "died").exists()
    same_batch(local, materializer.materialize(rollout, items))


def test_packs_outlive_the_actors_that_made_them(ray_materializer: Any, tokenizer: Any) -> None:
    rollout, items = random_rollout(8, 6, 3000), items_of(8)
    materializer = ray_materializer(hash_reward)
    batch = materializer.materialize(rollout, items)
    for pid in materializer.process_ids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    same_batch(LocalMaterializer(tokenizer, hash_reward).materialize(rollout, items), batch)
    same_batch(batch, materializer.materialize(rollout, items))


def test_a_shard_that_kills_every_actor_ends_the_step_with_its_prompts_named(ray_materializer: Any) -> None:
    def deadly(record: RewardRecord) -> float:
        if record.metadata["prompt_index"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    materializer = ray_materializer(deadly, shards_per_worker=8)
    with pytest.raises(RunError, match=r"died 3 times on prompt 3 .*reward calls kill it"):
        materializer.materialize(random_rollout(8, 2, 1), items_of(8))
    # What was given up leaves nothing behind.
    batch = materializer.materialize(random_rollout(2, 2, 20), items_of(2))
    assert batch.rewards.tolist() == [1.0] * 4


def test_only_the_shard_that_an_actor_worked_on_is_blamed(ray_materializer: Any) -> None:
    def deadly(record: RewardRecord) -> float:
        if record.metadata["prompt_index"] == 3 and len(record.tokens) > 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    # The first step makes shards look cheap, so that the second one's all go to the one actor at once.
    materializer = ray_materializer(deadly, num_workers=1, shards_per_worker=8, min_shard_s=1e-9)
    materializer.materialize(random_rollout(8, 2, 1), items_of(8))
    with pytest.raises(RunError, match=r"died 3 times on prompts? (2 to )?3 .*reward calls kill it"):
        materializer.materialize(random_rollout(8, 2, 40), items_of(8))


def spoiled(rollout: RolloutBatch) -> RolloutBatch:
    """The same with a logprob that is not finite."""
    logprobs = rollout.response_logprobs_T.copy()
    logprobs[-1] = np.nan
    return replace(rollout, response_logprobs_T=logprobs)


def submit_and_gather(materializer: Any, chunk: RolloutBatch, items: list[PromptItem]) -> None:
    materializer.submit(chunk, items)
    materializer.gather()


def test_a_step_that_fails_in_submit_leaves_nothing_to_the_next(ray_materializer: Any, tokenizer: Any) -> None:
    rollout, items = random_rollout(6, 2, 30), items_of(6)
    local, remote = LocalMaterializer(tokenizer, hash_reward), ray_materializer(hash_reward)
    clean = LocalMaterializer(tokenizer, hash_reward).materialize(rollout, items)
    lock = [PromptItem("p", [], [1], {"not to be pickled": threading.Lock()}) for _ in range(6)]
    for materializer, fault, its_items, error in (
        (local, spoiled(rollout), items, RunError),
        (remote, spoiled(rollout), items, RunError),
        (remote, rollout, lock, TypeError),
        (local, rollout, items[:5], ValueError),
        (remote, rollout, items[:5], ValueError),
    ):
        materializer.submit(random_rollout(3, 4, 20, seed=9), items_of(3))
        with pytest.raises(error):
            submit_and_gather(materializer, fault, its_items)
        same_batch(clean, materializer.materialize(rollout, items))


def test_a_chunk_is_cut_for_actors_that_have_become_idle(ray_materializer: Any) -> None:
    def slow(record: RewardRecord) -> float:
        time.sleep(0.005)
        return float(record.tokens[-1])

    materializer = ray_materializer(slow, num_workers=2, min_shard_s=0.02)
    materializer.materialize(random_rollout(8, 2, 20), items_of(8))
    cuts = []
    for _ in range(3):
        materializer.submit(random_rollout(4, 2, 20), items_of(4))
        cuts.append(len(materializer._running))
        time.sleep(0.5)
    assert cuts == [2, 2, 2]
    materializer.gather()


def test_a_failing_reward_is_the_same_error_as_locally(ray_materializer: Any, tokenizer: Any, reward_file: Any) -> None:
    text = (
        "def reward_fn(record):\n"
        "    if len(record.tokens) % 3 == 0:\n"
        "        raise LookupError('no verifier for ' + record.prompt)\n"
        "    return len(record.tokens)\n"
    )
    path = reward_file(text)
    rollout, items = random_rollout(9, 2, 20), items_of(9)
    with pytest.raises(RewardError) as local:
        LocalMaterializer(tokenizer, path).materialize(rollout, items)
    materializer = ray_materializer(path)
    with pytest.raises(RewardError) as remote:
        materializer.materialize(rollout, items)
    assert str(remote.value) == str(local.value)
    skip = {"scoring": ScoringOptions(on_error="skip")}
    same_batch(
        LocalMaterializer(tokenizer, path, **skip).materialize(rollout, items),
        ray_materializer(path, **skip).materialize(rollout, items),
    )


def test_the_reward_file_travels_by_value(ray_materializer: Any, reward_file: Any) -> None:
    path = reward_file(
        "class Once:\n    calls = []\n\ndef reward_fn(record):\n    Once.calls.append(1)\n    return 1\n"
    )
    materializer = ray_materializer(path)
    path.unlink()
    materializer.materialize(random_rollout(8, 2, 5), items_of(8))
    path.write_text("def reward_fn(record):\n    return 2\n", encoding="utf-8")
    for pid in materializer.process_ids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    assert set(materializer.materialize(random_rollout(4, 2, 5), items_of(4)).rewards) == {1.0}


def test_a_file_that_the_reward_imports_and_the_actor_lacks(
    ray_materializer: Any, reward_file: Any, tmp_path: Path
) -> None:
    path = reward_file("import verifier_of_elsewhere\n\ndef reward_fn(record):\n    return 1\n")
    with pytest.raises(UsageError, match=r"reward\.py:1: .*verifier_of_elsewhere"):
        ray_materializer(path)


def test_a_tokenizer_that_cannot_be_unpickled_there(ray_session: Any) -> None:
    from ray_workers import RayMaterializer

    class OnlyHere:
        eos_token_id = 0

        def __reduce__(self) -> Any:
            return (_raise, ("no such vocabulary file",))

    with pytest.raises(RunError, match="no such vocabulary file"):
        RayMaterializer(OnlyHere(), hash_reward, num_workers=1)


def _raise(text: str) -> None:
    raise FileNotFoundError(text)


def test_actors_that_find_no_room_are_refused(
    ray_session: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray_workers import RayMaterializer

    monkeypatch.setattr("ray_workers.cluster.FREE_TIMEOUT_S", 0.5)
    with pytest.raises(UsageError, match=r"2 nowhere \(0 free\).*--materialize-workers"):
        RayMaterializer(tokenizer, hash_reward, num_workers=2, actor_options={"resources": {"nowhere": 1}})
    with pytest.raises(UsageError, match=r"20 CPU .*free"):
        RayMaterializer(tokenizer, hash_reward, num_workers=20, actor_options={"num_cpus": 1})


def test_closing_leaves_ray_to_who_started_it(ray_session: Any, tokenizer: Any) -> None:
    from ray_workers import RayMaterializer

    with RayMaterializer(tokenizer, hash_reward, num_workers=1) as materializer:
        (pid,) = materializer.process_ids
    assert ray_session.is_initialized()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sys.platform != "linux" or not Path(f"/proc/{pid}").exists()
