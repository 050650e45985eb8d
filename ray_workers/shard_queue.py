"""Which shard goes to which actor, and what is still out: the bookkeeping of `RayMaterializer`.

Work goes to whoever is free. Each actor has one shard waiting behind the one it works on, so that it never idles for the
time of a round trip to the driver.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from areno.errors import RunError
from ray_workers.calls import span_of

Payload = TypeVar("Payload")

DEPTH = 2


@dataclass(frozen=True)
class Shard(Generic[Payload]):
    """A shard on its way. `first_group` is its identity in the step, `tries` how many workers died working on it."""

    first_group: int
    num_groups: int
    payload: Payload
    tries: int = 0


class ShardQueue(Generic[Payload]):
    """Pending and running shards over a fixed number of workers."""

    def __init__(self, num_workers: int, *, max_tries: int = 3) -> None:
        self._pending: deque[Shard[Payload]] = deque()
        self._running: list[int] = [0] * num_workers
        self._max_tries = max_tries

    def __len__(self) -> int:
        """Shards that wait for a worker."""
        return len(self._pending)

    def add(self, shard: Shard[Payload]) -> None:
        self._pending.append(shard)

    def assign(self) -> tuple[int, Shard[Payload]] | None:
        """The next shard and the worker that takes it, or None if there is no shard or every worker has its fill."""
        worker = min(range(len(self._running)), key=self._running.__getitem__)
        if not self._pending or self._running[worker] >= DEPTH:
            return None
        self._running[worker] += 1
        return worker, self._pending.popleft()

    def finished(self, worker: int) -> None:
        """A worker has returned a shard."""
        self._running[worker] -= 1

    def lost(self, worker: int, shard: Shard[Payload], cause: str, *, guilty: bool) -> None:
        """A worker died with a shard: it goes to the front again, but only so many times if it was `guilty`, being the one
        that the worker worked on.

        Raises:
            RunError: the shard has been lost too often; its prompts are named.
        """
        self._running[worker] -= 1
        tries = shard.tries + guilty
        if tries >= self._max_tries:
            prompts = span_of("prompt", shard.first_group, shard.first_group + shard.num_groups)
            raise RunError(f"the materialize worker died {tries} times on {prompts} ({cause}): reward calls kill it.")
        self._pending.appendleft(Shard(shard.first_group, shard.num_groups, shard.payload, tries))

    def drop_after(self, first_group: int) -> None:
        """Forget pending shards behind this one: the step is going to be refused."""
        self._pending = deque(s for s in self._pending if s.first_group < first_group)

    def clear(self) -> None:
        self._pending.clear()
        self._running = [0] * len(self._running)
