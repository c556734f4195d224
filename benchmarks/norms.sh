#!/usr/bin/env bash
# Print the gradient norms of the first steps of flavor 150m on 1, 2 and 4 ranks in fp32, and their largest relative
# difference. Fail if it exceeds 1e-6. This takes a few minutes and 8 GiB on two cores.
#
#     benchmarks/norms.sh
set -euo pipefail
cd "$(dirname "$0")/.."
git describe --always --dirty # the commit that is measured
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for ranks in 1 2 4; do
    NGPU=$ranks .venv/bin/python -P -m titanlite launch --job.dump_folder "$folder/$ranks" --model.flavor 150m \
        --training.steps 2 --training.seq_len 128 --training.local_batch_size 1 --training.global_batch_size 4 \
        --training.mixed_precision_param float32 --metrics.log_freq 1 --metrics.no-enable_tensorboard \
        --checkpoint.no-enable >"$folder/$ranks.log" 2>&1 || { cat "$folder/$ranks.log" && exit 1; }
done
exec .venv/bin/python - "$folder" <<'PYTHON'
import json, sys
from pathlib import Path

norms = {
    ranks: [json.loads(line)["grad_norm"] for line in Path(sys.argv[1], ranks, "metrics.jsonl").read_text().splitlines()]
    for ranks in ("1", "2", "4")
}
for ranks, values in norms.items():
    print(ranks, "ranks:", *(f"{value:.9f}" for value in values))
worst = max(abs(a / b - 1) for values in norms.values() for a, b in zip(values, norms["1"], strict=True))
print(f"largest relative difference: {worst:.1e}")
sys.exit(worst > 1e-6)
PYTHON
