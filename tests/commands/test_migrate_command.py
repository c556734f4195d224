"""`titanlite migrate` writes the new file, or prints it, and says what became of each key."""

import os
from pathlib import Path

import pytest
from config.torchtitan_jobs import OF_02

from titanlite import cli
from titanlite.config.migrate import migrate

NEW = migrate(OF_02, "old.toml").text


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("old.toml").write_text(OF_02)
    return tmp_path


def test_the_file_is_written_and_the_report_names_each_key(here: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["migrate", "old.toml", "--out", "made/new.toml"]) == 0
    assert (here / "made/new.toml").read_text() == NEW
    assert os.listdir(here / "made") == ["new.toml"]
    said = capsys.readouterr().out
    assert said.startswith("Wrote made/new.toml: 30 keys as they were. The old one is read as a job of torchtitan 0.2")
    assert "  model.hf_assets_path -> tokenizer.path\n" in said
    assert "  profiling.save_traces_folder\n" in said
    assert said.endswith("Now: titanlite check --job.config_file made/new.toml --world-size N\n")


def test_without_out_the_new_file_alone_goes_to_standard_output(here: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["migrate", "old.toml"]) == 0
    out, err = capsys.readouterr()
    assert out == NEW
    assert "Left out:" in err
    assert os.listdir(here) == ["old.toml"]


def test_a_file_is_replaced_only_when_told_and_by_a_whole_one(here: Path, capsys: pytest.CaptureFixture[str]):
    Path("new.toml").write_text("mine")
    assert cli.main(["migrate", "old.toml", "--out", "new.toml"]) == 2
    assert Path("new.toml").read_text() == "mine"
    assert cli.main(["migrate", "old.toml", "--out", "new.toml", "--overwrite"]) == 0
    assert Path("new.toml").read_text() == NEW
    assert cli.main(["migrate", "old.toml", "--out", "old.toml", "--overwrite"]) == 0
    assert Path("old.toml").read_text() == NEW


def test_the_version_can_be_told(here: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["migrate", "old.toml", "--torchtitan-version", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert "rope_scaling_factor = 1.0" in out
    assert "are not scaled" in err
