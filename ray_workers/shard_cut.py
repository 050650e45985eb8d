"""Into which shards a chunk is cut. Decided from what the step before cost; a value, not an action.

Axes: G groups of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from areno.materialize.materializer import MaterializedBatch
from areno.materialize.plan import plan_shards
from ray_workers.chunk import ChunkInfo

SHARDS_PER_WORKER, MIN_SHARD_S = 4, 0.005

# Cutting finer than into one shard for each idle actor evens out what nobody can foresee, which is how long reward calls
# take. That is worth a call to an actor and back for shards whose scoring takes several times as long.
EVEN_OUT = 4


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
        scoring_G = chunk.group_sizes_G * self.seconds_per_completion
        seconds_G = chunk.group_tokens_G * self.seconds_per_token + scoring_G
        number = self._number(float(seconds_G.sum()), float(scoring_G.sum()), idle)
        return [(a, b, float(seconds_G[a:b].sum())) for a, b in plan_shards(seconds_G, number)]

    def _number(self, seconds: float, scoring: float, idle: int) -> int:
        if self.min_shard_s == 0:
            return self.workers * self.shards_per_worker
        to_spread = min(idle, int(seconds / self.min_shard_s))
        # As many for each worker, or some would wait for the others.
        each = min(int(scoring / (EVEN_OUT * self.min_shard_s)) // self.workers, self.shards_per_worker)
        return max(1, to_spread, each * self.workers)
