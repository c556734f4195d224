#!/usr/bin/env bash
# Check formatting, lint, imports and types, and run the tests in two workers, fast tests first. Arguments
# are passed to pytest: --long adds the long tests, and --ghost runs only the tests on the simulated GPU
# (docs/internals/ghost.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
scripts/setup.sh '.[dev]'
if ! .venv/bin/python -c "import material" 2>/dev/null; then # the extra `docs` cannot be installed offline
    patience=(--retries 1 --timeout 30)
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${patience[@]}" mkdocs "mkdocs-material>=9.5" ||
        echo "mkdocs-material cannot be installed: the test that builds the site is skipped" >&2
fi
export PATH="$PWD/.venv/bin:$PATH"
ruff format --check .
ruff check .
lint-imports
# The type check uses one core for a minute, so it runs beside the first tests.
type_report=$(mktemp)
pyright >"$type_report" &
type_check=$!
trap 'kill "$type_check" 2>/dev/null || true; rm -f "$type_report"' EXIT
exit_code=0
python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder "$@" || exit_code=$?
wait "$type_check" || exit_code=$?
cat "$type_report"
exit "$exit_code"
