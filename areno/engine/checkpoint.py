"""Write a checkpoint so that its final name only ever belongs to a complete one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from areno.engine.model import Policy
from areno.errors import UsageError


def save_checkpoint(policy: Policy, path: Path) -> Path:
    """Save weights, configuration and tokenizer as a folder that transformers' Auto classes load.

    Everything is written and flushed to disk under a temporary name beside `path`, then renamed. A checkpoint already
    at `path` stays whole until then, and is put back if the last rename fails.

    Returns:
        `path`.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = _hidden(path, "tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        policy.model.save_pretrained(staging)
        policy.tokenizer.save_pretrained(staging)
        _flush(staging)
        _swap_in(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return path


def check_writable(path: Path) -> None:
    """Make sure that a checkpoint can be written under the folder `path`; makes it if it is not there.

    Raises:
        UsageError: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"--save-path {path} cannot be written ({reason}): choose another folder.") from error


def _swap_in(staging: Path, path: Path) -> None:
    retired = _hidden(path, "old")
    if path.exists():
        shutil.rmtree(retired, ignore_errors=True)
        path.rename(retired)
    try:
        staging.rename(path)
    except OSError:
        if retired.exists():
            retired.rename(path)
        raise
    _sync(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _hidden(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.{role}")


def _flush(folder: Path) -> None:
    for entry in sorted(folder.rglob("*")):
        _sync(entry)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
