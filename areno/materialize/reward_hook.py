"""A user's reward file: read once, checked, run under a module name of its own, and its results taken strictly."""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areno.errors import UsageError

HookKind = Literal["plain", "async", "batch"]


@dataclass(frozen=True)
class RewardHook:
    """A loaded reward function, how it is called, and the name of its file (or its own) in messages.

    plain: reward_fn(record) -> reward. async: `async def reward_fn(record)`, several at a time.
    batch: reward_fn_batch(records) -> one reward per record, in order.
    """

    name: str
    fn: Callable[[Any], Any]
    kind: HookKind

    @property
    def function(self) -> str:
        """The name of the function in the file."""
        return "reward_fn_batch" if self.kind == "batch" else "reward_fn"


@dataclass(frozen=True)
class RewardSource:
    """A reward file as it was when the run began. Worker processes run this text, so that an edit on disk during the
    run cannot be picked up by some of them; files it imports are read where it runs."""

    path: str
    text: bytes

    @classmethod
    def read(cls, path: str | Path) -> RewardSource:
        """
        Raises:
            UsageError: no such file, or it cannot be read.
        """
        full = Path(path).expanduser().resolve()
        try:
            return cls(str(full), full.read_bytes())
        except OSError as error:
            raise UsageError(
                f"reward file {full} cannot be read ({error.strerror}): check --reward-fn-path."
            ) from error

    def load(self) -> RewardHook:
        """Run the file (once per process) and take its `reward_fn_batch` or `reward_fn`.

        Raises:
            UsageError: a syntax error or an exception at import (with file and line), no such function, one that is not
                callable or does not take one argument.
        """
        module = self._module()
        for name in ("reward_fn_batch", "reward_fn"):
            fn = getattr(module, name, None)
            if fn is not None:
                return _hook(self.path, name, fn)
        raise UsageError(
            f"{self.path} defines no reward_fn: add `def reward_fn(record): ...` that returns a number, or "
            "`def reward_fn_batch(records): ...` that returns a list of them."
        )

    def _module(self) -> types.ModuleType:
        # A name of its own: the file may be called math.py, and pickling a class it defines must find this module.
        name = "areno_reward_" + hashlib.sha256(self.path.encode() + b"\0" + self.text).hexdigest()[:16]
        if name in sys.modules:
            return sys.modules[name]
        try:
            code = compile(self.text, self.path, "exec")
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UsageError(f"{self.path}{line}: {error.args[0]}: mend the reward file.") from error
        module = types.ModuleType(name)
        module.__file__ = self.path
        folder = str(Path(self.path).parent)
        if folder not in sys.path:
            sys.path.append(folder)  # at the end: a sibling called random.py must not hide the standard library's
        sys.modules[name] = module
        try:
            exec(code, module.__dict__)
        except KeyboardInterrupt:
            del sys.modules[name]
            raise
        except BaseException as error:
            del sys.modules[name]
            where = line_in_file(error, self.path)
            raise UsageError(f"{where}: importing the reward file failed with {describe(error)}.") from error
        return module


def load_reward_hook(reward: str | Path | RewardSource | Callable[[Any], Any]) -> RewardHook:
    """Make a hook from a path, a source that was read before, or a function.

    Raises:
        UsageError: see `RewardSource.read` and `RewardSource.load`.
    """
    if isinstance(reward, (str, Path)):
        reward = RewardSource.read(reward)
    if isinstance(reward, RewardSource):
        return reward.load()
    name = getattr(reward, "__qualname__", type(reward).__name__)
    if not callable(reward):
        raise UsageError(f"the reward must be a path to a Python file or a function, got {type(reward).__name__}.")
    return _hook(name, "reward_fn", reward)


def _hook(place: str, name: str, fn: Any) -> RewardHook:
    if not callable(fn):
        raise UsageError(f"{place}: {name} is a {type(fn).__name__}, not a function: define {name}.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in callables have none
        signature = None
    if signature is not None:
        try:
            signature.bind(object())
        except TypeError:
            raise UsageError(f"{place}: {name}{signature} cannot be called with one argument: take one.") from None
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
    if name == "reward_fn_batch":
        if is_async:
            raise UsageError(f"{place}: {name} is async: make it a plain function, or define `async def reward_fn`.")
        return RewardHook(place, fn, "batch")
    return RewardHook(place, fn, "async" if is_async else "plain")


def describe(error: BaseException) -> str:
    """Type and message of an exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def line_in_file(error: BaseException, path: str) -> str:
    """`path:line` of the innermost frame in that file, or the path alone."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}" if lines else path
