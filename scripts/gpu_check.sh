#!/usr/bin/env bash
# For a machine with an NVIDIA GPU, at most 8 minutes: the tests marked gpu, a run with long answers over both back ends,
# and a report as JSON. Arguments go to scripts/gpu_check.py: --out FILE, --dry-run (tiny sizes on the CPU).
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python="${PYTHON:-python3}"
export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=10 480 "$python" scripts/gpu_check.py "$@"
