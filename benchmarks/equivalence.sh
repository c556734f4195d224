#!/usr/bin/env bash
# Train ten steps with every layout on CPU ranks and on a single process, and compare the results.
# Print the tables, and fail if a row exceeds its tolerance. This takes 10 minutes on two cores.
#
# `benchmarks/equivalence.sh --write docs/internals/equivalence.md` also updates the tables of the
# page.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git describe --always --dirty # the commit that is measured
export PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}"
exec .venv/bin/python benchmarks/equivalence.py "$@"
