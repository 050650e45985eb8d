"""Into how many shards a chunk is cut. Decided from what the step before cost; a value, not an action."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Cutting finer than into one shard for each idle actor only evens out their ends. That is worth a call to an actor and
# back (some milliseconds in all) for shards that take several times as long.
EVEN_OUT = 10


@dataclass(frozen=True)
class ShardCut:
    """
    workers            actors
    shards_per_worker  how finely a chunk is cut at most
    min_shard_s        a shard that takes less costs more to send than it saves; 0 always cuts as finely as allowed
    seconds_per_token  what a response token cost in the step before, scoring included; inf when it is not known
    """

    workers: int
    shards_per_worker: int
    min_shard_s: float
    seconds_per_token: float = math.inf

    def seconds(self, tokens: int) -> float:
        """How long so many response tokens are expected to take."""
        return self.seconds_per_token * max(tokens, 1)

    def shards(self, tokens: int, idle: int) -> int:
        """For a chunk of so many response tokens, while so many actors have nothing to do."""
        finest = self.workers * self.shards_per_worker
        seconds = self.seconds(tokens)
        if self.min_shard_s == 0 or math.isinf(seconds):
            return finest
        worth = int(seconds / self.min_shard_s)
        return max(1, min(idle, worth), min(finest, worth // EVEN_OUT))
