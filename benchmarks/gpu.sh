#!/usr/bin/env bash
# Measure titanlite on one GPU of 80 GB or more. Each part ends within nine minutes and needs no
# network. Arguments are passed to benchmarks/gpu_parts.py.
#
#     benchmarks/gpu.sh smoke | checks | titanlite | torchtitan | profile | all [OPTIONS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh .
exec .venv/bin/python benchmarks/gpu_parts.py "$@"
