"""One optimizer step out of any number of micro-batches.

Axes: A action sites (or [B, L-1] in a padded pack).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from areno.api.loss_fns import PolicyLoss
from areno.api.sites import predicted, trainable_sites
from areno.api.train_pack import TrainPack
from areno.config import TrainConfig
from areno.engine.logprobs import has_plain_head, site_logprobs
from areno.engine.model import Policy
from areno.engine.optimizer import MasterAdamW, learning_rate
from areno.engine.train_stats import SIZE, PackStats, combine, weighted_sums
from areno.errors import RunError

CHUNK_SITES = 1024
"""Sites whose float32 logits are alive at a time: 0.6 GB for a vocabulary of 150k."""


@dataclass(frozen=True)
class WindowCounts:
    """What one optimizer step trains on, over all workers: trainable tokens, sequences that have one, packs that have one."""

    tokens: int
    sequences: int
    packs: int


@dataclass(frozen=True)
class TrainStats:
    """Outcome of one optimizer step; the same on every worker, but for `peak_mem_gb`."""

    loss: float
    grad_norm: float
    lr: float
    peak_mem_gb: float
    stats: dict[str, float]


class GradientReducer(Protocol):
    """How the workers of one step become one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """Replace each `.grad` by its sum over all workers. Called once per step, with the same weights everywhere."""
        ...

    def sum_vector(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a float64 [N] CPU tensor over all workers."""
        ...


class LocalReducer:
    """A single worker: every sum is its own."""

    rank = 0
    world_size = 1

    def sum_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        pass

    def sum_vector(self, values: torch.Tensor) -> torch.Tensor:
        return values


class Learner:
    """Trains a policy with a policy loss."""

    def __init__(
        self,
        policy: Policy,
        train: TrainConfig,
        loss: PolicyLoss,
        *,
        temperature: float,
        reducer: GradientReducer | None = None,
    ) -> None:
        self._policy = policy
        self._train = train
        self._loss = loss
        self._temperature = temperature
        self._reducer: GradientReducer = LocalReducer() if reducer is None else reducer
        self._optimizer = MasterAdamW(policy.model.parameters(), train)
        self._plain_head = has_plain_head(policy.model)
        self._steps = 0

    def train_window(self, packs: Iterable[TrainPack], counts: WindowCounts) -> TrainStats:
        """Take one optimizer step.

        The packs are this worker's micro-batches; one without a trainable site only fills a place. Under global
        normalization their loss is divided by the count of all workers, so neither gradient nor loss depends on how
        rows are spread over packs and workers.

        Raises:
            ValueError: `counts` says that there is nothing to train on.
            RunError: a logprob, an advantage, the loss or the gradient is not finite. The weights are as before.
        """
        if min(counts.tokens, counts.sequences, counts.packs) < 1:
            raise ValueError(f"Nothing to train on: {counts}.")
        self._optimizer.zero_gradients()
        sums = torch.zeros(SIZE, dtype=torch.float64)
        fault = ""
        for number, pack in enumerate(packs):
            if fault or not bool(trainable_sites(pack).any()):
                continue
            # A fault is raised after the workers have met, or the others would wait for this one for ever.
            added, fault = self._accumulate(pack, counts, number)
            sums += added
        total = combine(self._reducer.sum_vector(sums), self._loss.denominator)
        if fault or not math.isfinite(total["loss"]):
            self._optimizer.zero_gradients()
            raise RunError(fault or "Another train worker met a loss that is not finite; the weights are as before.")
        grad_norm = self._reduce_and_clip()
        self._steps += 1
        lr = learning_rate(self._steps, self._train)
        self._optimizer.step(lr)
        self._optimizer.zero_gradients()
        return TrainStats(total.pop("loss"), grad_norm, lr, peak_memory_gb(self._policy.device), total)

    def _accumulate(self, pack: TrainPack, counts: WindowCounts, number: int) -> tuple[torch.Tensor, str]:
        """Forward and backward of one pack. Returns its sums, and a sentence if something in it is not finite."""
        device = self._policy.device
        pack = {k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in pack.items()}
        share = 1.0
        if self._train.loss_normalization == "global":
            pack["loss_denominator"] = counts.tokens if self._loss.denominator == "tokens" else counts.sequences
        else:
            share = 1.0 / counts.packs
        logprobs = site_logprobs(
            self._policy.model,
            pack,
            temperature=self._temperature,
            chunk_sites=CHUNK_SITES,
            plain_head=self._plain_head,
        )
        fault = _not_finite(pack, logprobs.detach(), number)
        if fault:
            return torch.full((SIZE,), math.nan, dtype=torch.float64), fault
        loss, stats = self._loss(pack, logprobs)
        loss = loss * share
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.collect_gradients()
        mask = trainable_sites(pack)
        # One transfer for all numbers of the pack.
        names = sorted(stats)
        values = torch.stack([loss.detach(), mask.sum(), *(stats[name] for name in names)]).double().tolist()
        if not math.isfinite(values[0]):
            fault = f"Micro-batch {number}: the loss is {values[0]}. The weights are as before."
        packed_stats = PackStats(
            loss=values[0],
            share=share,
            tokens=round(values[1]),
            sequences=torch.unique(_rows_of_sites(pack, mask)[mask]).numel(),
            stats=dict(zip(names, values[2:], strict=True)),
        )
        return weighted_sums(packed_stats, self._loss.denominator), fault

    def _reduce_and_clip(self) -> float:
        weights = self._optimizer.weights
        for weight in weights:
            if weight.grad is None:
                # A worker that had only fillers must still take part in the sum.
                weight.grad = torch.zeros_like(weight)
        self._reducer.sum_gradients(weights)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            self._optimizer.zero_gradients()
            raise RunError(
                f"The gradient's norm is {grad_norm}: the optimizer step is refused, the weights are as before."
            )
        if self._train.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(weights, self._train.grad_clip_norm, norm)
        return grad_norm


def peak_memory_gb(device: torch.device) -> float:
    """GiB: most memory that tensors held on a CUDA device, or that this process held on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device) / 2**30)
    import resource

    # In bytes on macOS, in KiB elsewhere.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _rows_of_sites(pack: TrainPack, mask: torch.Tensor) -> torch.Tensor:
    """int64, shaped as `mask`: the row of the pack that each site belongs to."""
    if "packed_seq_ids" in pack:
        ids: torch.Tensor = pack["packed_seq_ids"]
        return ids
    return torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(mask)


def _not_finite(pack: TrainPack, logprobs: torch.Tensor, number: int) -> str:
    """A sentence about the first trainable site that would poison the loss, or nothing."""
    packed = "packed_logprobs" in pack
    named = {
        "logprob under the model": logprobs,
        "rollout logprob": pack["packed_logprobs"] if packed else predicted(pack["logprobs"]),
        "advantage": pack["packed_advantages"] if packed else predicted(pack["advantages"]),
    }
    mask = trainable_sites(pack)
    for name, values in named.items():
        bad = ~values.isfinite() & mask
        if bool(bad.any()):
            row = int(_rows_of_sites(pack, mask)[bad][0])
            return f"Micro-batch {number}, row {row}: a {name} is not finite. The weights are as before."
    return ""
