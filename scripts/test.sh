#!/usr/bin/env bash
# Everything that CI runs, in a .venv of its own. Arguments go to pytest: scripts/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
install_venv dev

export OMP_WAIT_POLICY=passive # waiting threads give their core away: see scripts/demo.sh
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
