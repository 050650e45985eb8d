"""Ray itself: started on this machine or joined, checked for what is asked of it, and taken down only if it is ours."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from areno.errors import UsageError

try:
    import ray
except ImportError as error:
    raise UsageError("Ray is not installed; run `pip install 'areno-ray[ray]'`.") from error

SHM = Path("/dev/shm")

# Docker gives 64 MB of /dev/shm by default; below this the store is better kept in a file.
SMALL_SHM_BYTES = 256 << 20

GIB = 1 << 30

FREE_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ClusterOptions:
    """How to get hold of Ray. `address` None starts it here; `object_store_bytes` None leaves the size to Ray."""

    address: str | None = None
    object_store_bytes: int | None = None
    dashboard: bool = False
    num_cpus: int | None = None


@dataclass(frozen=True)
class Resources:
    """What the cluster has in all."""

    cpus: float
    gpus: float
    object_store_bytes: int


@dataclass(frozen=True)
class ActorPlan:
    """How many materialize actors there will be, and what each kind of actor reserves."""

    materialize_workers: int
    materialize_cpus: float
    train_cpus: float
    train_gpus: float
    notes: tuple[str, ...]


class Cluster:
    """A connection to Ray. A context manager that shuts down what it started and nothing else."""

    def __init__(self, owned: bool, notes: tuple[str, ...] = (), dashboard_url: str | None = None) -> None:
        self.owned = owned
        self.notes = notes
        self.dashboard_url = dashboard_url

    @classmethod
    def connect(cls, options: ClusterOptions = ClusterOptions()) -> Cluster:
        """Use the Ray of this process, join the one at `address` (or RAY_ADDRESS), or start one here.

        Raises:
            UsageError: the address does not answer, Ray's removed local mode is asked for, or Ray cannot start.
        """
        if os.environ.get("RAY_LOCAL_MODE", "0") not in ("", "0"):
            raise UsageError("RAY_LOCAL_MODE is set, but Ray's local mode is gone: use --materialize-backend local.")
        if ray.is_initialized():
            return cls(owned=False)
        address = options.address or os.environ.get("RAY_ADDRESS")
        arguments: dict[str, Any] = {
            "namespace": f"areno-{uuid.uuid4().hex[:8]}",
            "logging_level": logging.ERROR,
        }
        if address and address != "local":
            _check_answers(address)
            context = _init(f"the Ray cluster at {address} cannot be joined", address=address, **arguments)
            ignored = "--object-store-gb has no effect: the Ray cluster that was joined has a store of its own."
            notes = (ignored,) if options.object_store_bytes else ()
            return cls(owned=True, notes=notes, dashboard_url=context.dashboard_url)
        shm_bytes = shutil.disk_usage(SHM).total if SHM.is_dir() else 0
        in_file = shm_bytes < max(SMALL_SHM_BYTES, options.object_store_bytes or 0)
        if in_file:
            arguments["_plasma_directory"] = "/tmp"
        context = _init(
            "Ray could not be started on this machine",
            address="local",
            num_cpus=options.num_cpus,
            object_store_memory=options.object_store_bytes,
            include_dashboard=options.dashboard,
            **arguments,
        )
        notes = (small_shm_note(shm_bytes),) if in_file else ()
        return cls(owned=True, notes=notes, dashboard_url=context.dashboard_url if options.dashboard else None)

    def resources(self) -> Resources:
        """Sums over all nodes."""
        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return Resources(total.get("CPU", 0.0), total.get("GPU", 0.0), int(total.get("object_store_memory", 0)))

    def close(self) -> None:
        if self.owned and ray.is_initialized():
            ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plan_actors(have: Resources, *, train_workers: int, materialize_workers: int | None, on_gpu: bool) -> ActorPlan:
    """Decide what the actors reserve. On few CPUs they share them: materializing and training mostly take turns.

    Args:
        train_workers: 0 where only the materializer runs.
        materialize_workers: None takes the CPUs that the train workers leave, at least one.

    Raises:
        UsageError: more train workers than GPUs or CPUs.
    """
    cpus = math.floor(have.cpus)
    if on_gpu and train_workers > have.gpus:
        raise UsageError(f"--world-size {train_workers} needs as many GPUs, and Ray has {have.gpus:g}: lower it.")
    if not on_gpu and train_workers > max(cpus, 1):
        raise UsageError(f"--world-size {train_workers} needs as many CPUs, and Ray has {cpus}: lower it.")
    notes: tuple[str, ...] = ()
    wanted = max(cpus - train_workers, 1) if materialize_workers is None else materialize_workers
    if wanted > max(cpus, 1):
        notes = (f"--materialize-workers {wanted} reduced to {max(cpus, 1)}: Ray has {cpus} CPUs.",)
        wanted = max(cpus, 1)
    share = share_of(have.cpus, wanted + train_workers)
    return ActorPlan(wanted, share, share, 1.0 if on_gpu and train_workers else 0.0, notes)


def share_of(cpus: float, actors: int) -> float:
    """CPUs that each actor reserves: one, or an even share. Rounded down, so that all shares never exceed the whole."""
    return min(1.0, math.floor(100 * cpus / actors) / 100)


def demand_of(actor_options: Mapping[str, Any], count: int) -> dict[str, float]:
    """What `count` actors with these Ray options reserve together."""
    each = {
        "CPU": actor_options.get("num_cpus") or 0.0,
        "GPU": actor_options.get("num_gpus") or 0.0,
        **(actor_options.get("resources") or {}),
    }
    return {name: count * amount for name, amount in each.items() if amount > 0}


def check_free(*demands: Mapping[str, float]) -> None:
    """Actors that find no room wait for it without a word, so the room is looked for before they are made.

    Raises:
        UsageError: others hold what is asked for, or no node has it; named with what is free.
    """
    total: Counter[str] = Counter()  # of floats
    for demand in demands:
        total.update(demand)
    deadline = time.monotonic() + FREE_TIMEOUT_S  # what a run before this one held comes back with a delay
    while True:
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        lacking = [name for name, amount in total.items() if free.get(name, 0.0) + 1e-3 < amount]
        if not lacking:
            return
        if time.monotonic() > deadline:
            said = ", ".join(f"{total[name]:g} {name} ({free.get(name, 0.0):g} free)" for name in sorted(lacking))
            raise UsageError(
                f"the actors need {said} and Ray cannot give it: lower --world-size or --materialize-workers, or wait "
                "until other jobs of the cluster have ended (`ray status`)."
            )
        time.sleep(0.2)


def check_store(step_bytes: int, store_bytes: int) -> None:
    """
    Raises:
        UsageError: the longest step that the options allow does not fit into the object store.
    """
    if step_bytes > store_bytes:
        raise UsageError(
            f"a step of the longest completions needs {step_bytes / GIB:.2f} GiB in Ray's object store, which has "
            f"{store_bytes / GIB:.2f} GiB: pass --object-store-gb {math.ceil(20 * step_bytes / GIB) / 10:g}, "
            "or lower --batch-size, --n-samples or --max-new-tokens."
        )


def small_shm_note(shm_bytes: int) -> str:
    """The one line about a /dev/shm that cannot hold the object store."""
    return (
        f"/dev/shm has {shm_bytes >> 20} MiB, too little for Ray's object store, which is kept in /tmp instead (slower); "
        "in Docker, pass --shm-size=8g."
    )


# What opens an HTTP/2 connection, and an empty SETTINGS frame; a gRPC server answers with a SETTINGS frame of its own.
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def _check_answers(address: str) -> None:
    """Ray waits very long for a dead address, and on one where something else listens it ends the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # "auto", or a form that Ray knows
        return
    problem = ""
    try:
        with socket.create_connection((host, int(port)), timeout=JOIN_TIMEOUT_S) as connection:
            connection.sendall(HTTP2_HELLO)
            if connection.recv(9)[3:4] != bytes([4]) and not os.environ.get("RAY_USE_TLS"):
                problem = "what listens there is something else"
    except OSError as error:
        problem = str(error)
    if problem:
        raise UsageError(
            f"no Ray cluster answers at {address} ({problem}): check --ray-address or RAY_ADDRESS, or leave both out to "
            "start Ray here."
        )


@contextmanager
def _own_sigterm_kept() -> Iterator[None]:
    """Ray puts handlers for SIGTERM of its own in place. Who has chosen one keeps it, and cleans up by leaving `with`."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        chosen = callable(before) and not getattr(before, "__module__", "").startswith("ray.")
        if chosen and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _init(problem: str, **arguments: Any) -> Any:
    try:
        with _own_sigterm_kept():
            return ray.init(**arguments)
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise UsageError(f"{problem} ({' '.join(str(error).split())[:300]}).") from error
