"""Which shard goes to which actor, and what is still out: the bookkeeping of `RayMaterializer`.

Work goes to whoever has the least to do. Each actor has at least one shard waiting behind the one it works on, so that it
never idles for the time of a round trip to the driver, and cheap shards go out ahead, so that the driver need not wake up
for each.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from areno.errors import RunError
from ray_workers.calls import span_of

Payload = TypeVar("Payload")

DEPTH = 2

AHEAD_S = 0.2
"""Work that an actor may have before it. Within this time, how evenly shards are spread hardly matters."""


@dataclass(frozen=True, eq=False)
class Shard(Generic[Payload]):
    """A shard on its way. `first_group` is its identity in the step, `seconds` how long it is expected to take (inf where
    nobody knows), `tries` how many workers died working on it."""

    first_group: int
    num_groups: int
    payload: Payload
    seconds: float = math.inf
    tries: int = 0


class ShardQueue(Generic[Payload]):
    """Pending and running shards over a fixed number of workers."""

    def __init__(self, num_workers: int, *, max_tries: int = 3) -> None:
        self._pending: deque[Shard[Payload]] = deque()
        self._running: list[list[Shard[Payload]]] = [[] for _ in range(num_workers)]
        self._max_tries = max_tries

    def __len__(self) -> int:
        """Shards that wait for a worker."""
        return len(self._pending)

    @property
    def idle(self) -> int:
        """Workers that have nothing to do and for whom nothing waits."""
        return max(sum(not shards for shards in self._running) - len(self._pending), 0)

    def add(self, shard: Shard[Payload]) -> None:
        self._pending.append(shard)

    def assign(self) -> tuple[int, Shard[Payload]] | None:
        """The next shard and the worker that takes it, or None if there is no shard or every worker has its fill."""
        if not self._pending:
            return None
        ahead = [sum(shard.seconds for shard in shards) for shards in self._running]
        due = [w for w, shards in enumerate(self._running) if len(shards) < DEPTH] or range(len(ahead))
        worker = min(due, key=lambda w: (ahead[w], len(self._running[w])))
        if len(self._running[worker]) >= DEPTH and ahead[worker] + self._pending[0].seconds > AHEAD_S:
            return None
        shard = self._pending.popleft()
        self._running[worker].append(shard)
        return worker, shard

    def finished(self, worker: int, shard: Shard[Payload]) -> None:
        """A worker has returned a shard."""
        self._running[worker].remove(shard)

    def lost(self, worker: int, shard: Shard[Payload], cause: str, *, guilty: bool) -> None:
        """A worker died with a shard: it goes to the front again, but only so many times if it was `guilty`, being the one
        that the worker worked on.

        Raises:
            RunError: the shard has been lost too often; its prompts are named.
        """
        self._running[worker].remove(shard)
        tries = shard.tries + guilty
        if tries >= self._max_tries:
            prompts = span_of("prompt", shard.first_group, shard.first_group + shard.num_groups)
            raise RunError(f"the materialize worker died {tries} times on {prompts} ({cause}): reward calls kill it.")
        self._pending.appendleft(replace(shard, tries=tries))

    def drop_after(self, first_group: int) -> None:
        """Forget pending shards behind this one: the step is going to be refused."""
        self._pending = deque(s for s in self._pending if s.first_group < first_group)

    def clear(self) -> None:
        self._pending.clear()
        self._running = [[] for _ in self._running]
