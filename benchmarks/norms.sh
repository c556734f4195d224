#!/usr/bin/env bash
# Print the gradient norms of the first steps of flavor 150m on 1, 2 and 4 ranks in fp32, and their
# largest relative difference. Fail if it exceeds 1e-6. This takes a few minutes and 8 GiB on two
# cores.
#
#     benchmarks/norms.sh
set -euo pipefail
cd "$(dirname "$0")/.."
git describe --always --dirty # the commit that is measured
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

options=(--model.flavor 150m --training.steps 2 --training.seq_len 128
    --training.local_batch_size 1 --training.global_batch_size 4
    --training.mixed_precision_param float32 --metrics.log_freq 1
    --metrics.no-enable_tensorboard --checkpoint.no-enable)
for ranks in 1 2 4; do
    NGPU=$ranks .venv/bin/python -P -m titanlite launch --job.dump_folder "$folder/$ranks" \
        "${options[@]}" >"$folder/$ranks.log" 2>&1 || { cat "$folder/$ranks.log" && exit 1; }
done

exec .venv/bin/python - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

norms = {}
for ranks in ("1", "2", "4"):
    metrics = Path(sys.argv[1], ranks, "metrics.jsonl").read_text().splitlines()
    norms[ranks] = [json.loads(line)["grad_norm"] for line in metrics]
    print(ranks, "ranks:", *(f"{norm:.9f}" for norm in norms[ranks]))

differences = []
for values in norms.values():
    for norm, norm_of_one_rank in zip(values, norms["1"], strict=True):
        differences.append(abs(norm / norm_of_one_rank - 1))
print(f"largest relative difference: {max(differences):.1e}")
sys.exit(1 if max(differences) > 1e-6 else 0)
PYTHON
