#!/usr/bin/env bash
# Ten steps in every layout beside one process, on CPU ranks: prints the table, fails if a row misses its tolerance.
# `benchmarks/equivalence.sh --write docs/internals/equivalence.md` also puts the tables into the page. Takes 10 minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git describe --always --dirty # the commit that is measured
export PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/python benchmarks/equivalence.py "$@"
