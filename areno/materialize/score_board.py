"""Shared memory between a scorer process and the one that watches it.

Both parts are files without a name, so that nothing can be left behind: the arena holds the pickled records of a shard,
the board says which sample the scorer is on and takes plain rewards as they come.
Axes: N completions of the shard.
"""

from __future__ import annotations

import mmap
import pickle
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from areno.materialize.records import RecordBatch

IDLE = -1
PENDING, PLAIN, TOLD = 0, 1, 2
"""State of a sample: not scored, its reward is on the board, its outcome was sent as a message."""

_HEADER = 4  # current sample, when its call began (monotonic ns), sample that is to stop, samples finished


def unnamed_file() -> BinaryIO:
    """A file in memory where there is such a folder, gone when the last process lets go of it."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=0))


def write_records(fd: int, records: RecordBatch) -> int:
    """Write pickled records into the arena; token arrays are copied once and not pickled. Returns the bytes written."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(records, protocol=5, buffer_callback=buffers.append)
    views: list[memoryview | bytes] = [buffer.raw() for buffer in buffers]
    index = pickle.dumps([len(body), *(memoryview(view).nbytes for view in views)])
    parts: list[memoryview | bytes] = [len(index).to_bytes(8, "little"), index, body, *views]
    total = sum(memoryview(part).nbytes for part in parts)
    with open(fd, "r+b", buffering=0, closefd=False) as file:
        file.truncate(total)
        file.seek(0)
        for part in parts:
            rest = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
            while rest.nbytes:
                rest = rest[file.write(rest) :]
    return total


def read_records(fd: int, nbytes: int) -> RecordBatch:
    """Records from the arena; their token arrays are read-only views of it."""
    view = memoryview(mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ))
    head = 8 + int.from_bytes(view[:8], "little")
    sizes: list[int] = pickle.loads(view[8:head])
    parts = []
    for size in sizes:
        parts.append(view[head : head + size])
        head += size
    records: RecordBatch = pickle.loads(parts[0], buffers=parts[1:])
    return records


class ScoreBoard:
    """The board over one shard of N samples. Made by both sides over the same file; the watcher clears it first.

    rewards_N float64, seconds_N float32, states_N uint8: PENDING, PLAIN or TOLD. A reward is written before its state.
    """

    def __init__(self, fd: int, count: int, *, clear: bool = False) -> None:
        size = _HEADER * 8 + count * (8 + 4 + 1)
        if clear:
            with open(fd, "r+b", buffering=0, closefd=False) as file:
                file.truncate(0)
                file.truncate(size)
        self._map = mmap.mmap(fd, size)
        self._header = memoryview(self._map)[: _HEADER * 8].cast("q")
        start = _HEADER * 8

        def column(dtype: Any, width: int) -> Any:
            nonlocal start
            made = np.frombuffer(self._map, dtype=dtype, count=count, offset=start)
            start += count * width
            return made

        self.rewards_N = column(np.float64, 8)
        self.seconds_N = column(np.float32, 4)
        self.states_N = column(np.uint8, 1)
        if clear:
            self._header[0] = self._header[2] = IDLE

    @property
    def current(self) -> int:
        """The sample whose call is running, or IDLE."""
        return self._header[0]

    @property
    def began_ns(self) -> int:
        """When that call began, or when the last sample of a larger call was finished (time.monotonic_ns)."""
        return self._header[1]

    @property
    def finished(self) -> int:
        """Samples finished in this shard, tries included: it moves whenever there is progress."""
        return self._header[3]

    @property
    def to_stop(self) -> int:
        """The sample that the watcher wants stopped, or IDLE."""
        return self._header[2]

    @to_stop.setter
    def to_stop(self, i: int) -> None:
        self._header[2] = i

    def begin(self, i: int, now_ns: int) -> None:
        self._header[1] = now_ns
        self._header[0] = i

    def end(self, now_ns: int) -> None:
        self._header[0] = IDLE
        self._header[1] = now_ns
        self._header[3] += 1
