"""What Weights & Biases gets from each start of a run."""

import os
from pathlib import Path

import pytest
from ranks import start_small
from small_runs import losses

from titanlite.config.errors import UserError
from titanlite.load_run import load_run


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
