#!/usr/bin/env bash
# Create .venv and install titanlite into it, unless that was done for this pyproject.toml.
# Argument: what pip installs, "." or ".[dev]".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wanted="$1"
state="$(cksum pyproject.toml) $PWD" # an editable installation holds the path of the folder
installed() {
    for stamp in ".venv/installed$wanted" ".venv/installed.[dev]"; do # dev includes the rest
        [[ -f "$stamp" && "$(<"$stamp")" == "$state" ]] && return
    done
    return 1
}
installed && exit
if command -v flock >/dev/null; then # machines that share the folder: one installs, the others wait for it
    exec 9>>pyproject.toml
    flock 9
    installed && exit
fi

new=""
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 ""}; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    if [[ -z "$python" ]]; then
        echo "titanlite needs Python 3.11 or newer, as python3 or named by the variable PYTHON." >&2
        exit 2
    fi
    echo "Creating .venv with $("$python" --version)" >&2
    "$python" -m venv --clear .venv || "$python" -m venv --clear --without-pip .venv # Debian's lacks ensurepip
    new=yes
fi
bar=off
[[ -t 2 ]] && bar=on
install() { # pip says what it downloads, because that takes minutes
    .venv/bin/python -m pip install --progress-bar "$bar" --disable-pip-version-check "$@" --editable "$wanted" >&2
}
echo "Installing titanlite and its dependencies into .venv (once; PyTorch is large)" >&2
if ! install; then
    # Without a network: a Python that has all of them lends them, whatever they in turn would like to have.
    [[ -n "$new" ]] && "$python" -c '
import sys, tomllib
from importlib.metadata import version
from pip._vendor.packaging.requirements import Requirement
pyproject = tomllib.load(open("pyproject.toml", "rb"))
project, build = pyproject["project"], pyproject["build-system"]["requires"]
extra = project["optional-dependencies"]["dev"] if "dev" in sys.argv[1] else []
for wanted in map(Requirement, project["dependencies"] + extra + build):
    if (found := version(wanted.name)) not in wanted.specifier:
        sys.exit(f"titanlite needs {wanted}; there is {found}")' "$wanted" 2> >(tail -n 1 >&2) || exit 1
    "$python" -m venv --clear --without-pip .venv
    "$python" -c 'import sys; print(*filter(None, sys.path), sep="\n")' >"$(echo .venv/lib/python3.*/site-packages)/lent.pth"
    install --no-index --no-deps --no-build-isolation || { rm -r .venv && exit 1; }
    echo "Using the packages of $("$python" -c 'import sys; print(sys.prefix)')" >&2
fi
echo "$state" >".venv/installed$wanted" # only now: an interrupted installation is done again
