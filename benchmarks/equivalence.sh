#!/usr/bin/env bash
# Compare ten steps of every layout with one process on CPU ranks. Print the table, and fail if a
# row exceeds its tolerance.
# `benchmarks/equivalence.sh --write docs/internals/equivalence.md` also updates the tables of the
# page. It takes 10 minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git describe --always --dirty # the commit that is measured
export PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/python benchmarks/equivalence.py "$@"
