"""`scripts/gpu_check.sh`: says at once that there is no GPU, and works through on the CPU with tiny sizes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.sh"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "sees no CUDA device here: run this on a machine with an NVIDIA GPU" in line


@pytest.mark.ray
@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "report.json"
    done = subprocess.run([SCRIPT, "--dry-run", "--out", out], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    for backend in ("local", "ray"):
        found = report[backend]
        assert found["step_s"] > found["rollout_s"] > 0
        assert found["train_s"] > 0
        assert found["gap_s"] >= 0
        assert found["peak_mem_gb"] > 0
        assert found["response_tokens"] > 0
    assert report["local"]["response_tokens"] == report["ray"]["response_tokens"]
