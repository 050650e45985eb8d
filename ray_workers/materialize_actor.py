"""What a materialize actor does. A plain class: `ray.remote` is put around it where actors are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areno.api.data import PromptItem
from areno.materialize.rollout_batch import RolloutBatch
from areno.materialize.shard import Reward, ShardMaterializer, ShardOptions, ShardSummary, ShardTask
from ray_workers.metrics import ShardMetrics

LightItem = tuple[str, list[str] | None, dict[str, Any]]
"""Prompt, solutions and record of a `PromptItem`."""


@dataclass(frozen=True)
class ShardOrder:
    """Which groups of a chunk to materialize. Small: the tokens are in the chunk.

    `first_group` and `num_texts` as in `ShardTask`; `start` and `stop` are group positions in the chunk; `items` are the
    groups' prompt items as `light` makes them.
    """

    start: int
    stop: int
    items: tuple[LightItem, ...]
    first_group: int
    num_texts: int


class MaterializeWorker:
    """Runs shards one after the other. Everything it needs comes as values, so that it works on any node."""

    def __init__(self, name: str, run: str, spec: Callable[[], tuple[Any, Reward, ShardOptions]]) -> None:
        self._name = name
        self._run = run
        self._spec = spec
        self._shards: ShardMaterializer | None = None
        self._metrics: ShardMetrics | None = None

    def __repr__(self) -> str:
        return self._name

    def ready(self) -> int:
        """Load the reward file and build the decoder, which a restarted actor does again at its first shard.

        Returns:
            The process id.

        Raises:
            UsageError: the reward file cannot be used here.
        """
        if self._shards is None:
            self._shards = ShardMaterializer(*self._spec())
            self._metrics = ShardMetrics(self._run, self._name)
        return os.getpid()

    def run(self, chunk: RolloutBatch, order: ShardOrder) -> ShardSummary:
        """Materialize a run of the chunk's groups; the arrays are views of the object store."""
        self.ready()
        assert self._shards is not None
        assert self._metrics is not None
        items = tuple(PromptItem(prompt, solutions, (), record) for prompt, solutions, record in order.items)
        task = ShardTask(chunk.groups(order.start, order.stop), items, order.first_group, order.num_texts)
        summary = self._shards.run(task)
        self._metrics.record(summary)
        return summary


def light(items: Sequence[PromptItem]) -> tuple[LightItem, ...]:
    """Prompt items without their token ids, which are in the rollout already, and as tuples, which are sent in a tenth of
    the time."""
    return tuple((item.prompt, item.solutions, item.record) for item in items)
