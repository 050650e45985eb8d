"""Into which shards a chunk is cut. Decided from what the step before cost; a value, not an action.

Axes: G groups of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from areno.materialize.materializer import MaterializedBatch
from areno.materialize.plan import plan_shards
from areno.materialize.rollout_batch import Float64
from ray_workers.chunk import ChunkInfo

# Cutting finer than into one shard for each idle actor only evens out their ends. That is worth a call to an actor and
# back (some milliseconds in all) for shards that take several times as long.
EVEN_OUT = 10


@dataclass(frozen=True)
class ShardCut:
    """
    workers                 actors
    shards_per_worker       how finely a chunk is cut at most
    min_shard_s             a shard that takes less costs more to send than it saves; 0 always cuts as finely as allowed
    seconds_per_token       what a response token cost in the step before; inf when that is not known
    seconds_per_completion  what scoring a completion cost beside that
    """

    workers: int
    shards_per_worker: int
    min_shard_s: float
    seconds_per_token: float = math.inf
    seconds_per_completion: float = 0.0

    def learn_from(self, batch: MaterializedBatch) -> ShardCut:
        """The same with the costs of a step that is done."""
        tokens, took = int(batch.response_lens.sum()), batch.timings
        if not tokens:
            return self
        return replace(
            self,
            seconds_per_token=(took.decode_s + took.pack_s) / tokens,
            seconds_per_completion=took.score_s / batch.num_rows,
        )

    def shards(self, chunk: ChunkInfo, idle: int) -> list[tuple[int, int, float]]:
        """First group, end and expected seconds (inf where nobody knows) of each shard, while `idle` actors have nothing
        to do."""
        if math.isinf(self.seconds_per_token):
            return [
                (a, b, math.inf) for a, b in plan_shards(chunk.group_tokens_G, self.workers * self.shards_per_worker)
            ]
        seconds_G = self._seconds(chunk)
        number = self._number(float(seconds_G.sum()), idle)
        return [(a, b, float(seconds_G[a:b].sum())) for a, b in plan_shards(seconds_G, number)]

    def _seconds(self, chunk: ChunkInfo) -> Float64:
        return chunk.group_tokens_G * self.seconds_per_token + chunk.group_sizes_G * self.seconds_per_completion

    def _number(self, seconds: float, idle: int) -> int:
        if self.min_shard_s == 0:
            return self.workers * self.shards_per_worker
        worth = int(seconds / self.min_shard_s)
        # As many for each worker, or some would wait for the others.
        rounds = min(worth // EVEN_OUT // self.workers, self.shards_per_worker)
        return max(1, min(idle, worth), rounds * self.workers)
