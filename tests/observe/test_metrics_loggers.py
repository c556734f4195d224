"""Weights & Biases and plugins written for version 0.2 log metrics."""

import os

import pytest
from ranks import run_small
from small_runs import read_losses, read_metrics

from titanlite.config.errors import UserError
from titanlite.load_run import load_run


def test_a_missing_wandb_package_is_an_error_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("titanlite.rules.find_spec", lambda name: None)
    with pytest.raises(UserError, match="enable_wandb = true"):
        load_run(f"--job.dump_folder {tmp_path}/out --metrics.enable_wandb".split(), 1)


@pytest.mark.slow
def test_wandb_receives_the_same_metrics_as_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = "--metrics.enable_wandb --training.steps 3 --checkpoint.no-enable"
    run_small(tmp_path / "out", options)

    (sent,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")

    assert b"train/loss" in sent.read_bytes()

    for loss in read_losses(tmp_path / "out").values():
        assert f"{loss:.7f}"[:6].encode() in sent.read_bytes()


def hide_key() -> None:
    os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": "online"}
    os.environ |= {"HOME": "/none", "NETRC": "/none"}


@pytest.mark.slow
def test_wandb_without_a_key_is_a_user_error(tmp_path):
    pytest.importorskip("wandb")
    output = run_small(tmp_path / "out", "--metrics.enable_wandb", before=hide_key, code=2)

    assert "metrics.enable_wandb" in output
    assert "WANDB_MODE=offline" in output


OLD_PLUGIN = """
from titanlite import register
from titanlite.observe.writers import RunStart, Writer


@register("writer", "table")
class Table(Writer):
    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        self.file = (start.folder / "table.txt").open("a")

    def logged(self, entry) -> None:
        numbers = [entry.loss_max, entry.clipped, entry.time_left, entry.utilization]
        self.file.write(" ".join(map(str, numbers)) + "\\n")

    def close(self) -> None:
        self.file.close()
"""


@pytest.mark.slow
def test_plugin_and_job_with_former_names_still_work(tmp_path, write_plugin):
    write_plugin("old_plugin", OLD_PLUGIN)
    options = "--job.plugins old_plugin --metrics.writers table --training.steps 2"

    output = run_small(tmp_path / "out", options)

    assert "metrics.loggers" in output
    assert 'loggers = ["table"]' in (tmp_path / "out" / "config.toml").read_text()

    names = ("loss_max_rank", "clip_fraction", "eta", "token_utilization")
    expected = []
    for entry in read_metrics(tmp_path / "out").values():
        expected.append(" ".join(str(entry[name]) for name in names))
    assert (tmp_path / "out" / "table.txt").read_text().splitlines() == expected
