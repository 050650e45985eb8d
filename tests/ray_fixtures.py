"""One Ray for all tests that need one, started on this machine's CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CPUS = 8  # on paper; the actors of a test share the cores that there are


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """Ray in this process, without a dashboard. Workers get one thread each: more would only push each other aside."""
    ray = pytest.importorskip("ray")
    os.environ["OMP_NUM_THREADS"] = "1"
    # Functions of the tests are found there.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        num_cpus=CPUS,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=700 << 20,
        logging_level="error",
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def ray_materializer(ray_session: Any, tokenizer: Any) -> Iterator[Callable[..., Any]]:
    """Make a RayMaterializer, with one actor unless told otherwise; it is closed after the test."""
    from ray_workers import RayMaterializer

    made: list[Any] = []

    def start(reward: Any, **options: Any) -> Any:
        made.append(RayMaterializer(tokenizer, reward, **{"num_workers": 1, **options}))
        return made[-1]

    yield start
    for materializer in made:
        materializer.close()
