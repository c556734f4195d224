"""Writers: how one of a user's own is added, and what Weights & Biases gets from each start of a run."""

import functools
import os
import re
import sys
from pathlib import Path

import pytest
from ranks import start_small
from small_runs import losses

from titanlite.config.errors import UserError
from titanlite.load_run import load_run

PAGE = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text()
OWN_WRITER = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class LossTable" in block)
ENTRY_POINTS = """[titanlite.writers]
loss_table = loss_table:LossTable
plain = loss_table:csv
uninstalled = missing_module:Writer
"""


@pytest.fixture
def own_package(tmp_path: Path) -> str:
    """The folder of an installed package that offers writers."""
    folder = tmp_path / "installed"
    described = folder / "mine-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0")
    (described / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "loss_table.py").write_text(OWN_WRITER)
    return str(folder)


def install(folder: str) -> None:
    sys.path.insert(0, folder)


@pytest.mark.slow
def test_a_writer_of_an_installed_package_needs_no_change_elsewhere(own_package: str, tmp_path: Path):
    words = ["--training.steps", 3, "--checkpoint.no-enable", "--metrics.writers", "loss_table"]
    start_small(tmp_path / "out", *words, before=functools.partial(install, own_package)).ends_with(0)
    table = [line.split(",") for line in (tmp_path / "out" / "loss.csv").read_text().splitlines()]
    assert {int(step): float(loss) for step, loss in table} == losses(tmp_path / "out")


@pytest.mark.parametrize(
    ("named", "problem"),
    [("los_table", "loss_table, plain"), ("plain", "observe.writers.Writer"), ("uninstalled", "missing_module")],
)
def test_a_writer_that_cannot_be_used_is_refused_before_the_start(
    own_package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, problem: str
):
    monkeypatch.syspath_prepend(own_package)
    with pytest.raises(UserError, match=r"(?s)metrics\.writers.*" + problem):
        load_run(["--job.dump_folder", str(tmp_path / "out"), "--metrics.writers", named], 1)


def test_wandb_that_is_not_installed_is_said_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titanlite.load_run.find_spec", lambda name: None)
    with pytest.raises(UserError, match="enable_wandb = true"):
        load_run(["--job.dump_folder", str(tmp_path / "out"), "--metrics.enable_wandb"], 1)


@pytest.mark.slow
def test_wandb_gets_what_tensorboard_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["--metrics.enable_wandb", "--training.steps", 3, "--checkpoint.no-enable"]
    start_small(tmp_path / "out", *words).ends_with(0)
    (sent,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"1_loss/train" in sent.read_bytes()
    for loss in losses(tmp_path / "out").values():
        assert f"{loss:.7f}"[:6].encode() in sent.read_bytes()


def without_key() -> None:
    os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": "/none", "NETRC": "/none", "WANDB_MODE": "online"}


@pytest.mark.slow
def test_wandb_without_a_key_is_a_mistake_of_the_user(tmp_path: Path):
    pytest.importorskip("wandb")
    said = start_small(tmp_path / "out", "--metrics.enable_wandb", before=without_key).ends_with(2)
    assert "metrics.enable_wandb" in said
    assert "WANDB_MODE=offline" in said
