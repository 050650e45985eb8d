"""What a train worker does: sample with its copy of the policy, and train on its share of a step. A plain class."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
import transformers

from areno.api.models import SamplingParams
from areno.api.train_pack import TrainPack
from areno.config import RunConfig
from areno.engine.checkpoint import save_checkpoint
from areno.engine.learner import TrainStats, WindowCounts
from areno.engine.model import resolve_device
from areno.engine.reducer import DistributedReducer, Rendezvous, join_store, open_store
from areno.engine.worker import Engine, build_engine
from areno.executor import FirstUse, TrainReport, train_report
from areno.materialize.micro_batch import gather_rows, micro_batch
from areno.materialize.pack import FlatPack
from areno.materialize.rollout_batch import RolloutBatch
from ray_workers.chunk import ChunkInfo
from ray_workers.metrics import TrainMetrics


@dataclass(frozen=True)
class MicroBatchJob:
    """Rows of one micro-batch: in which of the worker's packs each is, its position there, and its advantage."""

    pack_R: npt.NDArray[np.int32]
    row_R: npt.NDArray[np.int32]
    advantage_R: npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainJob:
    """One worker's share of a step: per optimizer step its micro-batches, and the counts over all workers."""

    windows: tuple[tuple[tuple[MicroBatchJob, ...], WindowCounts], ...]


class TrainWorker:
    """One rank. The model is loaded by `load`, not when the object is made, so that faults have an address."""

    def __init__(self, name: str, run: str, config: RunConfig, rank: int) -> None:
        self._name = name
        self._metrics = TrainMetrics(run, name)
        self._config = config
        self._rank = rank
        self._store: Any = None
        self._engine: Engine | None = None
        self._pad_id = 0

    def __repr__(self) -> str:
        return self._name

    def open_rendezvous(self) -> Rendezvous:
        """Rank 0: bind the port at which the workers meet, and hold it."""
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store, rendezvous = open_store(host, self._config.basic.world_size)
        return rendezvous

    def load(self, tokenizer: Any, rendezvous: Rendezvous) -> tuple[int, ...]:
        """Meet the other workers and load the model.

        Returns:
            The policy's end-token ids.

        Raises:
            UsageError: the checkpoint cannot be loaded here.
        """
        # Its bars would run through the driver's.
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        basic = self._config.basic
        if self._store is None:
            self._store = join_store(rendezvous, basic.world_size)
        device = resolve_device(basic.device)
        if device.type == "cuda":
            torch.cuda.set_device(0)  # Ray shows each worker its own GPU only
        reducer = DistributedReducer(self._store, rank=self._rank, world_size=basic.world_size, device=device)
        self._engine = build_engine(self._config, tokenizer, reducer)
        self._pad_id = 0 if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
        return self._engine.policy.end_token_ids

    def rollout(
        self, prompts: Sequence[Sequence[int]], prompt_indices: Sequence[int], params: SamplingParams, step: int
    ) -> tuple[RolloutBatch, ChunkInfo]:
        """Sample for prompts that fit into one call of the model; the tokens go into the object store from here."""
        began = time.monotonic()
        chunks = self._ready.rollout.generate(
            prompts, prompt_indices=prompt_indices, n_samples=self._config.basic.n_samples, params=params, step=step
        )
        chunk = RolloutBatch.concatenate(list(chunks))
        self._metrics.record_rollout(chunk.num_completions, chunk.num_response_tokens, time.monotonic() - began)
        return chunk, ChunkInfo.of(chunk)

    def train(self, job: TrainJob, *chunks: RolloutBatch) -> TrainReport:
        """Lay out this worker's micro-batches from views of the chunks, and take the step's optimizer steps.

        Raises:
            RunError: something is not finite; raised on every worker, whose weights are as before.
        """
        began = time.monotonic()
        packs = [FlatPack(chunk) for chunk in chunks]
        first_forward = FirstUse()
        results: list[TrainStats] = []
        for micro_batches, counts in job.windows:
            laid_out = first_forward.of(self._lay_out(micro_batches, packs))
            results.append(self._ready.learner.train_window(laid_out, counts))
        self._metrics.record_train(time.monotonic() - began)
        return train_report(results, first_forward.at)

    def _lay_out(self, micro_batches: Sequence[MicroBatchJob], packs: Sequence[FlatPack]) -> Iterator[TrainPack]:
        for job in micro_batches:
            places = zip(job.pack_R.tolist(), job.row_R.tolist(), strict=True)
            rows = gather_rows(packs, places, job.advantage_R.tolist(), [True] * job.row_R.size)
            yield micro_batch(rows, layout=self._config.train.pack_layout, pad_id=self._pad_id)

    def save(self, path: Path) -> Path:
        """Write a checkpoint; all ranks have the same weights, so one of them does."""
        return save_checkpoint(self._ready.policy, path)

    def weights_digest(self) -> str:
        """A digest of the exact bits of all weights, to see that workers agree."""
        import hashlib

        digest = hashlib.sha256()
        for name, weight in sorted(self._ready.policy.model.named_parameters()):
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def _ready(self) -> Engine:
        assert self._engine is not None, "load() comes first"
        return self._engine
