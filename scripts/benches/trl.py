"""One whole GRPO step of SmolLM2-135M on the CPU, against TRL's GRPOTrainer.

Same checkpoint, same four gsm_symbolic prompts in every step, four samples each, at most 64 new tokens, float32,
token-mean loss, activation checkpointing, the math-verify reward. Ours is timed as `areno train` reports it, TRL's from
a step's begin to its end. The first step of each process warms up and is left out.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benches.case import SCRIPTS, Case, compare, in_process
from fetch_smollm2 import fetch

ROOT = SCRIPTS.parent
PROMPTS, SAMPLES, NEW_TOKENS, STEPS = 4, 4, 64, 3


def run(rounds: int, quick: bool = False) -> list[Case]:
    """Both sides in turn, `rounds` times, each with one step to warm up and two that count."""
    ckpt = fetch(ROOT / "models" / "smollm2")
    sides: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "prompts.jsonl")
        write_prompts(data)
        for _ in range(1 if quick else rounds):
            for side, steps in sides.items():
                steps += in_process("trl", side, ckpt, data, folder)[1:]
    ours, theirs = ([1e3 * step["seconds"] for step in sides[side]] for side in ("ours", "theirs"))
    tokens = round(statistics.median(step["tokens"] for step in sides["ours"]))
    peer = f"trl {importlib.metadata.version('trl')}"
    return [compare("trl", "GRPO step, SmolLM2-135M, CPU", tokens, PROMPTS * SAMPLES, ours, peer, theirs)]


def write_prompts(path: Path) -> None:
    """The four problems, as rows with chat messages and solutions."""
    sys.path.insert(0, str(ROOT / "examples" / "reasoning_gym"))
    from dataset_loader import load_training_dataset

    rows = load_training_dataset("reasoning_gym:gsm_symbolic", size=PROMPTS)
    keep = ({"prompt": row["prompt"], "solutions": row["solutions"]} for row in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in keep), encoding="utf-8")


def ours(ckpt: str, data: str, folder: str) -> list[dict[str, float]]:
    """Seconds and response tokens of each step of `areno train`."""
    metrics = Path(tempfile.mkdtemp(dir=folder))
    options = {
        "--algo": "grpo",
        "--ckpt": ckpt,
        "--dataset-path": data,
        "--reward-fn-path": ROOT / "examples" / "math" / "math_verify_reward.py",
        "--batch-size": PROMPTS,
        "--n-samples": SAMPLES,
        "--max-new-tokens": NEW_TOKENS,
        "--mini-bs": PROMPTS * SAMPLES,
        "--epochs": STEPS,
        "--device": "cpu",
        "--metrics-log-dir": metrics,
    }
    areno = Path(sys.executable).with_name("areno")
    command = [areno, "train", *(str(part) for pair in options.items() for part in pair)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    steps = [json.loads(line) for line in (metrics / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {
            "seconds": s["step_e2e_time_s"],
            "tokens": s["response_len_mean"] * PROMPTS * SAMPLES,
            "reward": s["reward_mean"],
        }
        for s in steps
    ]


def theirs(ckpt: str, data: str, folder: str) -> list[dict[str, float]]:
    """Seconds and response tokens of each step of TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(ROOT / "examples" / "math"))
    from math_verify_reward import reward_fn

    def reward(completions: list[Any], solutions: list[list[str]], **_: Any) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        pairs = zip(texts, solutions, strict=True)
        return [reward_fn(SimpleNamespace(completion=text, answer=answer)) for text, answer in pairs]

    class Clock(TrainerCallback):
        begun = 0.0
        seconds: list[float] = []  # noqa: RUF012  (one clock in this process)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begun)

    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        use_cpu=True,
        bf16=False,
        learning_rate=1e-6,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=ckpt,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(ckpt),
        callbacks=[Clock()],
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "completions/mean_length" in log]
    return [
        {"seconds": seconds, "tokens": log["completions/mean_length"] * PROMPTS * SAMPLES, "reward": log["reward"]}
        for seconds, log in zip(Clock.seconds, logs, strict=True)
    ]


if __name__ == "__main__":
    side, *arguments = sys.argv[1:]
    print("\n" + json.dumps({"ours": ours, "theirs": theirs}[side](*arguments)))
