#!/usr/bin/env bash
# Measure titanlite on one GPU of 80 GB or more: benchmarks/gpu.sh smoke | checks | titanlite |
# torchtitan | profile | all [...]
# Each part ends within nine minutes and needs no network. Options are passed to
# benchmarks/gpu_parts.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh .
exec .venv/bin/python benchmarks/gpu_parts.py "$@"
