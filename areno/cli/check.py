"""`areno check`: what this machine can run, and the next step for each thing that is missing."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import click

from areno.cli.options import HELP

Status = Literal["ok", "optional", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `missing` stops every run, `optional` only what its next step says."""

    name: str
    status: Status
    detail: str
    next_step: str = ""


@click.command(context_settings=HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(as_json: bool) -> None:
    """Tell what this machine can run, and what to do about the rest. Exit code 1 if no run can work."""
    findings = list(look())
    ready = all(finding.status != "missing" for finding in findings)
    if as_json:
        report = {"ready": ready, "checks": [dataclasses.asdict(finding) for finding in findings]}
        click.echo(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        _print(findings, ready)
    sys.exit(0 if ready else 1)


def look() -> Iterator[Finding]:
    """Look at Python, memory, packages, GPUs, attention back ends, Ray and the hub, in this order."""
    yield Finding("python", "ok", platform.python_version())
    yield Finding("cpu", "ok", f"{_cpus()} cores, {_memory_gib():.0f} GiB memory")
    for module, package in (("torch", "torch"), ("transformers", "transformers"), ("datasets", "datasets")):
        yield _imported(module, "missing", f"pip install {package}")
    yield from _gpus()
    yield _imported("ray", "optional", "pip install 'areno-ray[ray]' for --materialize-backend ray")
    yield _imported("math_verify", "optional", "pip install 'areno-ray[math]' for examples/math")
    yield _imported("reasoning_gym", "optional", "pip install 'areno-ray[gym]' for examples/reasoning_gym")
    yield _hub()


def _imported(module: str, otherwise: Status, next_step: str) -> Finding:
    """Import it for real: a package that is installed may still fail to load its libraries."""
    try:
        __import__(module)
    except ImportError as exc:
        absent = isinstance(exc, ModuleNotFoundError) and exc.name == module
        return Finding(module, otherwise, "not installed" if absent else f"does not import: {exc}", next_step)
    except OSError as exc:
        return Finding(module, otherwise, f"does not import: {exc}", next_step)
    return Finding(module, "ok", metadata.version(module.replace("_", "-")))


def _gpus() -> Iterator[Finding]:
    native = Finding("attention native", "ok", "PyTorch's own")
    try:
        import torch
    except (ImportError, OSError):
        return
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        yield Finding("cuda", "optional", f"none ({built})", _cuda_step(torch.version.cuda is not None))
        yield native
        yield Finding("attention flash", "optional", "needs a CUDA GPU", "use --attn-backend native")
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        bf16 = "bfloat16" if gpu.major >= 8 else "no bfloat16: use --dtype float32"
        yield Finding(f"cuda:{index}", "ok", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {bf16}")
    yield native
    flash = _imported("flash_attn", "optional", "pip install flash-attn --no-build-isolation for --attn-backend flash")
    yield dataclasses.replace(flash, name="attention flash")


def _cuda_step(built_for_cuda: bool) -> str:
    if not Path("/proc/driver/nvidia/version").exists():
        return "runs on the CPU (--device cpu); for a GPU, install its driver"
    if built_for_cuda:
        return "the driver is there: check CUDA_VISIBLE_DEVICES and that the driver is as new as torch's CUDA"
    return "the driver is there: install a CUDA build of torch (https://pytorch.org/get-started)"


def _hub() -> Finding:
    from areno.hub import hub_reachable

    if hub_reachable():
        return Finding("hub", "ok", "reachable")
    return Finding("hub", "optional", "not reachable", "give --ckpt and --dataset-path as local paths")


def _cpus() -> int:
    affinity: Callable[[int], Any] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _print(findings: list[Finding], ready: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from areno.terminal import make_console

    colours = {"ok": "green", "optional": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("next step", overflow="fold")
    for f in findings:
        table.add_row(Text(f.status, style=colours[f.status]), f.name, f.detail, f.next_step)
    console = make_console()
    console.print(table)
    console.print()
    console.print("Ready to train." if ready else "Not ready: take the next step of each line that says missing.")
