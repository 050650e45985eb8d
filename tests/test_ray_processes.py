"""Whole processes with a Ray of their own: nothing is left of them however they end, and nothing piles up while they run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import tiny_model, tiny_tokenizer

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="/proc")]

TESTS = Path(__file__).parent
MARK = "ARENO_TEST_MARK"
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Started:
    """A process in a session of its own, with an environment that all of its descendants inherit."""

    process: subprocess.Popen[str]
    mark: str
    shm_before: frozenset[str]

    def alive(self) -> list[str]:
        """Command lines of what is left of it."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
            except OSError:
                continue
        return found

    def check_nothing_left(self, within_s: float = 30) -> None:
        deadline = time.monotonic() + within_s
        while (left := (self.alive(), set(os.listdir(SHM)) - self.shm_before)) != ([], set()):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


@pytest.fixture
def start() -> Iterator[Any]:
    """Start Python with these arguments."""
    all_started: list[Started] = []

    def run(*args: str, prefix: tuple[str, ...] = (), **env: str) -> Started:
        mark = uuid.uuid4().hex
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        process = subprocess.Popen(
            [*prefix, sys.executable, *args],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", MARK: mark, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        all_started.append(Started(process, mark, frozenset(os.listdir(SHM))))
        return all_started[-1]

    yield run
    for started in all_started:
        if started.process.poll() is None:
            started.process.kill()
        started.process.communicate()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of a run over Ray with a tiny checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model().save_pretrained(folder / "ckpt")
    tiny_tokenizer().save_pretrained(folder / "ckpt")
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(4)))
    (folder / "reward.py").write_text("def reward_fn(record):\n    return len(record.completion)\n")
    return {
        "--ckpt": str(folder / "ckpt"),
        "--dataset-path": str(folder / "data.jsonl"),
        "--reward-fn-path": str(folder / "reward.py"),
        "--device": "cpu",
        "--batch-size": "2",
        "--n-samples": "2",
        "--max-new-tokens": "4",
        "--epochs": "1",
        "--materialize-backend": "ray",
        "--materialize-workers": "1",
    }


def train(start: Any, inputs: dict[str, str], tmp_path: Path, **env: str) -> Started:
    words = [
        word for pair in {**inputs, "--metrics-log-dir": str(tmp_path / "metrics")}.items() for word in pair if word
    ]
    started: Started = start("-c", "from areno.cli.main import main; main()", "train", *words, **env)
    return started


def test_normal_end_without_a_warning(start: Any, inputs: dict[str, str], tmp_path: Path) -> None:
    # Ray's and torch's own deprecations are not ours to mend; a non-writable array is a UserWarning.
    started = train(start, inputs, tmp_path, PYTHONWARNINGS="error::UserWarning")
    out, err = started.process.communicate(timeout=120)
    assert (started.process.returncode, err) == (0, ""), out + err
    assert "2 steps." in out
    assert "Loading weights" not in out + err
    assert "not writable" not in out + err
    started.check_nothing_left()


def test_an_exception_in_the_reward(start: Any, inputs: dict[str, str], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_fn(record):\n    return 1 / record.metadata['prompt_index']\n")
    started = train(start, {**inputs, "--reward-fn-path": str(reward), "--no-reward-dry-run": ""}, tmp_path)
    out, err = started.process.communicate(timeout=120)
    assert started.process.returncode == 1, out + err
    last = err.splitlines()[-1]
    assert last.startswith("areno: error: step 1: reward of prompt 0, sample 0 failed"), err
    assert "ZeroDivisionError" in last
    started.check_nothing_left()


@pytest.mark.parametrize(
    ("number", "code", "backend", "isolated"),
    [(signal.SIGINT, 130, "ray", False), (signal.SIGTERM, 143, "ray", True), (signal.SIGTERM, 143, "local", False)],
    ids=["SIGINT", "SIGTERM", "SIGTERM local"],
)
def test_a_signal_in_mid_step(
    start: Any, inputs: dict[str, str], tmp_path: Path, number: int, code: int, backend: str, isolated: bool
) -> None:
    reward, marker = tmp_path / "reward.py", tmp_path / "scoring"
    reward.write_text(
        f"import pathlib, time\ndef reward_fn(record):\n    pathlib.Path({str(marker)!r}).touch()\n"
        "    time.sleep(200)\n    return 1\n"
    )
    given = {**inputs, "--reward-fn-path": str(reward), "--materialize-backend": backend, "--no-reward-dry-run": ""}
    if isolated:
        given["--reward-timeout-s"] = "100"
    started = train(start, given, tmp_path)
    deadline = time.monotonic() + 120
    while not marker.exists():
        assert started.process.poll() is None, started.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    began = time.monotonic()
    os.killpg(started.process.pid, number)
    _, err = started.process.communicate(timeout=60)
    assert started.process.returncode == code, err
    assert err.splitlines()[-1] == f"areno: error: {'interrupted' if code == 130 else 'terminated'}"
    assert "Traceback" not in err
    started.check_nothing_left()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--world-size": "64"}, r"--world-size 64 needs as many CPUs, and Ray has "),
        ({"--ray-address": "127.0.0.1:1"}, "no Ray cluster answers at 127.0.0.1:1 "),
        (
            {"--object-store-gb": "0.1", "--batch-size": "512", "--max-new-tokens": "100000"},
            "a step of the longest completions needs 0.76 GiB in Ray's object store, which has 0.10 GiB",
        ),
    ],
    ids=["world size", "address", "object store"],
)
def test_bad_input(start: Any, inputs: dict[str, str], tmp_path: Path, options: dict[str, str], message: str) -> None:
    began = time.monotonic()
    started = train(start, {**inputs, **options}, tmp_path)
    out, err = started.process.communicate(timeout=60)
    assert started.process.returncode == 2, out + err
    (line,) = err.splitlines()
    assert line.startswith(f"areno: error: {message}")
    started.check_nothing_left()
    assert time.monotonic() - began < 45  # on an idle machine a third of that


def test_without_ray(start: Any, inputs: dict[str, str], tmp_path: Path) -> None:
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
        "def hide(name, path=None, target=None):\n"
        "    return None if name.split('.')[0] == 'ray' else find(name, path, target)\n"
        "PathFinder.find_spec = hide\n"
    )
    started = train(start, inputs, tmp_path, PYTHONPATH=os.pathsep.join([str(hide), str(TESTS.parent)]))
    _, err = started.process.communicate(timeout=60)
    assert started.process.returncode == 2, err
    assert "pip install 'areno-ray[ray]'" in err.splitlines()[-1]


def script(start: Any, name: str, *args: str, **more: Any) -> dict[str, Any]:
    """Run a test script that prints JSON as its last line."""
    started = start(str(TESTS / "ray_scripts" / name), *args, **more)
    out, err = started.process.communicate(timeout=180)
    assert started.process.returncode == 0, out + err
    started.check_nothing_left()
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def test_100_steps_leave_the_store_as_it_was(start: Any) -> None:
    used = script(start, "store_usage.py")
    assert used["chunk_mb"] > 19
    assert used["spilled"] is False
    # How much of a step is freed already when it is looked at varies; a leak of one pack a step would fill the store.
    early, late = sum(used["mb"][10:40]) / 30, sum(used["mb"][70:]) / 30
    assert late < early + 5
    assert max(used["mb"]) < 120


def test_two_nodes(start: Any, inputs: dict[str, str], tmp_path: Path) -> None:
    found = script(start, "two_nodes.py", inputs["--ckpt"], str(tmp_path))
    assert found["scored_on"] == ["materialize"]
    assert found["trained_on"] == ["train", "train"]
    assert found["digests"] == 1
    assert found["loss_is_finite"]
    assert (found["left"], found["nodes_after"], found["actors_after"]) == (False, 2, [])


def can_mount() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
def test_64_mb_of_shm(start: Any) -> None:
    command = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", command, "sh")
    found = script(start, "small_shm.py", prefix=prefix)
    assert found["equal"]
    assert found["notes"] == 1
    assert "--shm-size" in found["note"]
