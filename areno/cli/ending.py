"""How a signal from outside ends the command: like Ctrl-C, so that everything that was started is taken down."""

from __future__ import annotations

import signal
import threading
from typing import Any


def clean_up_on_sigterm() -> None:
    """From now on SIGTERM raises KeyboardInterrupt in the main thread, which all code lets through that lets Ctrl-C
    through. Other exceptions do not come through Ray's waits, not even a kind of KeyboardInterrupt."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def was_terminated() -> bool:
    """Whether an interrupt came from SIGTERM."""
    return signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def _terminate(number: int, frame: Any) -> None:  # noqa: ARG001
    # Once is enough: a second one must not break off the cleaning up. It is also the mark of `was_terminated`.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt
