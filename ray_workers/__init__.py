"""The Ray back end: materialize actors, train workers, and the executor that drives them.

`RayMaterializer` is the same materializer as `areno.materialize.LocalMaterializer`, spread over actors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_workers.materializer import RayMaterializer as RayMaterializer

__all__ = ["RayMaterializer"]


def __getattr__(name: str) -> Any:
    if name == "RayMaterializer":
        from ray_workers.materializer import RayMaterializer

        return RayMaterializer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
