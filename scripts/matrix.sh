#!/usr/bin/env bash
# Run the tests with each supported version of torch and Python, and print a table.
#
#     scripts/matrix.sh FOLDER [--torch "2.13.0 2.15.0"] [--python "3.11 /opt/python3.13"] \
#         [PYTEST ARGUMENT ...]
#
# FOLDER receives a virtual environment (4 to 6 GB with a CUDA build of torch) and a log for each
# pair. Existing environments are reused. A Python is a version, such as 3.11 for python3.11, or a
# path. The exit code is 1 if a pair failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage="usage: scripts/matrix.sh FOLDER [--torch VERSIONS] [--python VERSIONS] [PYTEST ARGUMENT ...]"
folder="${1:?$usage}"
shift
torches="2.12.1 2.13.0 2.14.1 2.15.0"
pythons="3.11 3.12 3.13"
while [[ "${1-}" == --torch || "${1-}" == --python ]]; do
    [[ "$1" == --torch ]] && torches="$2" || pythons="$2"
    shift 2
done
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
grep -v "^torch==" constraints.txt >"$folder/constraints.txt"

making=""
# An incomplete environment must not be reused.
trap '[[ -z "$making" ]] || rm -r "$making"' EXIT
# Create an environment. Arguments: folder, Python, torch version.
make() {
    making="$1"
    "$2" -m venv "$1" || return
    "$1/bin/python" -m pip install --quiet --constraint "$folder/constraints.txt" "torch==$3" \
        --editable '.[dev]' || return
    making=""
}

failed=0
rows=()
for python in $pythons; do
    [[ "$python" == */* ]] || python="python$python"
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" || exit 2
    for torch in $torches; do
        environment="$folder/py$version-torch$torch"
        log="$environment.log"
        result="not installed"
        echo "Python $version, torch $torch: see $log" >&2
        if [[ -x "$environment/bin/python" ]] || make "$environment" "$python" "$torch" >"$log" 2>&1
        then
            # GPUs are hidden, so that all pairs run the same tests.
            CUDA_VISIBLE_DEVICES="" PYTHONPATH="$PWD" PATH="$environment/bin:$PATH" \
                "$environment/bin/python" -m pytest -n 2 --dist loadgroup --no-loadscope-reorder \
                "$@" >"$log" 2>&1 || failed=1
            result="$(tail -n 1 "$log")"
        else
            failed=1
            rm -rf "$environment"
            making=""
        fi
        rows+=("| $version | $torch | $result |")
    done
done
printf '%s\n' "| Python | torch | tests |" "| ------ | ----- | ----- |" "${rows[@]}"
exit "$failed"
