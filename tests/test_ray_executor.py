"""Whole steps over Ray: what the driver sees, what it never sees, and the same metrics as without Ray."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import tiny_model, tiny_tokenizer

from areno.api import PromptBatch, PromptItem
from areno.cli.main import main
from areno.config import RunConfig, build
from areno.errors import RunError
from areno.materialize.rollout_batch import RolloutBatch

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]

REWARD = "def reward_fn(record):\n    return sum(record.completion.encode()) % 13\n"

# Keys of metrics.jsonl that tell of time and memory.
MEASURED = re.compile(r"_s$|_gb$|^reward_seconds_")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a run with a tiny checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model().save_pretrained(folder / "ckpt")
    tiny_tokenizer().save_pretrained(folder / "ckpt")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = "".join(json.dumps({"prompt": f"{i} + {i}"}) + "\n" for i in range(12))
    (folder / "data.jsonl").write_text(rows, encoding="utf-8")
    return {
        "ckpt": str(folder / "ckpt"),
        "dataset_path": str(folder / "data.jsonl"),
        "reward_fn_path": str(folder / "reward.py"),
        "device": "cpu",
        "batch_size": 5,
        "n_samples": 3,
        "max_new_tokens": 12,
        "mini_bs": 2,
        "lr": 1e-2,
        "min_lr": 1e-3,
        "epochs": 1,
    }


def settings(inputs: dict[str, Any], **values: Any) -> RunConfig:
    return build({**inputs, "materialize_backend": "ray", **values})


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if not MEASURED.search(k)} for line in lines]


def cli(inputs: dict[str, Any], **values: Any) -> int:
    words = [w for k, v in {**inputs, **values}.items() for w in ("--" + k.replace("_", "-"), str(v))]
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    return int(ended.value.code or 0)


def test_a_run_gives_the_same_metrics_as_without_ray(
    inputs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = {**inputs, "log_completions": 4}
    assert cli(inputs, metrics_log_dir=tmp_path / "local") == 0
    on_ray = {"materialize_backend": "ray", "world_size": 1, "materialize_workers": 2}
    assert cli(inputs, metrics_log_dir=tmp_path / "ray", **on_ray) == 0
    local, remote = metrics_of(tmp_path / "local"), metrics_of(tmp_path / "ray")
    assert len(local) == 3
    assert local == remote
    texts = [(tmp_path / name / "completions.jsonl").read_text(encoding="utf-8") for name in ("local", "ray")]
    assert texts[0] == texts[1]
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "Loading weights" not in captured.out


def prompts(count: int) -> PromptBatch:
    return PromptBatch([PromptItem(f"{i}", None, [10 + i, 11], {"i": i}) for i in range(count)], 0, 0, 0, 0)


@pytest.fixture(scope="module")
def executor(ray_session: Any, inputs: dict[str, Any]) -> Iterator[Any]:
    """Two train workers and one materialize actor."""
    from ray_workers.executor import RayExecutor

    said: list[str] = []
    made = RayExecutor.from_config(settings(inputs, world_size=2, materialize_workers=1), tiny_tokenizer(), said.append)
    assert said == []
    yield made
    made.close()


def refuse(self: Any, state: Any) -> None:
    raise AssertionError(f"a {type(self).__name__} reached the driver")


def test_no_token_reaches_the_driver(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RaySystemError

    monkeypatch.setattr(RolloutBatch, "__setstate__", refuse, raising=False)
    for step in (1, 2, 3):
        batch = executor.materialize(executor.rollout(prompts(5), step))
        report = executor.train(batch)
        assert batch.num_rows == 15
        assert report.optimizer_steps == 1
        assert report.loss == report.loss
    with pytest.raises(RaySystemError, match="a RolloutBatch reached the driver"):
        next(iter(batch.flat_packs))
    monkeypatch.undo()
    assert len(list(batch.train_packs(4))) == 4


def test_workers_agree_on_the_weights_to_the_bit(executor: Any, inputs: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    before = executor._group.weights_digests()
    executor.train(executor.materialize(executor.rollout(prompts(5), 4)))
    after = executor._group.weights_digests()
    assert len(set(before)) == len(set(after)) == 1
    assert before != after
    saved = executor.save(tmp_path / "ckpt")
    AutoModelForCausalLM.from_pretrained(saved)


def test_a_rollout_does_not_depend_on_who_samples_it(executor: Any, inputs: dict[str, Any]) -> None:
    from areno.engine.worker import build_engine
    from areno.executor import sampling_params

    config = settings(inputs, world_size=2)
    engine = build_engine(config, tiny_tokenizer())
    # Fresh weights on both sides: the executor's have been trained.
    (_, info) = executor._group.rollout(0, [[10, 11]], [0], sampling_params(config), 1)
    assert executor._group.info(0, info).group_sizes_G.tolist() == [3]
    parts = [
        list(engine.rollout.generate([[10 + i, 11]], prompt_indices=[i], n_samples=3, params=sampling_params(config), step=1))
        for i in range(3)
    ]  # fmt: skip
    whole = list(
        engine.rollout.generate(
            [[10 + i, 11] for i in range(3)],
            prompt_indices=range(3),
            n_samples=3,
            params=sampling_params(config),
            step=1,
        )
    )
    joined, once = RolloutBatch.concatenate([c for p in parts for c in p]), RolloutBatch.concatenate(whole)
    assert joined.response_tokens_T.tolist() == once.response_tokens_T.tolist()


def test_a_train_worker_cannot_write_to_the_data_of_another(executor: Any, ray_session: Any) -> None:
    batch = executor.materialize(executor.rollout(prompts(5), 5))
    ref = batch.flat_packs.chunks[0]

    def scribble(_: Any, chunk: RolloutBatch) -> str:
        try:
            chunk.response_logprobs_T[:] = 7.0
        except ValueError as error:
            return str(error)
        return "written"

    first, second = executor._group._actors
    assert "read-only" in ray_session.get(first.__ray_call__.remote(scribble, ref))
    highest = ray_session.get(second.__ray_call__.remote(lambda _, chunk: float(chunk.response_logprobs_T.max()), ref))
    assert highest <= 0.0  # logprobs, not what the other one tried to write


METRICS = {
    "areno_step": {"driver"},
    "areno_shard_queue_length": {"driver"},
    "areno_rollout_train_gap_seconds": {"driver"},
    "areno_materialized_samples_total": {"materialize-0"},
    "areno_materialized_tokens_total": {"materialize-0"},
    "areno_decode_seconds_total": {"materialize-0"},
    "areno_score_seconds_total": {"materialize-0"},
    "areno_pack_seconds_total": {"materialize-0"},
    "areno_sampled_completions_total": {"train-0", "train-1"},
    "areno_sampled_tokens_total": {"train-0", "train-1"},
    "areno_rollout_seconds_total": {"train-0", "train-1"},
    "areno_train_seconds_total": {"train-0", "train-1"},
}


def scrape(port: int, run: str) -> dict[str, dict[str, float]]:
    """name -> worker -> value of this run's metrics on the node's port."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if line.startswith("ray_areno_") and f'run="{run}"' in line:
            name, _, rest = line.removeprefix("ray_").partition("{")
            worker = rest.partition('worker="')[2].partition('"')[0]
            found.setdefault(name, {})[worker] = float(line.rpartition(" ")[2])
    return found


def test_metrics_appear_on_the_port_of_the_node(executor: Any, ray_session: Any) -> None:
    executor.train(executor.materialize(executor.rollout(prompts(5), 6)))
    run = executor._materializer._run
    (node,) = ray_session.nodes()
    found: dict[str, dict[str, float]] = {}
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        found = scrape(node["MetricsExportPort"], run)
        seen = all(found.get(name, {}).keys() >= workers for name, workers in METRICS.items())
        if seen and found["areno_step"]["driver"] == 6:  # values are exported every few seconds
            break
        time.sleep(1)
    assert {name: set(found.get(name, {})) for name in METRICS} == METRICS
    assert found["areno_step"]["driver"] == 6
    assert found["areno_rollout_train_gap_seconds"]["driver"] > 0


def test_the_dashboard_shows_metrics_that_exist() -> None:
    text = (Path(__file__).parent.parent / "scripts" / "grafana_dashboard.json").read_text(encoding="utf-8")
    json.loads(text)
    shown = set(re.findall(r"ray_(areno_\w+)", text))
    rare = {"areno_reward_failures_total", "areno_materialize_actor_deaths_total"}  # exported once there is one
    assert shown - rare <= set(METRICS)
    assert set(METRICS) - shown == {"areno_sampled_completions_total"}


def test_a_train_worker_that_dies_ends_the_step_with_its_rank(inputs: dict[str, Any], ray_session: Any) -> None:
    import os
    import signal

    from ray_workers.train_group import TrainGroup

    group = TrainGroup(settings(inputs), tiny_tokenizer(), "dies", {"num_cpus": 0.5})
    (actor,) = group._actors
    os.kill(ray_session.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    with pytest.raises(RunError, match=r"train worker 0 died while it was to train \(out of memory"):
        group._collect([actor.weights_digest.remote()], "train")
    group.close()
