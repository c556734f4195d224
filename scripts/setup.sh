#!/usr/bin/env bash
# Create .venv and install titanlite into it with the package versions of constraints.txt, unless
# this was already done for this pyproject.toml. The argument is the target of pip install, "." or
# ".[dev]".
#
# Variables: PYTHON (for .venv, default python3), TITANLITE_CONSTRAINTS (another file of package
# versions, relative to this repository, or empty to let pip choose the versions).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wanted="$1"
constraints="${TITANLITE_CONSTRAINTS-constraints.txt}"
# An editable installation contains the path of the clone.
state="$(cat pyproject.toml ${constraints:+"$constraints"} | cksum) $PWD"
installed() {
    for stamp in ".venv/installed$wanted" ".venv/installed.[dev]"; do # dev includes the rest
        [[ -f "$stamp" && "$(<"$stamp")" == "$state" ]] && return
    done
    return 1
}
installed && exit
# If several nodes share the folder, one of them installs, and the others wait.
if command -v flock >/dev/null; then
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
        echo "titanlite needs Python 3.11 or newer. Install it, or set PYTHON to its path." >&2
        exit 2
    fi
    echo "Creating .venv with $("$python" --version)" >&2
    # On Debian, Python lacks ensurepip unless python3-venv is installed.
    "$python" -m venv --clear .venv || "$python" -m venv --clear --without-pip .venv
    new=yes
fi
log=.venv/install.log
: >"$log"

# Print the name and size of each download of 100 MB or more when it starts. On a terminal, also
# print how much of it has arrived.
show_downloads() {
    local size='[0-9]{3,}[.][0-9]+ MB|[0-9.]+ GB' shown="" line name bytes
    while sleep 1 &>/dev/null && kill -0 $$ 2>/dev/null; do
        line=$(grep -oE "Downloading [^ ]+[.]whl \(($size)\)" "$log" 2>/dev/null | tail -n 1) ||
            continue
        [[ "$line" != "$shown" ]] && echo "$line"
        shown="$line"
        if [[ -t 2 ]]; then
            name=$(basename "$(cut -d ' ' -f 2 <<<"$line")")
            bytes=$(find "${TMPDIR:-/tmp}" -name "$name*" -user "$UID" -printf '%s\n' 2>/dev/null |
                sort -n | tail -n 1) || true
            printf '%s' "${bytes:+$((bytes / 1000000)) MB have arrived}"$'\r'
        fi
    done
}

# pip prints three lines for each of 50 packages, so its output is shown only if it fails.
install() {
    local options=(--progress-bar off --disable-pip-version-check)
    options+=(${constraints:+--constraint "$constraints"} "$@" --editable "$wanted")
    PYTHONUNBUFFERED=1 .venv/bin/python -m pip install "${options[@]}" >"$log" 2>&1 && return
    if grep -qiE '^ *error' "$log"; then
        sed -n '/^ *[Ee][Rr][Rr][Oo][Rr]/,$p' "$log" >&2
    else
        cat "$log" >&2
    fi
    return 1
}

# Fail if $python lacks a direct dependency of titanlite, or has an unsupported version of one.
check_installed_packages() {
    "$python" - "$wanted" 2> >(tail -n 1 >&2) <<'EOF'
import sys
import tomllib
from importlib.metadata import version
from pip._vendor.packaging.requirements import Requirement

pyproject = tomllib.load(open("pyproject.toml", "rb"))
project = pyproject["project"]
dependencies = project["dependencies"] + pyproject["build-system"]["requires"]
if "dev" in sys.argv[1]:
    dependencies += project["optional-dependencies"]["dev"]
for requirement in map(Requirement, dependencies):
    installed = version(requirement.name)
    if installed not in requirement.specifier:
        sys.exit(f"titanlite needs {requirement}; there is {installed}")
EOF
}

# Without a network, let .venv use the packages of $python.
use_installed_packages() {
    "$python" -m venv --clear --without-pip .venv
    local site_packages
    site_packages=$(echo .venv/lib/python3.*/site-packages)
    "$python" -c 'import sys; print(*filter(None, sys.path), sep="\n")' >"$site_packages/lent.pth"
    install --no-index --no-deps --no-build-isolation || { rm -r .venv && exit 1; }
    echo "Using the packages of $("$python" -c 'import sys; print(sys.prefix)')" >&2
}

echo "Installing titanlite and its dependencies into .venv (once; PyTorch is large). Log: $log" >&2
show_downloads >&2 &
trap 'kill $! 2>/dev/null || true' EXIT
if ! install; then
    [[ -n "$new" ]] && check_installed_packages || exit 1
    use_installed_packages
fi
# The stamp is written last, so that an interrupted installation is repeated.
echo "$state" >".venv/installed$wanted"
