"""The Ray back end: materialize actors, train workers, and the executor that drives them.

`RayMaterializer` is the same materializer as `areno.materialize.LocalMaterializer`, spread over actors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areno.lazy import lazy_names

if TYPE_CHECKING:
    from ray_workers.materializer import RayMaterializer as RayMaterializer

__all__ = ["RayMaterializer"]

__getattr__ = lazy_names(__name__, {"RayMaterializer": "materializer"})
