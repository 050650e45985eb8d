"""What a step costs on a node with eight GPUs, from unit costs measured here; and how far such predictions are off here.

The model: the train workers put their chunks into the object store side by side; actors take shards as they become free
(token path, scoring, a fixed cost per shard); the driver serves one shard after the other; each train worker lays out
its own micro-batches. Nothing overlaps with the rollout, so this is the worst case of the gap.
"""

from __future__ import annotations

import heapq
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areno.materialize import LocalMaterializer, RolloutBatch
from benches.case import Case, compare
from benches.inputs import Size, load_tokenizer, prompt_items, rollout_arrays
from benches.ray import BUSY, TRIVIAL
from benches.ray_session import materializer, ray_session, warm_up
from ray_workers.chunk import ChunkInfo
from ray_workers.shard_cut import MIN_SHARD_S, SHARDS_PER_WORKER, ShardCut

GPUS = 8
REWARDS_S = (0.0, 0.005, 0.05, 0.5)
BUSY_S = 0.005


@dataclass(frozen=True)
class Units:
    """Seconds. `token` is an actor's or the local work on a response token, `store` what Ray adds to it, `put` the copy
    into the store, `layout` the micro-batches; `sample` scoring without the hook; `shard` a shard's way to an actor and
    back, `driver` the driver's part of it; `start` what every step over Ray costs."""

    token: float
    store: float
    put: float
    layout: float
    sample: float
    shard: float
    driver: float
    start: float


@dataclass(frozen=True)
class Step:
    """Seconds of each part of a step, and of the whole."""

    put: float
    actors: float
    driver: float
    layout: float
    total: float
    binds: str


def local_step(units: Units, size: Size, reward_s: float) -> float:
    return size.tokens * (units.token + units.layout) + size.completions * (units.sample + reward_s)


def ray_step(units: Units, size: Size, reward_s: float, *, actors: int, cores: int, trainers: int) -> Step:
    """A step through `actors`, its chunks put and its micro-batches laid out by `trainers` at a time."""
    cut = ShardCut(actors, SHARDS_PER_WORKER, MIN_SHARD_S, units.token + units.store, units.sample + reward_s)
    groups_G = np.full(size.groups, size.tokens // size.groups), np.full(size.groups, size.samples)
    shards = len(cut.shards(ChunkInfo(*groups_G), idle=actors))
    tokens_s = size.tokens / shards * (units.token + units.store)
    scoring_s = size.completions / shards * (units.sample + reward_s)
    work = tokens_s + scoring_s + (units.shard - units.driver)
    busy = [0.0] * actors
    for _ in range(shards):
        heapq.heappush(busy, heapq.heappop(busy) + work)
    driver = shards * units.driver
    # Where actors and the driver have to share cores, all their work is spread over these.
    spread = (shards * work + driver) / cores
    middle = max(max(busy), driver, spread) + units.start
    put, layout = size.tokens * units.put / trainers, size.tokens * units.layout / trainers
    parts = {
        "reward calls": scoring_s * shards / actors,
        "token path of the actors": tokens_s * shards / actors,
        "driver and Ray calls": driver + units.start + (units.shard - units.driver) * shards / actors,
        "copies into the store": put,
        "layout of micro-batches": layout,
    }
    return Step(put, max(busy), driver, layout, put + middle + layout, max(parts, key=lambda name: parts[name]))


def run(rounds: int, quick: bool) -> list[Case]:
    tokenizer = load_tokenizer("deepseek")
    scale = 4 if quick else 1
    with tempfile.TemporaryDirectory() as folder, ray_session():
        trivial, busy = Path(folder, "trivial.py"), Path(folder, "busy.py")
        trivial.write_text(TRIVIAL)
        busy.write_text(BUSY)
        units = measure_units(tokenizer, str(trivial), Size(32, 8, 4096, 800_000 // scale), 2 * rounds)
        checks = check(units, tokenizer, str(trivial), str(busy), scale, rounds)
    return [*checks, *forecast(units)]


def measure_units(tokenizer: Any, reward: str, size: Size, rounds: int) -> Units:
    rollout = RolloutBatch(**rollout_arrays(size, "deepseek"))
    items = prompt_items(size.groups)
    with LocalMaterializer(tokenizer, reward, text="raw") as local:
        batch = local.materialize(rollout, items)
        sample = batch.timings.score_s / size.completions
        whole = median_s(lambda: local.materialize(rollout, items), rounds)
        layout = median_s(lambda: [None for _ in batch.train_packs(8)], rounds) / size.tokens
    token = (whole - sample * size.completions) / size.tokens
    with materializer(tokenizer, reward, 1) as one:
        few, many = empty_step(4), empty_step(32)
        as_usual = one._cut
        one._cut = replace(as_usual, shards_per_worker=32, min_shard_s=0)
        times, driver = {}, {}
        for groups, (nothing, its_items) in ((4, few), (32, many)):
            main = time.thread_time()
            times[groups] = median_s(lambda r=nothing, i=its_items: one.materialize(r, i), 3 * rounds)
            driver[groups] = (time.thread_time() - main) / (3 * rounds + 1)
        shard = max((times[32] - times[4]) / 28 - sample, 1e-5)
        start = max(times[4] - 4 * (shard + sample), 0.0)
        one._cut = replace(as_usual, shards_per_worker=SHARDS_PER_WORKER, min_shard_s=0)
        import ray

        warm_up(lambda: one.materialize(rollout, items))
        put = median_s(lambda: ray.put(rollout), rounds) / size.tokens
        through = median_s(lambda: one.materialize(rollout, items), rounds)
    rest = through - start - SHARDS_PER_WORKER * shard - sample * size.completions
    store = max(rest / size.tokens - put - token, 0.0)
    return Units(token, store, put, layout, sample, shard, min(max(driver[32] - driver[4], 0.0) / 28, shard), start)


def empty_step(groups: int) -> tuple[RolloutBatch, list[Any]]:
    """A step of one completion of one token per group."""
    one = np.ones(1, dtype=np.int32)
    rows = [[one]] * groups
    return RolloutBatch.from_rows([one] * groups, rows, [[-np.ones(1, dtype=np.float32)]] * groups), prompt_items(
        groups
    )


def median_s(call: Callable[[], Any], rounds: int) -> float:
    return statistics.median(seconds(call, rounds))


def seconds(call: Callable[[], Any], rounds: int) -> list[float]:
    """Of each round, after one to warm up."""
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def check(units: Units, tokenizer: Any, trivial: str, busy: str, scale: int, rounds: int) -> list[Case]:
    """Predictions for steps that the unit costs were not measured on, against the steps themselves."""
    cores = len(os.sched_getaffinity(0))
    large, slow = Size(40, 8, 4096, 1_000_000 // scale), Size(32, 8, 4096, 100_000 // scale)
    cases = []
    for name, size, reward, reward_s in (
        ("trivial reward", large, trivial, 0.0),
        ("reward of 5 ms", slow, busy, BUSY_S),
    ):
        rollout, items = RolloutBatch(**rollout_arrays(size, "deepseek")), prompt_items(size.groups)
        for actors in (0, 1, 2):
            if actors == 0:
                there: Any = LocalMaterializer(tokenizer, reward, text="raw")
                predicted = local_step(units, size, reward_s)
            else:
                there = materializer(tokenizer, reward, actors)
                predicted = ray_step(units, size, reward_s, actors=actors, cores=cores, trainers=1).total
            with there:
                warm_up(lambda t=there, r=rollout, i=items: one_step(t, r, i))
                measured = [1e3 * s for s in seconds(lambda t=there, r=rollout, i=items: one_step(t, r, i), rounds)]
            off = 1e3 * predicted / statistics.median(measured) - 1
            where = f"{actors} actor{'s' if actors > 1 else ''}" if actors else "local"
            note = (
                f"predicted {1e3 * predicted:.1f} ms, {off:+.0%}; {'within' if abs(off) <= 0.25 else 'NOT within'} 25 %"
            )
            details = {"predicted_ms": round(1e3 * predicted, 3), "off": round(off, 3)}
            label = f"check: {size.tokens:,} tokens, {name}, {where}"
            cases.append(
                compare("simulate", label, size.tokens, size.completions, measured, note=note, details=details)
            )
    return cases


def one_step(there: Any, rollout: RolloutBatch, items: list[Any]) -> None:
    for _ in there.materialize(rollout, items).train_packs(8):
        pass


def forecast(units: Units) -> list[Case]:
    """Steps on eight GPUs. One core each is left to the train workers and one to the driver."""
    cases = []
    for size in (Size(32, 8, 4096, 1_000_000), Size(320, 8, 4096, 10_000_000)):
        for cores in (16, 32, 64):
            actors = cores - GPUS - 1
            for reward_s in REWARDS_S:
                step = ray_step(units, size, reward_s, actors=actors, cores=actors + 1, trainers=GPUS)
                label = f"{size.tokens // 10**6}M tokens, {cores} cores, reward of {1e3 * reward_s:g} ms"
                details = {
                    "actors": actors,
                    "binds": step.binds,
                    "units_us": {k: 1e6 * v for k, v in vars(units).items()},
                    "local_ms": round(1e3 * local_step(units, size, reward_s), 1),
                }
                note = f"predicted for {actors} actors; binds: {step.binds}"
                times = [1e3 * step.total]
                cases.append(
                    compare("simulate", label, size.tokens, size.completions, times, note=note, details=details)
                )
    return cases
