#!/usr/bin/env bash
# Check formatting, lint and imports. Then check types and run the tests in three workers, fast
# tests first. Arguments are passed to pytest: --long adds the long tests, and --ghost runs only the
# tests on the simulated GPU (docs/internals/ghost.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
scripts/setup.sh '.[dev]'
if ! .venv/bin/python -c "import material" 2>/dev/null; then
    # Give up soon: without a network, the extra `docs` cannot be installed.
    pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 1)
    "${pip[@]}" --timeout 30 mkdocs "mkdocs-material>=9.5" ||
        echo "mkdocs-material cannot be installed: the test that builds the site is skipped" >&2
fi
export PATH="$PWD/.venv/bin:$PATH"
ruff format --check .
ruff check .
lint-imports
# pyright takes a minute on one core, while the first tests run.
pyright >.venv/pyright.log 2>&1 &
types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
failed=0
python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder "$@" || failed=$?
wait "$types" || { cat .venv/pyright.log && failed=1; }
exit "$failed"
