"""Says which sample a reward call hangs on, while it hangs."""

from __future__ import annotations

import logging
import threading
import time

FIRST_S = 8.0
"""After so many seconds of one call a line is written, and again each time its length has doubled."""

logger = logging.getLogger("areno.reward")


def hang_line(hook: str, place: tuple[int, int], seconds: float) -> str:
    """The line about a call that does not return. No text of the sample is in it."""
    return f"{hook}: the reward of prompt {place[0]}, sample {place[1]} has been running for {seconds:.0f} s."


class HangWatch:
    """A thread that looks at the call in progress once a second. It starts with the first call."""

    def __init__(self, hook: str) -> None:
        self._hook = hook
        self._current: tuple[tuple[int, int], float] | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def begin(self, place: tuple[int, int]) -> None:
        self._current = (place, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="areno-reward-watch", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._current = None

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        told: tuple[object, float] = (None, 0.0)
        while not self._closed.wait(1.0):
            current = self._current
            if current is None:
                continue
            seconds = time.monotonic() - current[1]
            due = 2 * told[1] if told[0] is current else FIRST_S
            if seconds >= due:
                logger.warning(hang_line(self._hook, current[0], seconds))
                told = (current, seconds)
