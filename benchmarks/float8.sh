#!/usr/bin/env bash
# Train the debug model for 300 steps in bf16 and in tensorwise float8 (emulated without FP8
# hardware), and score held-out text. Print both losses, and fail if they differ by more than 1%.
# Arguments are passed to both runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git describe --always --dirty # the commit that is measured
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
common=(--training.steps 300 --validation.freq 300 --validation.holdout 0.02 --checkpoint.no-enable
    --metrics.no-enable_tensorboard "$@")
./run_train.sh "${common[@]}" --job.dump_folder "$out/bf16"
./run_train.sh "${common[@]}" --job.dump_folder "$out/float8" --float8.enable \
    --float8.min_features 0
.venv/bin/python - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

losses = {}
for name in ("bf16", "float8"):
    lines = Path(sys.argv[1], name, "validation.jsonl").read_text().splitlines()
    losses[name] = json.loads(lines[-1])["loss"]
difference = abs(losses["float8"] / losses["bf16"] - 1)
print(
    f"held-out loss: bf16 {losses['bf16']:.4f}, float8 {losses['float8']:.4f}, "
    f"difference {difference:.2%}"
)
sys.exit(1 if difference > 0.01 else 0)
PYTHON
