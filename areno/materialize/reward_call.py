"""Calling a reward hook of any kind, each outcome with its sample. Runs in the shard's process or in a scorer's."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areno.api.rewards import RewardRecord
from areno.materialize.records import RecordBatch
from areno.materialize.reward_hook import RewardHook
from areno.materialize.reward_value import BadRewardError, Reward, as_reward
from areno.user_file import describe, line_in_file


class RewardTimeout(BaseException):
    """Raised inside a reward call that is over its time. Not an Exception: a hook's `except Exception` must not eat it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call gave no reward; causes as in `SampleFailure`."""

    cause: str
    message: str
    traceback: str = ""


class Sink(Protocol):
    """Where outcomes go. `begin` and `end` frame each sample; a batch call frames its first sample only."""

    @property
    def stopped(self) -> bool: ...

    def begin(self, i: int) -> None: ...

    def end(self, i: int, outcome: Reward | Failure, seconds: float) -> None: ...


def run_hook(
    hook: RewardHook,
    records: RecordBatch,
    indices: Sequence[int],
    sink: Sink,
    *,
    concurrency: int,
    timeout_s: float | None = None,
) -> None:
    """Score the records at `indices`. Only the user interrupting the run passes through.

    Args:
        concurrency: calls of an async hook at a time.
        timeout_s: longest call of an async hook; the others are stopped from outside.
    """
    if hook.kind == "async":
        asyncio.run(_run_async(hook, records, indices, sink, concurrency, timeout_s))
    elif hook.kind == "batch":
        _run_batch(hook, records, list(indices), sink)
    else:
        _run_plain(hook, records, indices, sink)


def _run_plain(hook: RewardHook, records: RecordBatch, indices: Sequence[int], sink: Sink) -> None:
    clock = time.perf_counter
    for i in indices:
        began = clock()
        try:
            record = records.record(i)
            sink.begin(i)
            try:
                outcome: Reward | Failure = as_reward(hook.fn(record))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also SystemExit: a hook that calls sys.exit() must not end the run
                outcome = failure_of(hook, error)
            sink.end(i, outcome, clock() - began)
        except RewardTimeout as error:  # it came when the call had just returned
            sink.end(i, failure_of(hook, error), clock() - began)
        if sink.stopped:
            return


def _run_batch(hook: RewardHook, records: RecordBatch, indices: list[int], sink: Sink) -> None:
    """One call for all. If it raises, it is made again with each half, until the guilty sample stands alone."""
    if not indices or sink.stopped:
        return
    began = time.perf_counter()
    outcomes: list[Reward | Failure]
    sink.begin(indices[0])
    try:
        outcomes = _read_batch(hook, hook.fn([records.record(i) for i in indices]), len(indices))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if len(indices) > 1 and not isinstance(error, BadRewardError):
            middle = len(indices) // 2
            _run_batch(hook, records, indices[:middle], sink)
            _run_batch(hook, records, indices[middle:], sink)
            return
        outcomes = [failure_of(hook, error)] * len(indices)
    seconds = (time.perf_counter() - began) / len(indices)
    for i, outcome in zip(indices, outcomes, strict=True):
        sink.end(i, outcome, seconds)


def _read_batch(hook: RewardHook, values: Any, count: int) -> list[Reward | Failure]:
    """One outcome per value.

    Raises:
        BadRewardError: not a sequence of the right length; then no value can be trusted to belong to its sample.
    """
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
        raise BadRewardError("bad_type", f"returned a {type(values).__name__}, not a list: expected {count} rewards")
    if len(values) != count:
        raise BadRewardError("bad_type", f"returned {len(values)} rewards: expected {count}, got {len(values)}")
    outcomes: list[Reward | Failure] = []
    for value in values:
        try:
            outcomes.append(as_reward(value))
        except BadRewardError as error:
            outcomes.append(failure_of(hook, error))
    return outcomes


async def _run_async(
    hook: RewardHook,
    records: RecordBatch,
    indices: Sequence[int],
    sink: Sink,
    concurrency: int,
    timeout_s: float | None,
) -> None:
    slots = asyncio.Semaphore(concurrency)

    async def one(i: int) -> None:
        async with slots:
            if sink.stopped:
                return
            record: RewardRecord = records.record(i)
            began = time.perf_counter()
            sink.begin(i)
            try:
                outcome: Reward | Failure = as_reward(await asyncio.wait_for(hook.fn(record), timeout_s))
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except (asyncio.TimeoutError, TimeoutError) as error:
                late = timeout_s is not None and time.perf_counter() - began >= timeout_s
                outcome = failure_of(hook, RewardTimeout() if late else error)
            except BaseException as error:
                outcome = failure_of(hook, error)
            sink.end(i, outcome, time.perf_counter() - began)

    await asyncio.gather(*(one(i) for i in indices))


def failure_of(hook: RewardHook, error: BaseException) -> Failure:
    """What an exception out of a hook is called."""
    if isinstance(error, BadRewardError):
        return Failure(error.cause, f"{hook.name}: {hook.function} {error}")
    if isinstance(error, RewardTimeout):
        return Failure("timeout", f"{hook.name}: {hook.function} ran longer than --reward-timeout-s")
    where = line_in_file(error, hook.name)
    cause = "memory" if isinstance(error, MemoryError) else "exception"
    return Failure(cause, f"{where}: {describe(error)}", "".join(traceback.format_exception(error)))
