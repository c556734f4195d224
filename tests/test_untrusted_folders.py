"""Modules in the current folder and shared folders of other users are never executed."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from small_runs import ROOT, SMALL, run_program

TITANLITE = str(Path(sys.executable).with_name("titanlite"))
HOSTILE = """
titanlite, numpy, torch, torchao, tokenizers, tiktoken, pydantic, tyro, rich, tomli, xxhash,
datasets, safetensors, sitecustomize, usercustomize, traceback, json, logging, queue, socket,
pickle, random, tempfile, subprocess, multiprocessing, asyncio, typing_extensions, _pickle, triton
"""
JOB = "--job.config_file ../job.toml --training.steps 2"
API = """
import titanlite
job = titanlite.load_job(["--job.config_file", "../job.toml", "--job.dump_folder", "../api"])
with titanlite.Trainer(job) as trainer:
    trainer.train()
"""


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory) -> Path:
    """Create a folder with modules that record their import."""
    folder = tmp_path_factory.mktemp("runs") / "here"
    for name in HOSTILE.replace(",", " ").split():
        file = folder / f"{name}.py" if name != "titanlite" else folder / name / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"open({str(folder / 'EXECUTED')!r}, 'a').write({name!r} + ' ')\n")
    (folder.parent / "job.toml").write_text(SMALL)
    (folder.parent / "api.py").write_text(API)
    (folder.parent / "text.txt").write_text("A few words.\n" * 50)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("untrusted_folders")
@pytest.mark.parametrize(
    "command",
    [
        f"{ROOT}/run_train.sh {JOB} --job.dump_folder ../run",
        *(
            pytest.param(command, marks=pytest.mark.long)
            for command in (
                f"{sys.executable} ../api.py",
                f"{TITANLITE} prepare {JOB} --out ../shards",
                f"{TITANLITE} eval --checkpoint ../run --data ../text.txt",
                f"{TITANLITE} plan {JOB} --gpu H100",
                f"{TITANLITE} train {JOB} --job.dump_folder ../alone",
                f"{TITANLITE} profile {JOB} --steps 1 --warmup 0 --job.dump_folder ../profile",
                f"{TITANLITE} generate --checkpoint ../run --prompt A --max-new-tokens 2",
            )
        ),
    ],
    ids="run_train api prepare eval plan train profile generate".split(),
)
def test_no_module_of_the_current_folder_is_executed(command, hostile_folder):
    variables = {"NGPU": "2" if "run_train" in command else "1", "PYTHONPATH": ""}

    run_program(*command.split(), folder=hostile_folder, variables=variables)

    executed = hostile_folder / "EXECUTED"
    assert not executed.exists(), executed.read_text()


CHECK_FOLDER = """
import os, sys
from titanlite.runtime.process import set_up_torch
set_up_torch()
info = os.stat(os.path.dirname(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
assert info.st_uid == os.geteuid() and not info.st_mode & 0o077
assert "torch" not in sys.modules
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.parametrize(
    "home", ["new", "a file", "open to all", "of another user", "named by the user"]
)
def test_compilers_use_a_folder_that_only_the_user_can_write_to(home, tmp_path, monkeypatch):
    """Another user with write access could otherwise run code in the training process."""
    folder = tmp_path / "titanlite-compiler"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if home == "a file":
        folder.touch()
    elif home != "new":
        folder.mkdir()
        folder.chmod(0o777 if home == "open to all" else 0o700)
    if home == "of another user":
        # Only root can change the owner of a folder.
        with contextlib.suppress(PermissionError):
            os.chown(folder, 12345, 12345)
    elif home == "named by the user":
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "mine"))

    used = Path(run_program(sys.executable, "-c", CHECK_FOLDER).stdout.strip())

    is_safe = home in ("new", "named by the user")
    # Without root, the folder still belongs to the current user.
    is_safe |= home == "of another user" and os.geteuid() != 0
    assert used.parent.parent == tmp_path
    assert (used.parent == folder) == is_safe
    assert (used.name == "mine") == (home == "named by the user")


@pytest.mark.long
def test_compiling_on_a_cpu_leaves_nothing_in_the_shared_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(SMALL + "[compile]\nenable = true\n")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"):
        monkeypatch.delenv(name, raising=False)
    folders = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(temporary)}
    options = (
        "--job.config_file job.toml --job.dump_folder run --training.steps 1 --model.n_layers 1"
    )

    run_program(TITANLITE, "train", *options.split(), folder=tmp_path, variables=folders)

    assert list((tmp_path / "cache/titanlite-compiler/inductor").rglob("*.so"))
    assert os.listdir(temporary) == []
