"""A user's reward function: loaded from its file, checked, and told apart by the way it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areno.errors import UsageError
from areno.user_file import UserFile

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


class RewardSource(UserFile):
    """A reward file as it was when the run began."""

    @classmethod
    def read(cls, path: str | Path) -> RewardSource:
        """
        Raises:
            UsageError: no such file, or it cannot be read.
        """
        file = cls.at(path, "--reward-fn-path")
        return cls(file.path, file.text)

    def load(self) -> RewardHook:
        """Run the file (once per process) and take its `reward_fn_batch` or `reward_fn`.

        Raises:
            UsageError: a syntax error or an exception at import (with file and line), no such function, one that is not
                callable or does not take one argument.
        """
        module = self.module()
        for name in ("reward_fn_batch", "reward_fn"):
            fn = getattr(module, name, None)
            if fn is not None:
                return _hook(self.path, name, fn)
        raise UsageError(
            f"{self.path} defines no reward_fn: add `def reward_fn(record): ...` that returns a number, or "
            "`def reward_fn_batch(records): ...` that returns a list of them."
        )


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
