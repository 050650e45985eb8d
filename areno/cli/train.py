"""`areno train`: check everything that is cheap to check, import what is heavy, wire the parts, run the loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areno.cli.ending import clean_up_on_sigterm
from areno.cli.options import HELP, GroupedCommand, changed, grouped, knob_options
from areno.config import RunConfig, build, knobs
from areno.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from areno.data import PromptSource
    from areno.executor import Executor
    from areno.trainer import RunSummary


@click.command(cls=GroupedCommand, params=knob_options(), context_settings=HELP)
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Post-train a language model with GRPO or GSPO.

    \b
    areno train --algo grpo --ckpt Qwen/Qwen3-0.6B --dataset-path gsm8k:main \\
      --dataset-loader-fn examples/math/dataset_loader.py \\
      --reward-fn-path examples/math/math_verify_reward.py
    """
    config = build(values)
    check(config)

    from areno.terminal import config_table, make_console

    console = make_console()
    paths = {knob.option for knob in knobs() if knob.metavar in ("PATH", "FILE", "DIR")}
    console.print(config_table(grouped(config.flat()), changed(ctx), paths))
    run(config, console)


def check(config: RunConfig) -> None:
    """Look at every path that the run will need. Nothing heavy is imported unless the user's own file does it.

    Raises:
        UsageError: one of them cannot work.
    """
    from areno.engine.checkpoint import check_writable
    from areno.engine.model import check_checkpoint
    from areno.materialize.reward_hook import load_reward_hook
    from areno.rows import load_function

    basic = config.basic
    if config.materialize.materialize_backend == "ray":
        _check_ray()
    check_checkpoint(basic.ckpt)
    if basic.dataset_loader_fn is not None:
        load_function(basic.dataset_loader_fn)
    load_reward_hook(basic.reward_fn_path)
    _check_metrics_dir(Path(config.observability.metrics_log_dir))
    if config.checkpoint.save_path is not None:
        check_writable(Path(config.checkpoint.save_path))


def run(config: RunConfig, console: Console) -> RunSummary:
    """Read the data, load the model, train, and say where everything is.

    Raises:
        UsageError: the data set, the checkpoint or the device cannot be used.
        RunError: a step failed.
    """
    from areno.rows import load_rows
    from areno.run_log import METRICS, RunLog
    from areno.terminal import StepView

    rows = load_rows(config.basic.dataset_path, config.basic.dataset_loader_fn)

    import transformers

    from areno.engine.model import load_tokenizer, resolve_device
    from areno.executor import scoring_options
    from areno.materialize.dry_run import dry_run
    from areno.trainer import total_steps, train

    # Its bars would run through ours.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    resolve_device(config.basic.device)
    tokenizer = load_tokenizer(config.basic.ckpt)
    source = _prompt_source(config, rows, tokenizer)
    view = StepView(console)
    view.say(
        f"{len(rows):,} prompts, {source.skipped_long:,} skipped as longer than --max-prompt-tokens; "
        f"{source.steps_per_epoch:,} steps per epoch."
    )
    if config.materialize.reward_dry_run:
        dry_run(config.basic.reward_fn_path, next(source.batches(0)).items[0], scoring_options(config))
    with (
        closing(_executor(config, tokenizer, view.say)) as executor,
        RunLog(config.observability.metrics_log_dir, config.flat(), total_steps(config, source), view) as log,
    ):
        summary = train(config, source, executor, log)
    view.say(f"\n{summary.steps:,} steps. {view.reward_curve()}")
    if summary.last_checkpoint is not None:
        view.say(f"checkpoint  {summary.last_checkpoint}")
    view.say(f"metrics     {log.folder / METRICS}")
    return summary


def _prompt_source(config: RunConfig, rows: Any, tokenizer: Any) -> PromptSource:
    from areno.data import PromptSource

    return PromptSource(
        rows,
        tokenizer,
        batch_size=config.basic.batch_size,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        seed=config.basic.seed,
        disable_thinking=config.rollout.disable_thinking,
        origin=config.basic.dataset_path,
    )


def _executor(config: RunConfig, tokenizer: Any, say: Callable[[str], None]) -> Executor:
    if config.materialize.materialize_backend == "ray":
        backend = import_module("ray_workers.executor")
        clean_up_on_sigterm()  # importing Ray has put a handler of its own in place
        on_ray: Executor = backend.RayExecutor.from_config(config, tokenizer, say)
        return on_ray

    from areno.executor import LocalExecutor

    return LocalExecutor.from_config(config, tokenizer)


def _check_ray() -> None:
    if find_spec("ray") is None:
        raise UsageError("--materialize-backend ray: Ray is not installed; run `pip install 'areno-ray[ray]'`.")
    if find_spec("ray_workers") is None or find_spec("ray_workers.executor") is None:
        raise UsageError("--materialize-backend ray is not part of this version yet; use --materialize-backend local.")


def _check_metrics_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise UsageError(
            f"--metrics-log-dir {folder} cannot be written ({exc.strerror or exc}): choose a folder that you may write to."
        ) from exc
