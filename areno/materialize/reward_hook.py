"""A user's reward file: read once, checked, run under a module name of its own, and its results taken strictly."""

from __future__ import annotations

import hashlib
import inspect
import math
import numbers
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areno.errors import UsageError


class BadRewardError(ValueError):
    """A reward function returned something that is no reward. `cause` is none, non_finite or bad_type."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class RewardHook:
    """A loaded reward function and the name it goes by in messages."""

    name: str
    fn: Callable[[Any], Any]


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
        """Run the file (once per process) and take its `reward_fn`.

        Raises:
            UsageError: a syntax error or an exception at import (with file and line), no `reward_fn`, one that is not
                callable or does not take one argument.
        """
        module = self._module()
        fn = getattr(module, "reward_fn", None)
        if fn is None:
            raise UsageError(
                f"{self.path} defines no reward_fn: add `def reward_fn(record): ...` that returns a number."
            )
        if not callable(fn):
            raise UsageError(
                f"{self.path}: reward_fn is a {type(fn).__name__}, not a function: define reward_fn(record)."
            )
        if inspect.iscoroutinefunction(fn):
            raise UsageError(f"{self.path}: reward_fn is async; only a plain `def reward_fn(record)` is called.")
        _check_takes_one_argument(fn, self.path)
        return RewardHook(self.path, fn)

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
    if not callable(reward):
        raise UsageError(f"the reward must be a path to a Python file or a function, got {type(reward).__name__}.")
    name = getattr(reward, "__qualname__", type(reward).__name__)
    _check_takes_one_argument(reward, name)
    return RewardHook(name, reward)


def as_reward(value: Any) -> float:
    """The float behind a Python, numpy or 0-d torch number or bool.

    Raises:
        BadRewardError: None, NaN, infinity, or anything else; nothing is converted by guess.
    """
    number = value if type(value) is float else _number(value)
    if not math.isfinite(number):
        raise BadRewardError("non_finite", f"returned {number}, not a finite number")
    return number


def _number(value: Any) -> float:
    if value is None:
        raise BadRewardError("none", "returned None")
    if (isinstance(value, np.ndarray) and value.ndim == 0) or _is_scalar_tensor(value):
        value = value.item()
    if isinstance(value, np.bool_):
        return float(value)
    if isinstance(value, numbers.Real) and isinstance(value, (int, float, np.integer, np.floating)):
        try:
            return float(value)
        except OverflowError:
            raise BadRewardError("non_finite", "returned an integer that no float can hold") from None
    raise BadRewardError("bad_type", f"returned a {type(value).__name__}, not a number")


def _is_scalar_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # a tensor can only come from a process that has imported torch
    return torch is not None and isinstance(value, torch.Tensor) and value.ndim == 0


def describe(error: BaseException) -> str:
    """Type and message of an exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def line_in_file(error: BaseException, path: str) -> str:
    """`path:line` of the innermost frame in that file, or the path alone."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}" if lines else path


def _check_takes_one_argument(fn: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    try:
        signature.bind(object())
    except TypeError:
        raise UsageError(f"{name}: reward_fn{signature} cannot be called with one record: take one argument.") from None
