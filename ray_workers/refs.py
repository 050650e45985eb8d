"""Data in Ray's object store: how it gets in, and stand-ins that fetch it where somebody reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import ray
from ray.exceptions import ObjectStoreFullError

from areno.errors import RunError
from areno.materialize.pack import FlatPack
from areno.materialize.rollout_batch import RolloutBatch
from areno.materialize.shard import Reward, ShardOptions


@dataclass(frozen=True)
class StoredSpec:
    """What a materialize worker is made of, fetched from the object store where it is needed."""

    ref: ray.ObjectRef[tuple[Any, Reward, ShardOptions]]

    def __call__(self) -> tuple[Any, Reward, ShardOptions]:
        return ray.get(self.ref)


class RefPacks(Sequence[FlatPack]):
    """Flat packs of chunks in the object store, fetched (without a copy) only where somebody reads them here."""

    def __init__(self, chunks: Sequence[ray.ObjectRef[RolloutBatch]]) -> None:
        self.chunks = list(chunks)
        self._fetched: dict[int, FlatPack] = {}

    def __len__(self) -> int:
        return len(self.chunks)

    @overload
    def __getitem__(self, index: int) -> FlatPack: ...
    @overload
    def __getitem__(self, index: slice) -> list[FlatPack]: ...
    def __getitem__(self, index: int | slice) -> FlatPack | list[FlatPack]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index not in self._fetched:
            self._fetched[index] = FlatPack(ray.get(self.chunks[index]))
        return self._fetched[index]

    def __iter__(self) -> Iterator[FlatPack]:
        return (self[i] for i in range(len(self)))


def put(chunk: RolloutBatch) -> ray.ObjectRef[RolloutBatch]:
    """Copy a chunk into the object store once.

    Raises:
        RunError: the store is full, and so is the disk that it spills to.
    """
    try:
        return ray.put(chunk)
    except ObjectStoreFullError as error:
        free = ray.available_resources().get("object_store_memory", 0)  # type: ignore[no-untyped-call]
        raise too_small_store(chunk.nbytes, int(free), "free") from error


def too_small_store(needed: int, there: int, word: str) -> RunError:
    """The sentence about a step that the object store cannot hold."""
    return RunError(
        f"Ray's object store is too small: {needed >> 20} MiB needed, {there >> 20} MiB {word}; pass a larger "
        "--object-store-gb (object_store_memory of ray.init), or lower --batch-size or --max-new-tokens."
    )
