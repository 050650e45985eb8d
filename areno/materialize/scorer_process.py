"""Scoring in a process of its own: watched, stopped in time, replaced when it dies, and always with the guilty named."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from multiprocessing import Pipe

import numpy as np

from areno.errors import UsageError
from areno.materialize.hang_watch import FIRST_S, hang_line
from areno.materialize.records import RecordBatch
from areno.materialize.reward_call import Failure
from areno.materialize.reward_hook import RewardSource
from areno.materialize.reward_value import Reward
from areno.materialize.score_board import IDLE, PENDING, PLAIN, ScoreBoard, unnamed_file, write_records
from areno.materialize.scorer import ScoreBook
from areno.materialize.scorer_child import STOP_SIGNAL
from areno.materialize.scoring import Scores, ScoringOptions

GRACE_S = 1.0
"""How long a call may take to react to the order to stop; then its process is killed."""

LOAD_TIMEOUT_S = 120.0

# A process in which hooks have left so many threads and children is replaced between shards.
MAX_LEFTOVERS = 32

logger = logging.getLogger("areno.reward")


class ScorerProcess:
    """A child process with the hook loaded. It is a session of its own, so that what a hook forks goes with it."""

    def __init__(self, source: RewardSource, memory_gb: float | None, arena_fd: int, board_fd: int) -> None:
        self.connection, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
            f"from areno.materialize.scorer_child import main; main({theirs.fileno()}, {arena_fd}, {board_fd})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(), arena_fd, board_fd),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.connection.send(("load", source, memory_gb))
        self._kind = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_loaded(self) -> str:
        """The kind of hook that it has loaded (see `RewardHook`).

        Raises:
            UsageError: the reward file cannot be used, or the process died or did nothing while it was imported.
        """
        if self._kind:
            return self._kind
        try:
            if not self.connection.poll(LOAD_TIMEOUT_S):
                raise UsageError(f"importing the reward file did not end within {LOAD_TIMEOUT_S:g} s.")
            answer, *message = self.connection.recv()
        except (EOFError, ConnectionError):
            raise UsageError(f"the scorer process {self.how_it_ended()} while it imported the reward file.") from None
        if answer != "ready":
            raise UsageError(message[0])
        self._kind = message[0]
        return self._kind

    def ask_to_stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STOP_SIGNAL)

    def kill(self) -> None:
        """End the process and what it has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def how_it_ended(self) -> str:
        """Words for the way a dead process went."""
        code = self._process.wait()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended itself with exit code {code}"


@dataclass
class _Turn:
    """One run of the child over some samples, and how far the watcher is with it."""

    indices: list[int]
    begun: bool = False
    asked: int = IDLE
    asked_at: float = 0.0
    told_s: float = 0.0
    told_of: tuple[int, int] = (IDLE, 0)


class ProcessScorer:
    """See `areno.materialize.scorer.Scorer`. A warm spare stands by, so that a kill costs no start.

    Raises:
        UsageError: the reward file cannot be used.
    """

    def __init__(self, source: RewardSource, options: ScoringOptions) -> None:
        self._source = source
        self._options = options
        self._arena, self._board_file = unnamed_file(), unnamed_file()
        self._child = self._start()
        self._spare = self._start()
        try:
            self._kind = self._child.wait_until_loaded()
        except BaseException:
            self.close()
            raise

    def _start(self) -> ScorerProcess:
        return ScorerProcess(self._source, self._options.memory_gb, self._arena.fileno(), self._board_file.fileno())

    @property
    def process_ids(self) -> tuple[int, int]:
        """The scorer that works and the one that stands by."""
        return self._child.pid, self._spare.pid

    def score(self, records: RecordBatch) -> Scores:
        book = ScoreBook(records, self._options.on_error)
        count = len(records)
        if count == 0:
            return book.scores()
        nbytes = write_records(self._arena.fileno(), records)
        board = ScoreBoard(self._board_file.fileno(), count, clear=True)
        deaths: Counter[int] = Counter()
        todo = deque([list(range(count))])
        while todo and not book.stopped:
            turn = _Turn(todo.popleft())
            cause = self._run(turn, board, book, records, nbytes)
            if cause is not None:
                todo.extendleft(reversed(self._after_death(turn, board, book, deaths, cause)))
        plain = np.flatnonzero(board.states_N == PLAIN)
        book.write_plain(plain.tolist(), board.rewards_N[plain], board.seconds_N[plain])
        return book.scores()

    def _run(
        self, turn: _Turn, board: ScoreBoard, book: ScoreBook, records: RecordBatch, nbytes: int
    ) -> Failure | None:
        """Have the child score a turn. None when it is through, else why its process is gone."""
        child = self._child
        board.to_stop = IDLE
        board.end(time.monotonic_ns())
        try:
            child.wait_until_loaded()
            child.connection.send(("score", nbytes, len(records), turn.indices, self._options))
            while True:
                if child.connection.poll(self._patience(turn, board)):
                    message, *parts = child.connection.recv()
                    if message == "done":
                        if parts[0] > MAX_LEFTOVERS:
                            self._replace()
                        return None
                    i, outcome, seconds = parts
                    book.write(i, self._named(outcome), seconds)
                elif not self._look_after(turn, board, records):
                    self._replace()
                    return Failure("timeout", self._late())
        except (EOFError, ConnectionError):
            ended = child.how_it_ended()
            self._replace()
            return Failure("killed", f"{self._source.path}: the scorer process {ended}")

    def _patience(self, turn: _Turn, board: ScoreBoard) -> float:
        """Seconds until the watcher must look again."""
        timeout_s = self._options.timeout_s
        if timeout_s is None:
            return 1.0
        if turn.asked != IDLE:
            return max(0.01, min(1.0, turn.asked_at + GRACE_S - time.monotonic()))
        return max(0.01, min(1.0, timeout_s - self._running_s(board)))

    @staticmethod
    def _running_s(board: ScoreBoard) -> float:
        return (time.monotonic_ns() - board.began_ns) / 1e9

    def _look_after(self, turn: _Turn, board: ScoreBoard, records: RecordBatch) -> bool:
        """Speak of a call that hangs, and stop one that is over its time. False: it did not react, kill it."""
        current, running_s = board.current, self._running_s(board)
        call = (current, board.finished)
        if current != IDLE:
            turn.begun = True
            if turn.told_of != call:
                turn.told_of, turn.told_s = call, FIRST_S / 2
            if running_s >= 2 * turn.told_s:
                logger.warning(hang_line(self._source.path, records.place(current), running_s))
                turn.told_s = running_s
        timeout_s = self._options.timeout_s
        # Before the first call the child only reads its records: there is nothing to stop, and nobody to blame.
        at_rest = current == IDLE and (self._kind == "plain" or not turn.begun)
        if timeout_s is None or running_s < timeout_s or at_rest:
            turn.asked = IDLE
            return True
        if self._kind != "plain":
            # Several samples are in the call: there is no single one to stop, and an async hook stops its own.
            return running_s < timeout_s + GRACE_S
        if turn.asked == IDLE:
            turn.asked, turn.asked_at = current, time.monotonic()
            board.to_stop = current
            self._child.ask_to_stop()
            return True
        return time.monotonic() - turn.asked_at < GRACE_S

    def _after_death(
        self, turn: _Turn, board: ScoreBoard, book: ScoreBook, deaths: Counter[int], cause: Failure
    ) -> list[list[int]]:
        """What is still to be done of a turn whose process died, with the guilty sample left out once it is certain."""
        rest = [i for i in turn.indices if board.states_N[i] == PENDING]
        if not rest:
            return []
        if self._kind != "plain" and len(rest) > 1:
            middle = len(rest) // 2  # one of these; halve until it stands alone
            return [rest[:middle], rest[middle:]]
        guilty = board.current if board.current in rest else rest[0]
        deaths[guilty] += 1
        if cause.cause == "timeout" or deaths[guilty] > self._options.retries:
            tries = f" ({deaths[guilty]} tries)" if deaths[guilty] > 1 else ""
            seconds = max(self._running_s(board), 0.0)
            book.write(guilty, Failure(cause.cause, cause.message + tries), seconds)
            rest.remove(guilty)
        return [rest] if rest else []

    def _named(self, outcome: Reward | Failure) -> Reward | Failure:
        late = isinstance(outcome, Failure) and outcome.cause == "timeout"
        return Failure("timeout", self._late()) if late else outcome

    def _late(self) -> str:
        return f"{self._source.path}: the reward call ran longer than {self._options.timeout_s:g} s"

    def _replace(self) -> None:
        """Kill the child; the spare takes its place, and a new spare is started."""
        self._child.kill()
        self._child, self._spare = self._spare, self._start()

    def close(self) -> None:
        for process in (self._child, self._spare):
            process.kill()
        self._arena.close()
        self._board_file.close()
