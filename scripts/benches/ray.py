"""The same step through one and two Ray actors, against one process: rewards that cost nothing, 5 ms, and math-verify."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areno.api import PromptItem
from areno.materialize import LocalMaterializer, RolloutBatch
from benches.case import SCRIPTS, Case, compare, take_turns
from benches.inputs import Size, load_tokenizer, prompt_items, rollout_arrays, size_of
from benches.ray_session import materializer, ray_session, warm_up

LOCAL = "ours, local"
ACTORS = (1, 2)

TRIVIAL = "def reward_fn(record):\n    return float(len(record.completion) % 97)\n"

# Pure Python that holds the interpreter, and as long as it says however busy the machine is.
BUSY = """import time

def reward_fn(record):
    end = time.thread_time() + 0.005
    while time.thread_time() < end:
        pass
    return float(len(record.completion) % 97)
"""


def run(rounds: int, quick: bool) -> list[Case]:
    tokenizer = load_tokenizer("deepseek")
    cases = []
    with tempfile.TemporaryDirectory() as folder, ray_session():
        trivial, busy = Path(folder, "trivial.py"), Path(folder, "busy.py")
        trivial.write_text(TRIVIAL)
        busy.write_text(BUSY)
        for name in ("25k",) if quick else ("25k", "100k", "800k", "8M"):
            rollout = RolloutBatch(**rollout_arrays(size_of(name), "deepseek"))
            items = prompt_items(rollout.num_groups)
            cases += measure(tokenizer, trivial, rollout, items, f"{name}, trivial reward", 3 * rounds)
        size = Size(8, 4, 4096, 100_000) if quick else Size(32, 8, 4096, 100_000)
        rollout = RolloutBatch(**rollout_arrays(size, "deepseek"))
        cases += measure(tokenizer, busy, rollout, prompt_items(size.groups), "100k, reward of 5 ms", rounds)
        rollout, items = math_rollout(tokenizer, groups=4 if quick else 32)
        verify = SCRIPTS.parent / "examples" / "math" / "math_verify_reward.py"
        cases += measure(tokenizer, verify, rollout, items, "gsm_symbolic, math-verify", rounds)
    return cases


def measure(
    tokenizer: Any, reward: Path, rollout: RolloutBatch, items: list[PromptItem], case: str, rounds: int
) -> list[Case]:
    """One case per number of actors, each in turn with the local one, whose rewards and advantages theirs must equal bit
    for bit."""
    tokens, rows = rollout.num_response_tokens, rollout.num_completions
    cases = []
    for actors in ACTORS:
        with (
            LocalMaterializer(tokenizer, str(reward), text="raw") as local,
            materializer(tokenizer, str(reward), actors) as there,
        ):
            sides = {"local": step(local, rollout, items), "ray": step(there, rollout, items)}
            same = bits(there.materialize(rollout, items)) == bits(local.materialize(rollout, items))
            for side in sides.values():
                warm_up(side)
            times = take_turns(sides, rounds, limit_s=25)
        gathered, ready = ({who: [1e3 * turn[i] for turn in turns] for who, turns in times.items()} for i in (0, 1))
        details = {
            "gathered_ms": round(statistics.median(gathered["ray"]), 3),
            "local_gathered_ms": round(statistics.median(gathered["local"]), 3),
        }
        note = "equal bit for bit" if same else "results DIFFER"
        label = f"{case}, {actors} actor{'s' if actors > 1 else ''}"
        peer = LOCAL, ready["local"]
        cases.append(compare("ray", label, tokens, rows, ready["ray"], *peer, note=note, details=details))
    return cases


def step(there: Any, rollout: RolloutBatch, items: list[PromptItem]) -> Callable[[], tuple[float, float]]:
    """Seconds until the batch is gathered, and until all its micro-batches have been made in this process."""

    def call() -> tuple[float, float]:
        began = time.perf_counter()
        batch = there.materialize(rollout, items)
        gathered = time.perf_counter() - began
        for _ in batch.train_packs(8, layout="packed"):
            pass
        return gathered, time.perf_counter() - began

    return call


def bits(batch: Any) -> tuple[bytes, bytes]:
    return batch.rewards.tobytes(), batch.advantages.tobytes()


def math_rollout(tokenizer: Any, groups: int, samples: int = 8) -> tuple[RolloutBatch, list[PromptItem]]:
    """Worked solutions of gsm_symbolic problems as completions; every other one ends in a wrong answer."""
    import reasoning_gym

    rows = reasoning_gym.create_dataset("gsm_symbolic", size=groups, seed=7)
    items, responses = [], []
    for row in rows:
        items.append(PromptItem(row["question"], [row["answer"]], [], {"question": row["question"]}))
        worked = row["metadata"]["answer_cot"].split("####")[0]
        answers = [row["answer"] if i % 2 == 0 else f"{float(row['answer']) + i:g}" for i in range(samples)]
        texts = [f"{worked}\nThe final answer is \\boxed{{{answer}}}." for answer in answers]
        responses.append([tokenizer.encode(text, add_special_tokens=False) for text in texts])
    prompts = [tokenizer.encode(item.prompt, add_special_tokens=False) for item in items]
    logprobs = [[[-0.5] * len(ids) for ids in group] for group in responses]
    return RolloutBatch.from_rows(prompts, responses, logprobs), items
