"""Every knob of a run, declared once: its type, default, help text and check. The command line is derived from here.

One frozen dataclass per concern; the class is also the group under which `areno train --help` lists its options.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from areno.errors import UsageError
from areno.knobs import Knob, above, at_least, fraction, knob, positive_or_off, resolve, share, within


def reward_on_error_policy(text: str) -> Literal["fail", "skip"] | float:
    """Parse `--reward-on-error`: the two words, or the reward that a failed sample gets.

    Raises:
        ValueError: the text is neither a word of the two nor a finite number.
    """
    if text in ("fail", "skip"):
        return typing.cast(Literal["fail", "skip"], text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _on_error(text: str) -> str | None:
    try:
        reward_on_error_policy(text)
    except ValueError:
        return "must be fail, skip or a finite number"
    return None


@dataclass(frozen=True)
class BasicConfig:
    """Basic: what is trained, on what, and for how long."""

    ckpt: str = knob(help="Checkpoint folder or hub name of the model to train.", metavar="PATH")
    dataset_path: str = knob(
        help="NAME[:CONFIG] of the datasets library, a .jsonl, .json, .parquet or .csv file, or a saved data set folder.",
        metavar="PATH",
    )
    reward_fn_path: str = knob(help="Python file that defines reward_fn(record) -> float.", metavar="FILE")
    algo: Literal["grpo", "gspo"] = knob("gspo", help="Policy loss.")
    dataset_loader_fn: str | None = knob(
        None, help="FILE[:FUNCTION] with load_training_dataset(dataset_path, *, default_loader).", metavar="FILE"
    )
    batch_size: int = knob(32, help="Prompts per step.", check=at_least(1))
    n_samples: int = knob(8, help="Completions sampled per prompt.", check=at_least(1))
    epochs: int = knob(10, help="Passes over the data set.", check=at_least(1))
    max_steps: int | None = knob(None, help="Stop after this many steps.", check=at_least(1))
    world_size: int = knob(1, help="Train workers, one GPU (or CPU share) each.", check=at_least(1))
    seed: int = knob(0, help="Seed of shuffling and sampling.", check=at_least(0))
    device: Literal["auto", "cpu", "cuda"] = knob("auto", help="Where the model runs; auto takes CUDA if it is there.")
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = knob(
        "auto", help="Compute type; auto is bfloat16 on CUDA (float32 master weights) and float32 on CPU."
    )


@dataclass(frozen=True)
class RolloutConfig:
    """Rollout: how completions are sampled."""

    max_prompt_tokens: int = knob(1024, help="Longer prompts are skipped and counted.", check=at_least(1))
    max_new_tokens: int = knob(3071, help="Longest completion, in tokens.", check=at_least(1))
    temperature: float = knob(1.0, help="Sampling temperature.", check=above(0))
    top_k: int = knob(-1, help="Sample among the k likeliest tokens; -1 is off.", check=positive_or_off)
    top_p: float = knob(1.0, help="Sample among the likeliest tokens of this total probability.", check=within(0, 1))
    greedy: bool = knob(False, help="Take the likeliest token each time; temperature, top-k and top-p are ignored.")
    disable_thinking: bool = knob(False, help="Pass enable_thinking=False to the chat template.")
    rollout_rows: int = knob(64, help="Completions generated side by side in one call.", check=at_least(1))


@dataclass(frozen=True)
class MaterializeConfig:
    """Materialize: decoding, scoring and packing between rollout and train."""

    materialize_backend: Literal["local", "ray"] = knob(
        "local", help="Where completions are decoded, scored and packed: this process, or Ray actors."
    )
    materialize_workers: int | None = knob(
        None, help="ray: materialize actors; by default the CPUs that the train workers leave.", check=at_least(1)
    )
    ray_address: str | None = knob(
        None,
        help="ray: cluster to join (RAY_ADDRESS is the default); without one, Ray is started on this machine.",
        metavar="HOST:PORT",
    )
    object_store_gb: float | None = knob(
        None, help="ray: size of the object store that is started here, in GiB; Ray chooses by default.", check=above(0)
    )
    ray_dashboard: bool = knob(False, help="ray: start the dashboard with Ray and print its address.")
    reward_text: Literal["no-eos", "raw", "no-special"] = knob(
        "no-eos", help="Text the reward sees: without the end token, everything, or without all special tokens."
    )
    reward_on_error: str = knob(
        "fail",
        help="fail, skip or a number: what a sample whose reward failed gets.",
        check=_on_error,
        metavar="fail|skip|NUMBER",
    )
    max_failed_fraction: float = knob(
        1.0, help="Share of a step's rewards that may fail before the run is stopped.", check=share
    )
    reward_timeout_s: float | None = knob(
        None,
        help="Longest reward call in seconds (of a batch hook: of the whole call); none by default.",
        check=above(0),
    )
    reward_memory_gb: float | None = knob(
        None, help="Memory a scorer may take beyond what it starts with, in GiB; unbounded by default.", check=above(0)
    )
    reward_isolation: bool | None = knob(
        None, help="Score in a process of its own, so that a crash costs one sample; on with a timeout or memory bound."
    )
    reward_retries: int = knob(1, help="How often a sample that killed its scorer is tried again.", check=at_least(0))
    reward_concurrency: int = knob(16, help="Calls of an `async def reward_fn` at a time.", check=at_least(1))
    reward_slow_threshold_s: float | None = knob(
        None, help="Name every sample whose reward call takes longer, in seconds.", check=above(0)
    )
    reward_dry_run: bool = knob(True, help="Try the reward function on the first row before the model is loaded.")


@dataclass(frozen=True)
class TrainConfig:
    """Train: loss, optimizer and how rows become micro-batches."""

    mini_bs: int = knob(16, help="Rows per micro-batch.", check=at_least(1))
    gradient_accumulation_steps: int | None = knob(
        None, help="Micro-batches per optimizer step; by default all of a step.", check=at_least(1)
    )
    pack_layout: Literal["packed", "padded"] = knob("packed", help="Micro-batches without or with padding.")
    lr: float = knob(1e-6, help="Learning rate.", check=above(0))
    min_lr: float = knob(1e-7, help="Learning rate at the end of the decay.", check=at_least(0))
    lr_warmup_steps: int = knob(0, help="Steps of linear warm-up from 0.", check=at_least(0))
    lr_decay_style: Literal["cosine", "linear", "constant"] = knob("cosine", help="Shape of the decay.")
    lr_decay_steps: int = knob(1000, help="Steps until the learning rate reaches --min-lr.", check=at_least(1))
    adam_beta1: float = knob(0.9, help="AdamW beta1.", check=fraction)
    adam_beta2: float = knob(0.999, help="AdamW beta2.", check=fraction)
    weight_decay: float = knob(1e-2, help="AdamW weight decay.", check=at_least(0))
    grad_clip_norm: float = knob(1.0, help="Largest gradient norm; 0 is off.", check=at_least(0))
    activation_checkpointing: bool = knob(True, help="Recompute activations in the backward pass to save memory.")
    attn_backend: Literal["native", "flash"] = knob("native", help="PyTorch attention, or the flash-attn package.")
    grpo_clip_eps: float = knob(0.2, help="GRPO: clip range of the token ratio.", check=above(0))
    gspo_clip_eps: float = knob(3e-4, help="GSPO: clip range of the sequence ratio.", check=above(0))
    ratio: Literal["unit", "rollout"] = knob(
        "unit", help="Importance ratio: 1 with the gradient of the logprob, or against the rollout's logprobs."
    )
    loss_normalization: Literal["global", "pack"] = knob(
        "global", help="One denominator per optimizer step, or each micro-batch's own count, averaged."
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoint: what is kept of the trained model."""

    save_path: str | None = knob(None, help="Folder for checkpoints; none are written without it.", metavar="DIR")
    save_interval: int = knob(100, help="Steps between checkpoints; the last step is always saved.", check=at_least(1))


@dataclass(frozen=True)
class ObservabilityConfig:
    """Observability: metrics and samples."""

    metrics_log_dir: str = knob(
        "runs/areno", help="Folder for metrics.jsonl, TensorBoard and config.json.", metavar="DIR"
    )
    log_completions: int = knob(
        0, help="Samples printed per step, also written to completions.jsonl.", check=at_least(0)
    )


@dataclass(frozen=True)
class RunConfig:
    """All knobs of one run, by concern."""

    basic: BasicConfig
    rollout: RolloutConfig
    materialize: MaterializeConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    observability: ObservabilityConfig

    def flat(self) -> dict[str, Any]:
        """Every knob by name, in the order of `--help`."""
        return {k.name: getattr(getattr(self, k.section), k.name) for k in knobs()}


def sections() -> Iterator[tuple[str, type]]:
    """(field name, dataclass) of each concern, in the order of `--help`."""
    for f in dataclasses.fields(RunConfig):
        yield f.name, typing.get_type_hints(RunConfig)[f.name]


def knobs() -> Iterator[Knob]:
    """Every declared option, in the order of `--help`."""
    for section, cls in sections():
        group = (cls.__doc__ or "").split(":")[0]
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            kind, choices, optional = resolve(hints[f.name])
            required = f.default is dataclasses.MISSING
            yield Knob(
                section=section,
                group=group,
                name=f.name,
                type=kind,
                choices=choices,
                optional=optional,
                required=required,
                default=None if required else f.default,
                help=f.metadata["help"],
                metavar=f.metadata["metavar"],
                check=f.metadata["check"],
            )


def build(values: dict[str, Any]) -> RunConfig:
    """Make the configuration of a run from option values, every one checked.

    Raises:
        UsageError: a value is out of its range, or two options contradict each other.
    """
    problems = [said for k in knobs() if (said := k.problem(values.get(k.name, k.default)))]
    if problems:
        raise UsageError(" ".join(problems))
    parts: dict[str, Any] = {}
    for section, cls in sections():
        names = [f.name for f in dataclasses.fields(cls)]
        parts[section] = cls(**{n: values[n] for n in names if n in values})
    config = RunConfig(**parts)
    _check_together(config)
    return config


def _check_together(config: RunConfig) -> None:
    train, basic = config.train, config.basic
    if train.min_lr > train.lr:
        raise UsageError(f"--min-lr {train.min_lr:g} is above --lr {train.lr:g}: lower it or raise --lr.")
    if config.materialize.materialize_backend == "local" and basic.world_size > 1:
        raise UsageError(
            f"--world-size {basic.world_size} needs --materialize-backend ray: the local back end has one train worker."
        )
    if basic.device == "cpu" and train.attn_backend == "flash":
        raise UsageError("--attn-backend flash needs a CUDA device: use --attn-backend native with --device cpu.")
