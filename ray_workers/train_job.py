"""Who trains on what, as messages: a dispatch plan becomes one job per train worker and the chunks that each needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.executor import window_counts
from areno.materialize.materializer import MaterializedBatch
from areno.materialize.micro_batch import places_of
from areno.materialize.plan import DispatchPlan
from areno.materialize.rollout_batch import Int64
from ray_workers.train_worker import MicroBatchJob, TrainJob


@dataclass(frozen=True)
class WorkerOrder:
    """A worker's job and the positions (in the batch's `flat_packs`) of the chunks that it reads, in the job's numbering."""

    job: TrainJob
    chunks: tuple[int, ...]


def train_orders(plan: DispatchPlan, batch: MaterializedBatch, world_size: int) -> list[WorkerOrder]:
    """One order per worker. Its size depends on the number of rows, not of tokens."""
    orders = []
    for worker in range(world_size):
        needed: dict[int, int] = {}  # position of a pack -> its number in this worker's job
        windows = tuple(
            (
                tuple(_micro_batch_job(rows, batch, needed) for rows in window.micro_batches[worker]),
                window_counts(window),
            )
            for window in plan.windows
        )
        orders.append(WorkerOrder(TrainJob(windows), tuple(needed)))
    return orders


def _micro_batch_job(rows: Int64, batch: MaterializedBatch, needed: dict[int, int]) -> MicroBatchJob:
    places = places_of(rows, batch.pack_offsets)
    return MicroBatchJob(
        pack_R=np.array([needed.setdefault(pack, len(needed)) for pack, _ in places], dtype=np.int32),
        row_R=np.array([row for _, row in places], dtype=np.int32),
        advantage_R=batch.advantages[rows],
    )
