#!/usr/bin/env bash
# Compare titanlite with a plain PyTorch loop or torchtitan on CPU ranks, then generate
# docs/internals/performance.md.
# Arguments are passed to benchmarks/cpu.py. Run it on an idle machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.venv/bin/python benchmarks/cpu.py "$@"
exec .venv/bin/python benchmarks/performance_page.py
