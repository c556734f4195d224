#!/usr/bin/env bash
# Check formatting, lint, types and imports, then run the tests by two workers (fast ones first). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
scripts/setup.sh '.[dev]'
export PATH="$PWD/.venv/bin:$PATH"
ruff format --check .
ruff check .
pyright
lint-imports
exec python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder "$@"
