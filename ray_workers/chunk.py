"""What the driver knows of a rollout chunk whose tokens it never sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.materialize.rollout_batch import Int64, RolloutBatch


@dataclass(frozen=True)
class ChunkInfo:
    """What is known of a chunk without its tokens. group_tokens_G, group_sizes_G: int64 [G]."""

    group_tokens_G: Int64
    group_sizes_G: Int64

    @classmethod
    def of(cls, chunk: RolloutBatch) -> ChunkInfo:
        ends_G1 = chunk.response_offsets_N1[chunk.group_offsets_G1]
        return cls(np.diff(ends_G1), chunk.group_sizes_G)
