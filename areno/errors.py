"""The failures that this package raises on purpose. Each message is a sentence that names the thing and the way out."""

from __future__ import annotations


class ArenoError(Exception):
    """A failure with a message for the person at the terminal; no traceback is needed to act on it.

    `details` may hold what helps to mend it, such as the traceback of the user's own code.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class UsageError(ArenoError):
    """Something the user passed in cannot work (exit code 2). Raised before a model is loaded wherever possible."""


class RunError(ArenoError):
    """A fault in the middle of a run (exit code 1). The last complete checkpoint and all metrics so far are intact."""


class RewardError(RunError):
    """A reward function failed and the policy is to stop. The message names file, prompt index and sample index."""
