"""scripts/setup.sh, which ./run_train.sh calls first: it installs once, or lends packages where there is no network."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IEXEC)


PYTHON_OF_VENV = """#!/bin/bash
# Stands for the Python of .venv: notes what pip is told; pip fails while a file named broken exists.
[[ "$*" == "-m pip --version" ]] && exit 0
echo "$*" >>installs
[[ ! -f broken ]]
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "clone/scripts").mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts/setup.sh", tmp_path / "clone/scripts")
    (tmp_path / "clone/pyproject.toml").write_text("one")
    executable(tmp_path / "clone/.venv/bin/python", PYTHON_OF_VENV)
    return tmp_path / "clone"


def set_up(clone: Path, wanted: str = ".") -> tuple[int, int]:
    """Run setup.sh: its exit code, and how often pip was called so far."""
    code = subprocess.run([clone / "scripts/setup.sh", wanted], capture_output=True, check=False).returncode
    installs = clone / "installs"
    return code, len(installs.read_text().splitlines()) if installs.exists() else 0


def test_set_up_installs_once_and_again_when_something_has_changed(clone: Path):
    assert [set_up(clone), set_up(clone)] == [(0, 1), (0, 1)]
    (clone / "pyproject.toml").write_text("two")
    assert [set_up(clone), set_up(clone)] == [(0, 2), (0, 2)]
    assert [set_up(clone, ".[dev]"), set_up(clone, ".[dev]")] == [(0, 3), (0, 3)]
    (clone / "pyproject.toml").write_text("three")
    assert [set_up(clone, ".[dev]"), set_up(clone)] == [(0, 4), (0, 4)]  # the tools for development cover the rest
    (clone / "broken").write_text("")
    (clone / "pyproject.toml").write_text("four")
    assert set_up(clone) == (1, 5)
    (clone / "broken").unlink()
    assert set_up(clone) == (0, 6)  # an interrupted installation is done again
    assert set_up(clone.rename(clone.with_name("moved"))) == (0, 7)
    assert "pip install" in (clone.with_name("moved") / "installs").read_text()


@pytest.mark.parametrize(("old", "code"), [("typing_extensions", 0), ("tyro", 1)])
def test_a_python_that_has_all_packages_lends_them_without_a_network(tmp_path: Path, old: str, code: int):
    """It lacks ensurepip, and version 0.1 of one package is too old for others, or for titanlite itself."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/setup.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for name in ("titanlite", "train_configs", "assets"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    metadata = tmp_path / f"packages/{old}-0.1.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {old}\nVersion: 0.1\n")
    broken = '[[ "$*" == "-m venv --clear .venv" ]] && exit 1'
    executable(tmp_path / "python", f'#!/bin/bash\n{broken}\nexec "{sys.executable}" "$@"\n')
    variables = {"PYTHON": str(tmp_path / "python"), "PIP_NO_INDEX": "1", "PYTHONPATH": str(tmp_path / "packages")}
    command = [tmp_path / "scripts/setup.sh", "."]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=False)
    assert ended.returncode == code, ended.stderr
    assert (f"Using the packages of {sys.prefix}" if code == 0 else "titanlite needs tyro") in ended.stderr
    if code == 0:
        subprocess.run([tmp_path / ".venv/bin/python", "-P", "-c", "import titanlite.launch, torchao"], check=True)
        assert not list(tmp_path.glob(".venv/lib/*/site-packages/torch"))
