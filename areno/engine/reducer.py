"""Several train workers as one, over torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Gradients go over the wire in flat buckets: few calls, and no second copy of the whole gradient.
BUCKET_BYTES = 64 << 20

# A worker that died is reported by Ray at once; this only bounds how long the others sit in a collective.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Rendezvous:
    """Where the workers of a run meet. The port is bound by the store of rank 0 from the moment it is chosen."""

    host: str
    port: int


class DistributedReducer:
    """See `areno.engine.learner.GradientReducer`. Sums are the same bits on every worker."""

    def __init__(self, store: TCPStore, *, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)

    def sum_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """Replace each `.grad` by its sum over all workers; a missing gradient counts as zeros."""
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for bucket in buckets(gradients, BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
            dist.all_reduce(flat)
            totals = _unflatten_dense_tensors(flat, bucket)  # type: ignore[no-untyped-call]
            for gradient, total in zip(bucket, totals, strict=True):
                gradient.copy_(total)

    def sum_vector(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a float64 [N] CPU tensor over all workers."""
        total = values.to(self._device, copy=True)
        dist.all_reduce(total)
        return total.cpu()

    def close(self) -> None:
        dist.destroy_process_group()


def open_store(host: str, world_size: int) -> tuple[TCPStore, Rendezvous]:
    """The store of rank 0, on a port that the system chooses and that is held from then on."""
    store = TCPStore(host, 0, world_size, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    return store, Rendezvous(host, store.port)


def join_store(rendezvous: Rendezvous, world_size: int) -> TCPStore:
    """The store of another rank."""
    return TCPStore(rendezvous.host, rendezvous.port, world_size, is_master=False, timeout=TIMEOUT)


def buckets(tensors: Sequence[torch.Tensor], limit_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one type, of about `limit_bytes` each, in order."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and (size + nbytes > limit_bytes or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        yield bucket
