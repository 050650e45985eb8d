"""Whole steps with reward functions that misbehave, on both back ends: nothing lost, swapped or learned wrongly."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_hooks import ALARMING, CAUSES, HOOK, QUICK

from areno.api import PromptItem
from areno.materialize import LocalMaterializer, RolloutBatch, ScoringOptions
from areno.materialize.materializer import MaterializedBatch

BACKENDS = ["local", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture
def make(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def start(backend: str, reward: Any, **options: Any) -> Any:
        if backend == "local":
            made.append(LocalMaterializer(tokenizer, reward, **options))
        else:
            request.getfixturevalue("ray_session")
            from ray_workers import RayMaterializer

            made.append(RayMaterializer(tokenizer, reward, num_workers=2, shards_per_worker=2, **options))
        return made[-1]

    yield start
    for materializer in made:
        materializer.close()


def step(
    groups: int, samples: int, behaviours: dict[tuple[int, int], str], seed: int = 0, vocab: int = 500
) -> tuple[RolloutBatch, list[PromptItem]]:
    """A step whose samples behave as told; `behaviours` by (prompt index, sample index)."""
    rng = np.random.default_rng(seed)
    rows = [[rng.integers(1, vocab, size=4) for _ in range(samples)] for _ in range(groups)]
    rollout = RolloutBatch.from_rows([[7]] * groups, rows, [[np.full(4, -1.0)] * samples] * groups)
    items = [
        PromptItem(f"p{g}", [], [7], {"what": {i: what for (h, i), what in behaviours.items() if h == g}})
        for g in range(groups)
    ]
    return rollout, items


def check(
    batch: MaterializedBatch, clean: MaterializedBatch, behaviours: dict[tuple[int, int], str], samples: int
) -> None:
    """As the clean run wherever nothing was told to fail; the others named, left out of baseline and loss."""
    failed = {(f.prompt_index, f.sample_index): f.cause for f in batch.failures}
    assert failed == {place: CAUSES[what] for place, what in behaviours.items()}
    bad = np.zeros(clean.num_rows, dtype=bool)
    bad[[g * samples + i for g, i in behaviours]] = True
    np.testing.assert_array_equal(batch.scored, ~bad)
    np.testing.assert_array_equal(batch.rewards[~bad], clean.rewards[~bad])
    from areno.api import compute_batch_group_advantages

    expected = compute_batch_group_advantages(clean.rewards, clean.group_sizes, mask=~bad)
    np.testing.assert_array_equal(batch.advantages, expected)
    assert (batch.learnable_tokens[bad] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["sleep", "c_sleep"])
def test_one_of_64_hangs(make: Any, reward_file: Any, backend: str, what: str) -> None:
    materializer = make(backend, reward_file(HOOK), scoring=ScoringOptions(on_error="skip", timeout_s=2.0))
    behaviours = {(5, 3): what}
    clean = materializer.materialize(*step(8, 8, {}))
    began = time.monotonic()
    batch = materializer.materialize(*step(8, 8, behaviours))
    assert time.monotonic() - began < 2.0 + 5
    check(batch, clean, behaviours, 8)
    began = time.monotonic()
    again = materializer.materialize(*step(8, 8, {}))
    assert time.monotonic() - began < 1.5
    np.testing.assert_array_equal(again.rewards, clean.rewards)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_forty_bad_samples_in_a_thousand(make: Any, reward_file: Any, backend: str) -> None:
    scoring = ScoringOptions(on_error="skip", timeout_s=0.5, retries=0)
    materializer = make(backend, reward_file(HOOK), scoring=scoring)
    memory: list[float] = []
    for number in range(5):
        rng = np.random.default_rng(number)
        places = [(int(p) // 8, int(p) % 8) for p in rng.permutation(200)[:8]]
        behaviours = dict(zip(places, ["sleep"] * 4 + ["segv"] * 2 + ["raise"] * 2, strict=True))
        clean = materializer.materialize(*step(25, 8, {}, seed=number))
        check(materializer.materialize(*step(25, 8, behaviours, seed=number)), clean, behaviours, 8)
        # The scorer and its spare, of each materialize worker; one may be on its way between fork and exec.
        expected = 2 if backend == "local" else 4
        deadline = time.monotonic() + 5
        while scorer_processes() != expected and time.monotonic() < deadline:
            time.sleep(0.05)
        assert scorer_processes() == expected
        memory.append(resident_mb())
    assert memory[-1] - memory[1] < 40, memory


def resident_mb() -> float:
    """Resident memory of this process and of all scorer processes."""
    pages = 0
    for pid in (str(os.getpid()), *scorer_pids()):
        with contextlib.suppress(OSError):
            pages += int(Path("/proc", pid, "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def scorer_processes() -> int:
    return len(scorer_pids())


def scorer_pids() -> list[str]:
    """Scorer processes on this machine that were started from this test run's code."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            except OSError:
                continue
            if b"areno.materialize.scorer_child import main" in command and state != "Z" and parent != "1":
                found.append(entry.name)
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_in_a_run_change_nothing(make: Any, reward_file: Any) -> None:
    slow = "import time\ndef reward_fn(r):\n    time.sleep(0.02)\n    return r.tokens[-1] / 7\n"
    materializer = make("ray", reward_file(slow))
    materializer._queue._max_tries = 1000  # the kills have nothing to do with the shards they hit
    kills: list[int] = []
    stop = threading.Event()

    def killer() -> None:
        import ray

        rng = np.random.default_rng(0)
        while not stop.wait(float(rng.uniform(0.05, 0.4))) and len(kills) < 20:
            actor = materializer._pool.actors[int(rng.integers(2))]
            try:
                pid = ray.get(actor.ready.remote(), timeout=20)
                os.kill(pid, signal.SIGKILL)
            except (ray.exceptions.RayError, ProcessLookupError):
                continue
            kills.append(pid)

    clean = [materializer.materialize(*step(16, 4, {}, seed, vocab=90)) for seed in range(3)]
    undisturbed = weights_after(clean)
    thread = threading.Thread(target=killer)
    thread.start()
    rounds = 0
    while thread.is_alive() or rounds == 0:
        batches = [materializer.materialize(*step(16, 4, {}, seed, vocab=90)) for seed in range(3)]
        for batch, expected in zip(batches, clean, strict=True):
            assert batch.rewards.tobytes() == expected.rewards.tobytes()
            assert batch.advantages.tobytes() == expected.advantages.tobytes()
        assert weights_after(batches) == undisturbed
        rounds += 1
    stop.set()
    thread.join()
    assert len(kills) == 20


def weights_after(batches: list[MaterializedBatch]) -> bytes:
    """The bits of a tiny policy's weights after one optimizer step per batch."""
    from engine_fixtures import tiny_policy

    from areno.api.loss_fns import policy_loss
    from areno.config import TrainConfig
    from areno.engine.learner import Learner, WindowCounts

    policy = tiny_policy()
    learner = Learner(policy, TrainConfig(lr=1e-2), policy_loss("grpo", clip_eps=0.2), temperature=1.0)
    for batch in batches:
        counts = WindowCounts(tokens=int(batch.learnable_tokens.sum()), sequences=batch.num_rows, packs=8)
        learner.train_window(batch.train_packs(8), counts)
    return b"".join(p.detach().numpy().tobytes() for p in policy.model.parameters())


@pytest.mark.ray
@pytest.mark.slow
def test_random_behaviours_through_ray(make: Any, reward_file: Any) -> None:
    scoring = ScoringOptions(on_error="skip", timeout_s=0.3, retries=0)
    materializer = make("ray", reward_file(HOOK), scoring=scoring)
    rng = np.random.default_rng(0)
    for seed in range(5):  # 5 steps of 1,000 samples
        clean = materializer.materialize(*step(125, 8, {}, seed))
        places = [(int(p) // 8, int(p) % 8) for p in rng.permutation(1000)[:30]]
        behaviours = {place: str(rng.choice(QUICK)) for place in places} | {places[0]: "sleep"}
        batch = materializer.materialize(*step(125, 8, behaviours, seed))
        check(batch, clean, {p: what for p, what in behaviours.items() if what in CAUSES}, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_math_verify_with_its_own_timeouts(make: Any, tokenizer: Any, backend: str) -> None:
    pytest.importorskip("math_verify")
    example = Path(__file__).parent.parent / "examples/math/math_verify_reward.py"
    answers = [[r"\boxed{42}", r"\boxed{41}", "I do not know."], [r"\boxed{0.5}", r"\boxed{\frac{2}{4}}", r"\boxed{2}"]]
    rows = [[tokenizer.encode(text) for text in group] for group in answers]
    rollout = RolloutBatch.from_rows([[1]] * 2, rows, [[[-1.0] * len(row) for row in group] for group in rows])
    items = [PromptItem("What is 6 times 7?", ["42"], [1], {}), PromptItem("A half?", [r"\frac{1}{2}"], [1], {})]
    for timeout_s in (None, 20.0):
        batch = make(backend, example, scoring=ScoringOptions(timeout_s=timeout_s)).materialize(rollout, items)
        assert batch.rewards.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
        assert not batch.failures


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_verifier_with_its_own_alarm_beside_our_limit(make: Any, reward_file: Any, backend: str) -> None:
    materializer = make(backend, reward_file(ALARMING), scoring=ScoringOptions(on_error="skip", timeout_s=1.0))
    behaviours = {(0, 1): "spin", (1, 0): "sleep", (1, 2): "spin", (2, 3): "spin"}
    for _ in range(2):
        batch = materializer.materialize(*step(4, 4, behaviours))
        expected = np.ones(16)
        expected[[1, 6, 11]] = -1.0
        assert [(f.prompt_index, f.sample_index, f.cause) for f in batch.failures] == [(1, 0, "timeout")]
        np.testing.assert_array_equal(batch.rewards[batch.scored], np.delete(expected, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_copy_of_the_file_in_each_process(make: Any, reward_file: Any, backend: str) -> None:
    path = reward_file(
        "import os\ncache = {}\nclass Gold:\n    pass\ndef reward_fn(r):\n    cache.setdefault('made', Gold())\n"
        "    assert type(cache['made']) is Gold\n    return float(os.getpid())\n"
    )
    batch = make(backend, path).materialize(*step(8, 4, {}))
    assert len(set(batch.rewards)) <= 2
    assert (set(batch.rewards) == {float(os.getpid())}) == (backend == "local")
