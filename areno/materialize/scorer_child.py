"""The process that reward calls run in when they might hang or crash. Started by `scorer_process`, one line at a time:

    ("load", source)                         -> ("ready", kind) or ("unusable", message)
    ("score", nbytes, count, indices, options) -> any number of ("outcome", i, outcome, seconds), then ("done", leftovers)

The hook runs on this process's main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from areno.errors import ArenoError
from areno.materialize.records import RecordBatch
from areno.materialize.reward_call import Failure, RewardTimeout, run_hook
from areno.materialize.reward_hook import RewardHook, load_reward_hook
from areno.materialize.reward_value import Reward
from areno.materialize.score_board import IDLE, PLAIN, TOLD, ScoreBoard, read_records
from areno.materialize.scoring import ScoringOptions

STOP_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
"""Asks the running call to stop. Not SIGALRM: verifiers have that one for themselves."""

_PR_SET_PDEATHSIG = 1


def main(connection_fd: int, arena_fd: int, board_fd: int) -> None:
    """Serve until the other side hangs up."""
    _die_with_parent()
    connection = Connection(connection_fd)
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # until there is a call that it could stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the watcher, who ends this process
    hook: RewardHook | None = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            command, *arguments = connection.recv()
            if command == "load":
                hook = _load(connection, *arguments)
            elif hook is not None:
                _score(connection, hook, arena_fd, board_fd, *arguments)


def _load(connection: Connection, reward: Any, memory_gb: float | None) -> RewardHook | None:
    try:
        hook = load_reward_hook(reward)
    except ArenoError as error:
        connection.send(("unusable", str(error)))
        return None
    if memory_gb is not None:
        _bound_memory(memory_gb)
    connection.send(("ready", hook.kind))
    return hook


def _score(
    connection: Connection,
    hook: RewardHook,
    arena_fd: int,
    board_fd: int,
    nbytes: int,
    count: int,
    indices: list[int],
    options: ScoringOptions,
) -> None:
    records: RecordBatch = read_records(arena_fd, nbytes)
    board = ScoreBoard(board_fd, count)
    sink = _BoardSink(board, connection, stop_at_failure=options.on_error == "fail")

    def stop(_signal: int, _frame: FrameType | None) -> None:
        # The order may have come when its sample had just returned: then it is not for the one that runs now.
        if board.current != IDLE and board.current == board.to_stop:
            raise RewardTimeout

    signal.signal(STOP_SIGNAL, stop)
    run_hook(hook, records, indices, sink, concurrency=options.concurrency, timeout_s=options.timeout_s)
    connection.send(("done", _leftovers()))


class _BoardSink:
    """Publishes what is being worked on, and each outcome as soon as it exists."""

    def __init__(self, board: ScoreBoard, connection: Connection, *, stop_at_failure: bool) -> None:
        self.stopped = False
        self._stop_at_failure = stop_at_failure
        self._board = board
        self._connection = connection
        self._pid = os.getpid()

    def begin(self, i: int) -> None:
        self._board.begin(i, time.monotonic_ns())

    def end(self, i: int, outcome: Reward | Failure, seconds: float) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # the hook forked, and this is the child coming back: it must not score a second time
        board = self._board
        if board.to_stop == i:  # it was told to stop; whatever it returned, it was too late
            outcome = outcome if isinstance(outcome, Failure) else Failure("timeout", "")
            board.to_stop = IDLE
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the hook left must not strike the next sample
        if isinstance(outcome, Reward) and not outcome.components:
            board.rewards_N[i] = outcome.value
            board.seconds_N[i] = seconds
            board.states_N[i] = PLAIN
        else:
            self._connection.send(("outcome", i, outcome, seconds))
            board.states_N[i] = TOLD
            self.stopped = self._stop_at_failure and isinstance(outcome, Failure)
        board.end(time.monotonic_ns())


def _leftovers() -> int:
    """Threads and child processes that hooks have left running."""
    children = 0
    for task in _tasks():
        with contextlib.suppress(OSError):
            children += len((task / "children").read_text().split())
    return children + threading.active_count() - 1


def _tasks() -> Iterable[Path]:
    folder = Path("/proc/self/task")
    return folder.iterdir() if folder.is_dir() else ()


def _bound_memory(memory_gb: float) -> None:
    """Bound what the hook may take beyond what the process has after loading it: the call over it gets MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + int(memory_gb * (1 << 30))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _die_with_parent() -> None:
    """However the watcher ends, this process must not stay."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it ended before the call above
            os._exit(0)
