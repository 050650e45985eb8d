"""How a signal from outside ends the command: like Ctrl-C, so that everything that was started is taken down."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM. Whatever lets Ctrl-C through lets this through."""


def clean_up_on_sigterm() -> None:
    """From now on SIGTERM raises `Terminated` in the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: Any) -> None:  # noqa: ARG001
    # Once is enough: a second one must not break off the cleaning up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
