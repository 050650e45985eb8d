"""The two sides' part of each comparison, on the same arrays: flat rollout to ready micro-batches, and its pieces.

Every method is called by name over `benches.side` and returns something that JSON can carry.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from benches.inputs import load_tokenizer, prompt_items, trivial_reward
from benches.memory_of_process import forget_peak, peak_mib, resident_mib
from benches.profiling import hot_spots

MINI_BS = 8


def make_contender(who: str) -> Contender:
    return {"ours": Ours, "areno 0.0.3": ArenoBefore, "areno 0.10.0": ArenoAfter}[who]()


class Contender:
    """What both sides have in common. `step` is a whole materialization, ending in a stream of micro-batches."""

    def load(self, path: str, tokenizer: str) -> str:
        """Read a rollout."""
        with np.load(path) as file:
            self.arrays = dict(file)
        self.tokenizer = load_tokenizer(tokenizer)
        self.prepare()
        return "ready"

    def prepare(self) -> None:
        """What is done before any step, and not timed."""

    def step(self, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def time(self, **options: Any) -> dict[str, float]:
        """Seconds of wall and CPU time for one step; micro-batches are dropped as a train worker drops them."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in self.step(options):
            pass
        return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, **self.parts()}

    def parts(self) -> dict[str, float]:
        """Seconds of parts of the last step."""
        return {}

    def result(self, **options: Any) -> dict[str, Any]:
        """A checksum of each padded tensor over all micro-batches, and the advantage of each completion."""
        sums: dict[str, int] = {}
        advantages: list[float] = []
        for pack in self.step(options):
            for key in ("input_ids", "labels", "lengths", "prompt_mask", "logprobs"):
                sums[key] = zlib.crc32(pack[key].numpy().tobytes(), sums.get(key, 0))
            last_B = pack["lengths"].numpy().astype(np.int64) - 1
            advantages += pack["advantages"].numpy()[np.arange(last_B.size), last_B].tolist()
        return {"sums": sums, "advantages": advantages}

    def profile(self, **options: Any) -> list[list[Any]]:
        """Where the CPU time of one step goes."""
        return hot_spots(lambda: [None for _ in self.step(options)])

    def memory(self, **options: Any) -> dict[str, float]:
        """MiB that one step takes over what was resident before it, at its peak."""
        before = resident_mib()
        forget_peak()
        began = time.perf_counter()
        for _ in self.step(options):
            pass
        return {"wall": time.perf_counter() - began, "mib": peak_mib() - before}

    def micro(self, case: str, repeat: int) -> float:
        """Median seconds of a small piece of work."""
        call: Callable[[], Any] = getattr(self, f"_micro_{case}")()
        call()
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def advantages_of(self, rewards: list[float], sizes: list[int]) -> list[float]:
        raise NotImplementedError


class Ours(Contender):
    def prepare(self) -> None:
        from areno.materialize import LocalMaterializer

        def reward(record: Any) -> float:
            return trivial_reward(record.metadata["prompt_index"], record.completion)

        self.items = prompt_items(self.arrays["group_offsets_G1"].size - 1)
        self.materializer = LocalMaterializer(self.tokenizer, reward, text="raw")

    def step(self, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        from areno.materialize import RolloutBatch

        self.batch = self.materializer.materialize(RolloutBatch(**self.arrays), self.items)
        return self.batch.train_packs(MINI_BS, layout=options.get("layout", "packed"))

    def parts(self) -> dict[str, float]:
        return vars(self.batch.timings)

    def decode(self) -> dict[str, float]:
        """Seconds to decode all completions, by the table and by the tokenizer's own `batch_decode`; -1 if they differ."""
        from areno.materialize.decode import make_decoder

        decoder = make_decoder(self.tokenizer, skip_special=False)
        tokens_T, offsets = self.arrays["response_tokens_T"], self.arrays["response_offsets_N1"]
        began = time.perf_counter()
        texts = decoder.decode(tokens_T, offsets[:-1], offsets[1:])
        table_s = time.perf_counter() - began
        rows = [tokens_T[a:b].tolist() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
        began = time.perf_counter()
        library = self.tokenizer.batch_decode(rows)
        library_s = time.perf_counter() - began
        return {"table": table_s if texts == list(library) else -1.0, "library": library_s}

    def advantages_of(self, rewards: list[float], sizes: list[int]) -> list[float]:
        from areno.api import compute_batch_group_advantages

        return list(compute_batch_group_advantages(np.array(rewards), np.array(sizes)))

    def _micro_pack_padded(self) -> Callable[[], Any]:
        return self._pack("padded")

    def _micro_pack_packed(self) -> Callable[[], Any]:
        return self._pack("packed")

    def _pack(self, layout: Any) -> Callable[[], Any]:
        batch = self.materializer.materialize(self._rollout(), self.items)
        rows = np.arange(batch.num_rows)
        return lambda: batch.train_pack(rows, layout=layout)

    def _micro_statistics(self) -> Callable[[], Any]:
        from areno.materialize.statistics import check_logprobs, logprob_sums

        rollout = self._rollout()

        def call() -> float:
            sums_N, counts_N = logprob_sums(rollout)
            check_logprobs(sums_N, rollout, 0)
            return float(sums_N.sum()) / int(counts_N.sum())

        return call

    def _micro_advantages(self) -> Callable[[], Any]:
        from areno.api import compute_batch_group_advantages

        rewards, sizes = np.random.default_rng(0).random(128 * 16), np.full(128, 16)
        return lambda: compute_batch_group_advantages(rewards, sizes)

    def _rollout(self) -> Any:
        from areno.materialize import RolloutBatch

        return RolloutBatch(**self.arrays)


class Areno(Contender):
    """Both versions: their trainer's own method, then their own pack function on each mini-batch."""

    pack_module = pack_function = ""

    def prepare(self) -> None:
        from areno.api.trainers.policy_only import PolicyOnlyTrainer

        def reward(record: Any) -> float:
            return trivial_reward(record.metadata["prompt_index"], record.completion)

        self.make_pack = getattr(importlib.import_module(self.pack_module), self.pack_function)
        self.trainer = object.__new__(PolicyOnlyTrainer)
        self.trainer.reward_fn = reward
        self.list_s = 0.0
        offsets, tokens = self.arrays["prompt_offsets_G1"].tolist(), self.arrays["prompt_tokens_P"]
        self.prompts = SimpleNamespace(
            items=[
                SimpleNamespace(
                    prompt=f"prompt {g}", solutions=[str(g)], input_tokens=tokens[a:b].tolist(), record={"index": g}
                )
                for g, (a, b) in enumerate(itertools.pairwise(offsets))
            ]
        )

    def to_lists(self) -> list[Any]:
        """The rollout as AReno's engine hands it on."""
        from areno.api.models import RolloutResult, RolloutSequence

        tokens_T, logprobs_T = self.arrays["response_tokens_T"], self.arrays["response_logprobs_T"]
        rows, ends = self.arrays["group_offsets_G1"].tolist(), self.arrays["response_offsets_N1"].tolist()
        results = []
        for first, last in itertools.pairwise(rows):
            spans = [slice(ends[i], ends[i + 1]) for i in range(first, last)]
            sequences = [
                RolloutSequence(resp_tokens=tokens_T[s].tolist(), resp_logprobs=logprobs_T[s].tolist()) for s in spans
            ]
            results.append(RolloutResult(sequences=sequences))
        return results

    def step(self, _options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        began = time.perf_counter()
        results = self.to_lists()
        self.list_s = time.perf_counter() - began
        rows, _, _ = self.trainer._materialize_train_batch(self.tokenizer, self.prompts, results)
        return (self.make_pack(rows[i : i + MINI_BS]) for i in range(0, len(rows), MINI_BS))

    def parts(self) -> dict[str, float]:
        return {"to_lists": self.list_s}

    def _micro_pack_padded(self) -> Callable[[], Any]:
        rows, _, _ = self.trainer._materialize_train_batch(self.tokenizer, self.prompts, self.to_lists())
        return lambda: self.make_pack(rows)

    def _rows_of_logprobs(self) -> list[list[float]]:
        return [sequence.resp_logprobs for result in self.to_lists() for sequence in result.sequences]


class ArenoBefore(Areno):
    pack_module, pack_function = "areno.api.backend.areno.backend", "_make_train_pack"

    def advantages_of(self, rewards: list[float], sizes: list[int]) -> list[float]:
        from areno.api.rewards import compute_group_advantages

        parts, start = [], 0
        for size in sizes:
            parts += compute_group_advantages(rewards[start : start + size])
            start += size
        return parts

    def _micro_statistics(self) -> Callable[[], Any]:
        rows = self._rows_of_logprobs()

        def call() -> float:
            values: list[float] = []
            for row in rows:
                values += row
            return float(np.mean(values))

        return call

    def _micro_advantages(self) -> Callable[[], Any]:
        rewards = np.random.default_rng(0).random(128 * 16).tolist()
        return lambda: self.advantages_of(rewards, [16] * 128)


class ArenoAfter(Areno):
    pack_module, pack_function = "areno.api.backend.cuda.training", "make_train_pack"

    def advantages_of(self, rewards: list[float], sizes: list[int]) -> list[float]:
        from areno.api.advantages import compute_batch_group_advantages

        return list(compute_batch_group_advantages(rewards, sizes))

    def _micro_statistics(self) -> Callable[[], Any]:
        from areno.api.trainers.policy_only import _LogprobStats

        rows = self._rows_of_logprobs()

        def call() -> Any:
            stats = _LogprobStats()
            for row in rows:
                stats.add(row)
            return stats.mean

        return call

    def _micro_advantages(self) -> Callable[[], Any]:
        rewards = np.random.default_rng(0).random(128 * 16).tolist()
        return lambda: self.advantages_of(rewards, [16] * 128)
