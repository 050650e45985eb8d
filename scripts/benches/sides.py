"""Processes in which one side of a comparison runs its part, in turn with the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from benches.case import SCRIPTS
from benches.peers import VERSIONS, peer_path

PEERS = tuple(f"areno {version}" for version in VERSIONS)
"""AReno with per-token lists, and after its own optimization of this step."""

BEFORE, AFTER = PEERS


class Side:
    """One side of a comparison in a process of its own (`benches.side`), told what to do a line at a time.

    Args:
        who: "ours" or one of PEERS.
        cores: CPU cores that it may use; None leaves it all.
    """

    def __init__(self, who: str, cores: int | None = None) -> None:
        folder = str(SCRIPTS.parent) if who == "ours" else str(peer_path(who.split()[1]))
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if cores is not None:
            env |= {"OMP_NUM_THREADS": str(cores), "RAYON_NUM_THREADS": str(cores)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benches.side", who, folder, str(cores or 0)],
            cwd=SCRIPTS,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """What the method of that name of the side's contender returns.

        Raises:
            RuntimeError: the process has ended; its traceback is on stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a side ended with exit code {self._process.wait()} at {command}.")
        return json.loads(answer)

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def sides(names: tuple[str, ...] = ("ours", *PEERS), cores: int | None = 1) -> Iterator[dict[str, Side]]:
    """A process per side, ended at the end."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(Side(name, cores)) for name in names}
