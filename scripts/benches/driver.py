"""CPU time of the driver for one step over Ray, whatever the tokens: all of its threads, Ray's own among them.

The rollout lies in the object store, put there by another process, as in a run. Counted is handing it to the actors,
gathering their summaries, the advantages and the dispatch plan for eight train workers.

Whether any of it grows with the tokens is asked under equal conditions: the same number of shards, and caches that are
filled with something else before each step, as training does. Otherwise a small step would find its code and data there
from the step before, and a large one would not.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areno.materialize.plan import plan_dispatch
from benches.case import Case, compare
from benches.inputs import Size, load_tokenizer, prompt_items, write_rollout
from benches.ray import TRIVIAL
from benches.ray_session import Sampler, materializer, ray_session, submit_all
from benches.sides import AFTER, Side

TRAIN_WORKERS = 8
CACHE_FILLER = np.ones(1 << 23)  # 64 MiB
CHUNKS = 8


@dataclass(frozen=True)
class Way:
    """How a rollout comes: in how many chunks; `equal` under the equal conditions that are spoken of above."""

    chunks: int
    equal: bool

    def __str__(self) -> str:
        chunks = f"in {self.chunks} chunk{'s' if self.chunks > 1 else ''}"
        return f"{chunks}, one shard per actor, cold caches" if self.equal else chunks


# As a whole, or from eight train workers.
WAYS = (Way(1, False), Way(CHUNKS, False), Way(1, True))

# 32 groups of 8, from 390 to 31,250 tokens a completion
SIZES = {"100k": 100_000, "800k": 800_000, "4M": 4_000_000, "8M": 8_000_000}
PEER_UP_TO = 800_000


def run(rounds: int, quick: bool) -> list[Case]:
    names = list(SIZES)[:2] if quick else list(SIZES)
    sizes = {name: Size(32, 8, 1 << 16, SIZES[name]) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: write_rollout(folder, size, "deepseek") for name, size in sizes.items()}
        ours = driver_times(folder, paths, 3 * rounds)
        theirs = peer_times({n: p for n, p in paths.items() if SIZES[n] <= PEER_UP_TO}, rounds)
    cases = []
    for (name, way), turns in ours.items():
        size = sizes[name]
        cpu = [1e3 * turn[0] for turn in turns]
        main, wall = (1e3 * statistics.median(turn[i] for turn in turns) for i in (1, 2))
        note = f"CPU ms of the driver, {main:.1f} of them on its main thread; wall {wall:.1f} ms; 2 actors"
        details = {"main_thread_ms": round(main, 3), "wall_ms": round(wall, 3)}
        peer = (AFTER, theirs[name]) if name in theirs else (None, None)
        case = f"{name} {way}"
        cases.append(compare("driver", case, size.tokens, size.completions, cpu, *peer, note=note, details=details))
    return cases


def driver_times(folder: str, paths: dict[str, str], rounds: int) -> dict[tuple[str, Way], list[Any]]:
    """Seconds per step of a size that comes in a way: CPU of all threads, of the main thread, and wall."""
    reward = Path(folder, "trivial.py")
    reward.write_text(TRIVIAL)
    items = prompt_items(32)
    with (
        ray_session() as ray,
        materializer(load_tokenizer("deepseek"), str(reward), 2) as there,
    ):
        found: dict[tuple[str, Way], list[Any]] = {(name, way): [] for name in paths for way in WAYS}
        samplers = {name: ray.remote(Sampler).options(num_cpus=1).remote(path) for name, path in paths.items()}
        as_usual = there._cut
        for way in WAYS:
            one_each = replace(as_usual, shards_per_worker=1, min_shard_s=0)
            there._cut = one_each if way.equal else as_usual
            for turn in range(rounds + 3):
                for name, sampler in samplers.items():
                    step = one_step(ray, there, sampler, items, way)
                    if turn >= 3:
                        found[name, way].append(step)
        return found


def one_step(ray: Any, there: Any, sampler: Any, items: list[Any], way: Way) -> tuple[float, float, float]:
    sampled = ray.get(sampler.sample.remote(way.chunks))
    if way.equal:
        CACHE_FILLER.sum()
    wall, main, cpu = time.perf_counter(), time.thread_time(), time.process_time()
    submit_all(there, sampled, items)
    batch = there.gather()
    plan_dispatch(batch.row_lens, batch.learnable_tokens, world_size=TRAIN_WORKERS, mini_bs=4)
    return time.process_time() - cpu, time.thread_time() - main, time.perf_counter() - wall


def peer_times(paths: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time of the peer's step, all of which runs on its driver."""
    with Side(AFTER, cores=1) as side:
        found = {}
        for name, path in paths.items():
            side.ask("load", path=path, tokenizer="deepseek")
            side.ask("time")
            found[name] = [1e3 * side.ask("time")["cpu"] for _ in range(rounds)]
        return found
