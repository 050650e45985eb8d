"""Memory: what a step takes at its peak over the rollout itself, and what it takes of Ray's object store."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benches.case import Case, compare
from benches.driver import CHUNKS, SIZES
from benches.inputs import Size, load_tokenizer, prompt_items, size_of, write_rollout
from benches.ray import TRIVIAL
from benches.ray_session import Sampler, materializer, ray_session, submit_all
from benches.sides import PEERS, Side

MIB = 1 << 20
STORE_BAR = 17.0  # bytes a response token at the peak, plus prompts


def run(rounds: int, quick: bool) -> list[Case]:
    with tempfile.TemporaryDirectory() as folder:
        names = ("100k",) if quick else ("100k", "800k", "8M")
        cases = [case for name in names for case in process_peak(folder, name)]
        names = list(SIZES)[:2] if quick else list(SIZES)
        paths = {name: write_rollout(folder, Size(32, 8, 1 << 16, SIZES[name]), "deepseek") for name in names}
        return [*cases, *store_peaks(folder, paths, rounds)]


def process_peak(folder: str, name: str) -> list[Case]:
    """Peak of the first step in a fresh process, over what was resident when the rollout's arrays had been read."""
    size = size_of(name)
    path = write_rollout(folder, size, "deepseek")
    found = {}
    for who in ("ours", *PEERS):
        with Side(who, cores=1) as side:
            side.ask("load", path=path, tokenizer="deepseek")
            found[who] = side.ask("memory")
    cases = []
    for peer in PEERS:
        ours_b, peer_b = (found[who]["mib"] * MIB / size.tokens for who in ("ours", peer))
        note = f"bytes a token at the peak: ours {ours_b:.0f}, theirs {peer_b:.0f} (times are of a first step)"
        details = {"ours_bytes_per_token": round(ours_b, 1), "peer_bytes_per_token": round(peer_b, 1)}
        times = [1e3 * found["ours"]["wall"]], peer, [1e3 * found[peer]["wall"]]
        case = f"peak of the process, {name}"
        cases.append(compare("memory", case, size.tokens, size.completions, *times, note=note, details=details))
    return cases


def store_peaks(folder: str, paths: dict[str, str], rounds: int) -> list[Case]:
    """Object-store bytes over a step whose chunks were put there by another process."""
    reward = Path(folder, "trivial.py")
    reward.write_text(TRIVIAL)
    items = prompt_items(32)
    cases = []
    with ray_session() as ray, materializer(load_tokenizer("deepseek"), str(reward), 2) as there:
        for name, path in paths.items():
            sampler = ray.remote(Sampler).options(num_cpus=1).remote(path)
            turns = [store_step(ray, there, sampler, items) for _ in range(rounds)]
            ray.kill(sampler)
            tokens = SIZES[name]
            peak = max(turn["peak"] for turn in turns) / tokens
            end = max(turn["end"] for turn in turns) / tokens
            reached = "within" if peak <= STORE_BAR else "OVER"
            note = (
                f"object-store bytes a response token: peak {peak:.2f}, at the end {end:.2f}; {reached} {STORE_BAR:g}"
            )
            details = {"peak_bytes_per_token": round(peak, 3), "end_bytes_per_token": round(end, 3)}
            times = [1e3 * turn["wall"] for turn in turns]
            cases.append(compare("memory", f"object store, {name}", tokens, 256, times, note=note, details=details))
    return cases


def store_step(ray: Any, there: Any, sampler: Any, items: list[Any]) -> dict[str, float]:
    empty = settled_bytes()
    seen = [0]
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(store_bytes())

    watcher = threading.Thread(target=look)
    sampled = ray.get(sampler.sample.remote(CHUNKS))
    watcher.start()
    began = time.perf_counter()
    submit_all(there, sampled, items)
    batch = there.gather()
    wall = time.perf_counter() - began
    end = settled_bytes()
    done.set()
    watcher.join()
    del batch
    return {"peak": max(seen) - empty, "end": end - empty, "wall": wall}


def store_bytes() -> int:
    """Bytes that objects hold in this node's store."""
    import ray
    from ray._private.internal_api import node_stats

    node = ray.nodes()[0]
    stats = node_stats(node_manager_address=node["NodeManagerAddress"], node_manager_port=node["NodeManagerPort"])
    return int(stats.store_stats.object_store_bytes_used)


def settled_bytes() -> int:
    """The same, after the time that Ray takes to free what nobody refers to any more."""
    time.sleep(0.7)
    return store_bytes()
