"""How both kinds of actors of a run are made and ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray

# Processes start slowly on a busy machine, and import torch.
START_TIMEOUT_S = 300.0


def start_actor(kind: type, name: str, run: str, options: dict[str, Any], *arguments: Any) -> Any:
    """An actor around `kind(name, run, *arguments)`, in the run's namespace.

    Args:
        options: passed to Ray (CPUs, GPUs, other resources, scheduling).
    """
    actor: Any = ray.remote(kind)
    return actor.options(name=name, namespace=f"areno-{run}", **options).remote(name, run, *arguments)


def end_actors(actors: Iterable[Any]) -> None:
    """Kill them, unless Ray has gone already and they with it."""
    if ray.is_initialized():
        for actor in actors:
            ray.kill(actor)
