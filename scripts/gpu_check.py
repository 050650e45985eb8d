"""Check a GPU machine: the tests marked gpu, then the same run with long answers over both back ends; a JSON report.

The model has the architecture of Qwen3-0.6B and random weights, so it hardly ever ends an answer by itself. Started by
`scripts/gpu_check.sh`, which bounds the time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

TESTS_S, RUN_S = 120, 165

REWARD = """
def reward_fn(record):
    return sum(record.tokens) % 97 / 97
"""

TIMES = {
    "step_s": "step_e2e_time_s",
    "rollout_s": "step_rollout_time_s",
    "materialize_s": "step_materialize_time_s",
    "train_s": "step_train_time_s",
    "gap_s": "rollout_train_gap_s",
    "tokens_per_s": "tokens_per_s",
}


@dataclass(frozen=True)
class Sizes:
    """The model, and how much is sampled."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    new_tokens: int
    batch_size: int
    n_samples: int
    steps: int


LONG = Sizes(1024, 28, 16, 8, 128, 151_936, 1024, 8, 4, 3)
TINY = Sizes(32, 2, 4, 2, 8, 2000, 24, 2, 2, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the GPU tests and a long-answer run over both back ends.")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_check.json"), help="where the report is written")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that the check works")
    args = parser.parse_args()

    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print(
            f"gpu_check: torch {torch.__version__} sees no CUDA device here: run this on a machine with an NVIDIA GPU and "
            "a CUDA build of torch, or pass --dry-run to try the check itself on the CPU.",
            file=sys.stderr,
        )
        return 2
    began = time.monotonic()
    sizes = TINY if args.dry_run else LONG
    report: dict[str, Any] = {
        "device": "cpu" if args.dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "sizes": asdict(sizes),
    }
    report["gpu_tests"] = gpu_tests()
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as name:
        folder = Path(name)
        make_inputs(folder, sizes)
        for backend in ("local", "ray"):
            report[backend] = train(folder, backend, sizes, "cpu" if args.dry_run else "cuda")
    report["seconds"] = round(time.monotonic() - began, 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0 if all(report[part]["exit_code"] == 0 for part in ("gpu_tests", "local", "ray")) else 1


def gpu_tests() -> dict[str, Any]:
    """The tests that need a CUDA device; without one they are skipped."""
    code, out = run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"], TESTS_S)
    return {"exit_code": code, "said": out.strip().splitlines()[-1:]}


def make_inputs(folder: Path, sizes: Sizes) -> None:
    """A checkpoint of random weights with a tokenizer of the same vocabulary, prompts, and a reward function."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{i}" for i in range(sizes.vocab - len(alphabet) - 1)]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, *words, "<|end|>"])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.save_pretrained(folder / "ckpt")
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden, intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim, max_position_embeddings=40_960, rope_theta=1_000_000, tie_word_embeddings=True,
        eos_token_id=end, pad_token_id=end, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder / "ckpt")
    rows = "".join(json.dumps({"prompt": f"What is {i} + {i + 1}? " * 4}) + "\n" for i in range(64))
    (folder / "prompts.jsonl").write_text(rows, encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def train(folder: Path, backend: str, sizes: Sizes, device: str) -> dict[str, Any]:
    """One run of the command; the first step, which warms up, is left out of the medians."""
    metrics = folder / backend
    command = [
        sys.executable, "-c", "from areno.cli.main import main; main()", "train", "--algo", "grpo",
        "--ckpt", folder / "ckpt", "--dataset-path", folder / "prompts.jsonl",
        "--reward-fn-path", folder / "reward.py", "--metrics-log-dir", metrics, "--device", device,
        "--batch-size", sizes.batch_size, "--n-samples", sizes.n_samples, "--max-new-tokens", sizes.new_tokens,
        "--mini-bs", 8, "--max-steps", sizes.steps, "--attn-backend", "native", "--materialize-backend", backend,
    ]  # fmt: skip
    usage = GpuUsage()
    with usage:
        code, out = run([str(word) for word in command], RUN_S)
    result: dict[str, Any] = {"exit_code": code}
    if code != 0:
        return {**result, "said": out.strip().splitlines()[-20:]}
    lines = (metrics / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    result |= {name: statistics.median(step[key] for step in steps[1:]) for name, key in TIMES.items()}
    result["response_tokens"] = round(statistics.mean(s["response_len_mean"] * s["sequences"] for s in steps))
    result["peak_mem_gb"] = max(step["peak_mem_gb"] for step in steps)
    result["logp_abs_diff_mean_first"] = steps[0].get("logp_abs_diff_mean")
    result["gpu"] = usage.summary()
    return result


class GpuUsage:
    """Utilization and memory of the GPUs (NVML, by way of nvidia-smi) while a block runs."""

    QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "200")

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> None:
        try:
            self._process = subprocess.Popen(self.QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            return
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            used, memory = line.split(",")
            self._samples.append((float(used), float(memory)))

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()

    def summary(self) -> dict[str, float] | None:
        """Mean and median utilization in percent (start-up included), and the most memory in GiB; None without a GPU."""
        if not self._samples:
            return None
        used = [sample[0] for sample in self._samples]
        return {
            "utilization_mean": round(statistics.mean(used), 1),
            "utilization_median": statistics.median(used),
            "memory_max_gb": round(max(sample[1] for sample in self._samples) / 1024, 2),
        }


def run(command: list[str], limit_s: float) -> tuple[int, str]:
    """Exit code and output of a command. Past its time it is asked to end, so that it cleans up, and then killed."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return _code(process, limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            code, out = _code(process, 20)
        except subprocess.TimeoutExpired:
            process.kill()
            code, out = _code(process, None)
        return code or 124, f"{out}\nended after {limit_s:g} s, its limit"


def _code(process: subprocess.Popen[str], limit_s: float | None) -> tuple[int, str]:
    out, _ = process.communicate(timeout=limit_s)
    return process.returncode, out


if __name__ == "__main__":
    sys.exit(main())
