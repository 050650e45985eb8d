#!/usr/bin/env bash
# From nothing to a model that learned something: a tiny Qwen3 that is mostly wrong at sums is trained with GRPO.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
backend=(--materialize-backend ray --world-size 2)
install_venv "ray"

# A waiting thread gives its core away instead of spinning: on shared cores that is seconds against minutes.
export OMP_WAIT_POLICY=passive
run=runs/demo
rm -rf "$run"
.venv/bin/python scripts/make_tiny_model.py --out models/tiny
.venv/bin/python examples/arithmetic/problems.py --count 2000 --out "$run/problems.jsonl"
.venv/bin/areno train --algo grpo --ckpt models/tiny --device cpu "${backend[@]}" \
    --dataset-path "$run/problems.jsonl" --reward-fn-path examples/arithmetic/reward.py \
    --batch-size 16 --n-samples 8 --max-new-tokens 16 --max-steps 80 \
    --rollout-rows 128 --mini-bs 128 --no-activation-checkpointing \
    --lr 3e-4 --lr-warmup-steps 10 --lr-decay-style constant \
    --save-path "$run/checkpoints" --metrics-log-dir "$run/metrics"
.venv/bin/python scripts/reward_curve.py "$run/metrics/metrics.jsonl" --must-gain 0.3
echo "Checkpoint: $run/checkpoints   Metrics: $run/metrics (tensorboard --logdir $run/metrics)"
