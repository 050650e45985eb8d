"""Results of calls to actors, and failures of calls as sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError

from areno.errors import ArenoError, RunError


def plain_error(error: RayError) -> ArenoError:
    """What a failed call comes to: an error of ours that was raised in the worker as it is, everything else as a
    RunError (with the worker's traceback where there is one)."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ArenoError):
        return cause
    if isinstance(error, ObjectLostError) or isinstance(cause, ObjectLostError):
        return RunError(f"data of this step was lost together with the node that held it: {one_line(cause or error)}")
    if isinstance(error, RayTaskError):
        return RunError(f"a Ray worker failed with {type(cause).__name__}: {one_line(cause)}", details=str(error))
    return RunError(f"Ray failed with {type(error).__name__}: {one_line(error)}")


def one_line(error: Any) -> str:
    """The beginning of a message, without line breaks and without a traceback."""
    return " ".join(str(error).split("\ntraceback:")[0].split())[:300]


def span_of(noun: str, start: int, stop: int) -> str:
    """Words for the numbers from `start` to `stop` - 1."""
    return f"{noun} {start}" if stop - start == 1 else f"{noun}s {start} to {stop - 1}"


def get_all(refs: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Results of several first calls of actors, which must all come.

    Raises:
        RunError: they do not come in time, or an actor died.
        ArenoError: the first error of a call.
    """
    try:
        return list(ray.get(list(refs), timeout=timeout_s))
    except GetTimeoutError as error:
        raise RunError(
            f"the {what} did not start within {timeout_s:g} s: Ray has no node with free CPUs or GPUs for each of them "
            "(`ray status`)."
        ) from error
    except RayActorError as error:
        raise RunError(f"the {what} died while starting: {one_line(error)}") from error
    except RayError as error:
        raise plain_error(error) from error


def get_or_errors(refs: Sequence[Any]) -> list[Any]:
    """The results of calls that are done, and in the places of those that failed their `RayError`."""
    try:
        return list(ray.get(list(refs)))
    except RayError:
        return [_get_or_error(ref) for ref in refs]


def _get_or_error(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return error


def get_each(calls: Sequence[Any], timeout_s: float, what: str, died: Callable[[int], str]) -> list[Any]:
    """All results, in the order of the calls. The first failure ends the wait: the others may wait for the failed one.

    Args:
        what: "the train workers did not ..."
        died: a sentence's beginning about the actor of call i.

    Raises:
        RunError: a call takes longer than `timeout_s`, or an actor died.
        ArenoError: the first error of a call.
    """
    waiting = list(calls)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if not ready:
            raise RunError(f"{what} within {timeout_s:g} s.")
        try:
            ray.get(ready)
        except RayActorError as error:
            raise RunError(f"{died(list(calls).index(ready[0]))}: {one_line(error)}") from error
        except RayError as error:
            raise plain_error(error) from error
    return list(ray.get(list(calls)))
