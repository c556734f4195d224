#!/usr/bin/env bash
# titanlite against a plain PyTorch loop or torchtitan on CPU ranks, then the page docs/internals/performance.md. Arguments as in
# benchmarks/cpu.py. Wants an idle machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.venv/bin/python benchmarks/cpu.py "$@"
exec .venv/bin/python benchmarks/performance_page.py
