"""Names, signatures and defaults that users build on. A change here is a change for them: make it on purpose."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import areno.api
import areno.materialize
from areno.config import knobs


def fields(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def parameters(fn: Any) -> list[str]:
    return list(inspect.signature(fn).parameters)


def test_areno_api() -> None:
    assert sorted(areno.api.__all__) == [
        "PromptBatch", "PromptItem", "RewardRecord", "RolloutResult", "RolloutSequence", "SamplingParams",
        "TrainSequence", "compute_batch_group_advantages", "compute_group_advantages", "grpo_loss_fn", "gspo_loss_fn",
        "make_train_pack",
    ]  # fmt: skip
    assert all(getattr(areno.api, name) is not None for name in areno.api.__all__)
    assert fields(areno.api.TrainSequence) == [
        "prompt_mask", "loss_mask", "tokens", "logprobs", "advantages", "reward", "eos_token_id",
    ]  # fmt: skip
    assert fields(areno.api.RolloutSequence) == ["resp_tokens", "resp_logprobs"]
    assert fields(areno.api.RolloutResult) == ["sequences"]
    assert fields(areno.api.PromptItem) == ["prompt", "solutions", "input_tokens", "record"]
    assert fields(areno.api.SamplingParams) == [
        "greedy", "top_p", "top_k", "max_new_tokens", "temperature", "seed",
    ]  # fmt: skip
    assert parameters(areno.api.compute_batch_group_advantages) == [
        "rewards", "group_sizes", "eps", "scale", "baseline", "mask",
    ]  # fmt: skip
    assert parameters(areno.api.compute_group_advantages) == ["rewards", "eps"]
    assert parameters(areno.api.grpo_loss_fn) == ["data_pack", "logprobs", "clip_eps", "ratio"]
    assert parameters(areno.api.gspo_loss_fn) == ["data_pack", "logprobs", "clip_eps", "ratio"]


def test_modules_that_areno_users_import_from() -> None:
    from areno.api.advantages import compute_batch_group_advantages
    from areno.api.data import PromptBatch
    from areno.api.loss_fns import grpo_loss_fn
    from areno.api.models import TrainSequence
    from areno.api.rewards import RewardRecord, compute_group_advantages

    assert None not in (compute_batch_group_advantages, PromptBatch, grpo_loss_fn, TrainSequence)
    assert compute_group_advantages([1.0, 1.0]) == [0.0, 0.0]
    record = RewardRecord("p", "c", answer=["a"], tokens=[1], logprobs=[0.0], loss_mask=[True])
    for name in (
        "prompt", "completion", "rendered_completion", "final_answer", "answer", "messages", "trace", "tool_calls",
        "tool_results", "tokens", "logprobs", "loss_mask", "source_record", "metadata",
    ):  # fmt: skip
        assert hasattr(record, name), name


def test_materialize() -> None:
    assert sorted(areno.materialize.__all__) == [
        "ABORTED", "AdvantageOptions", "FlatPack", "LENGTH", "LocalMaterializer", "MaterializedBatch", "Materializer",
        "RolloutBatch", "STOPPED", "ScoringOptions",
    ]  # fmt: skip
    assert fields(areno.materialize.RolloutBatch) == [
        "prompt_tokens_P", "prompt_offsets_G1", "group_offsets_G1", "response_tokens_T", "response_logprobs_T",
        "response_offsets_N1", "finish_N", "loss_mask_T", "policy_version",
    ]  # fmt: skip
    assert parameters(areno.materialize.RolloutBatch.from_rows) == [
        "prompts", "responses", "logprobs", "finish", "loss_masks", "policy_version",
    ]  # fmt: skip
    assert fields(areno.materialize.FlatPack) == ["rollout"]
    assert fields(areno.materialize.ScoringOptions) == [
        "on_error", "timeout_s", "memory_gb", "isolate", "retries", "concurrency",
    ]  # fmt: skip
    local = parameters(areno.materialize.LocalMaterializer)
    assert local == ["tokenizer", "reward", "text", "scoring", "end_token_ids", "advantages", "num_texts"]
    for name in ("rewards", "advantages", "group_sizes", "logprob_mean", "timings"):
        assert name in fields(areno.materialize.MaterializedBatch)
    assert parameters(areno.materialize.MaterializedBatch.train_packs) == ["self", "mini_bs", "max_tokens", "layout"]


def test_ray_materializer_takes_what_the_local_one_takes() -> None:
    from ray_workers import RayMaterializer

    assert set(parameters(areno.materialize.LocalMaterializer)) <= set(parameters(RayMaterializer))
    assert "num_workers" in parameters(RayMaterializer)
    for method in ("materialize", "submit", "gather", "close", "__enter__", "__exit__"):
        theirs = getattr(areno.materialize.LocalMaterializer, method)
        assert parameters(getattr(RayMaterializer, method)) == parameters(theirs)


def test_command_line_options() -> None:
    assert {k.option: k.default for k in knobs() if not k.required} == {
        "--algo": "gspo", "--dataset-loader-fn": None, "--batch-size": 32, "--n-samples": 8, "--epochs": 10,
        "--max-steps": None, "--world-size": 1, "--seed": 0, "--device": "auto", "--dtype": "auto",
        "--max-prompt-tokens": 1024, "--max-new-tokens": 3071, "--temperature": 1.0, "--top-k": -1, "--top-p": 1.0,
        "--greedy": False, "--disable-thinking": False, "--rollout-rows": 64,
        "--materialize-backend": "local", "--materialize-workers": None, "--ray-address": None,
        "--object-store-gb": None, "--ray-dashboard": False, "--reward-text": "no-eos", "--reward-on-error": "fail",
        "--max-failed-fraction": 1.0, "--reward-timeout-s": None, "--reward-memory-gb": None,
        "--reward-isolation": None, "--reward-retries": 1, "--reward-concurrency": 16,
        "--reward-slow-threshold-s": None, "--reward-dry-run": True,
        "--mini-bs": 16, "--gradient-accumulation-steps": None, "--pack-layout": "packed", "--lr": 1e-6,
        "--min-lr": 1e-7, "--lr-warmup-steps": 0, "--lr-decay-style": "cosine", "--lr-decay-steps": 1000,
        "--adam-beta1": 0.9, "--adam-beta2": 0.999, "--weight-decay": 0.01, "--grad-clip-norm": 1.0,
        "--activation-checkpointing": True, "--attn-backend": "native", "--grpo-clip-eps": 0.2,
        "--gspo-clip-eps": 3e-4, "--ratio": "unit", "--loss-normalization": "global",
        "--save-path": None, "--save-interval": 100, "--metrics-log-dir": "runs/areno", "--log-completions": 0,
    }  # fmt: skip
    assert [k.option for k in knobs() if k.required] == ["--ckpt", "--dataset-path", "--reward-fn-path"]
