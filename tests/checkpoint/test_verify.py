import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from test_step_folders import write_checkpoint

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.find import saved_job, use_newest
from titanlite.checkpoint.verify import verify
from titanlite.cli import main
from titanlite.config.errors import CheckpointError, UserError


def test_all_checkpoints_of_a_folder_are_listed_with_their_state(tmp_path, capsys):
    write_checkpoint(tmp_path, 100)
    bad = write_checkpoint(tmp_path, 200)
    (bad / "b.bin").write_bytes(b"m0re")
    (tmp_path / ".tmp-step-00000300-x").mkdir()
    shutil.copytree(bad, tmp_path / "step-00000050.damaged")
    assert main(["verify", str(tmp_path)]) == 4
    out = capsys.readouterr()
    assert [line.split()[0] for line in out.out.splitlines()] == [
        "step-00000100",
        "step-00000200",
        "b.bin:",
        ".tmp-step-00000300-x",
        "step-00000050.damaged",
    ]
    assert out.err == "1 of 2 checkpoints damaged or unreadable: step-00000200\n"


def test_json_is_one_object_and_nothing_else(tmp_path, capsys):
    path = write_checkpoint(tmp_path, 100)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert main(["verify", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(tmp_path),
        "checkpoints": [{"name": "step-00000100", "step": 100, "bytes": size, "state": "good", "damage": []}],
        "unfinished": [],
        "set_aside": [],
    }


def test_what_a_run_removes_meanwhile_is_left_out(tmp_path, monkeypatch):
    first, second = write_checkpoint(tmp_path, 100), write_checkpoint(tmp_path, 200)
    verify_folder = step_folders.verify_folder
    monkeypatch.setattr(
        step_folders,
        "verify_folder",
        lambda path: (path == first and step_folders.remove(path), verify_folder(path))[1],
    )
    assert [row["name"] for row in verify(tmp_path)["checkpoints"]] == [second.name]


def test_what_cannot_be_read_is_listed_and_not_called_damaged(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path, 100)
    opened = os.open

    def refuse(name, *arguments, **keywords):
        if name == path / "a.bin":
            raise OSError(errno.ESTALE, "Stale file handle")
        return opened(name, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    write_checkpoint(tmp_path, 200)
    assert [row["state"] for row in verify(tmp_path)["checkpoints"]] == ["unreadable", "good"]
    assert main(["verify", str(tmp_path)]) == 4


def test_a_link_to_a_step_folder_and_the_current_folder_are_one(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path, 100)
    (tmp_path / "latest").symlink_to(path.name)
    monkeypatch.chdir(path)
    for name in ("../latest", "."):
        assert verify(Path(name))["checkpoints"][0]["name"] == path.name
        assert use_newest(Path(name), Path) == path


def test_one_step_folder_can_be_verified_and_an_empty_folder_cannot(tmp_path):
    path = write_checkpoint(tmp_path, 100)
    assert verify(path)["checkpoints"][0]["state"] == "good"
    with pytest.raises(UserError, match="elsewhere: does not exist"):
        verify(tmp_path / "elsewhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        verify(tmp_path / "empty")


def test_a_runs_output_folder_stands_for_its_checkpoints_and_its_last_weights(tmp_path):
    write_checkpoint(tmp_path / "saves", 100)
    newest = write_checkpoint(tmp_path / "final", 200)
    (tmp_path / "config.toml").write_text('[checkpoint]\nfolder = "saves"\nunknown = 1\n')  # as of another version
    assert [row["name"] for row in verify(tmp_path)["checkpoints"]] == ["saves/step-00000100", "final/step-00000200"]
    assert use_newest(tmp_path, Path) == newest
    (newest / "a.bin").unlink()
    lines: list[str] = []
    assert use_newest(tmp_path, Path, log=lines.append) == tmp_path / "saves" / "step-00000100"
    assert lines == [f"{newest} is damaged: a.bin: missing; taking an older one"]


@pytest.mark.parametrize("config", ["[checkpoint", "checkpoint = 1", "checkpoint.folder = 1", "x = " + "[" * 10**5])
def test_a_configuration_that_says_nothing_of_checkpoints_is_a_mistake(tmp_path, config):
    (tmp_path / "config.toml").write_text(config)
    with pytest.raises(UserError, match=r"config\.toml cannot be read"):
        use_newest(tmp_path, Path)


def test_a_configuration_of_any_size_takes_no_memory(tmp_path):
    path = write_checkpoint(tmp_path / "checkpoint", 100)
    (tmp_path / "config.toml").touch()
    os.truncate(tmp_path / "config.toml", 1 << 40)
    with pytest.raises(UserError, match=r"config\.toml cannot be read"):
        use_newest(tmp_path, Path)
    with pytest.raises(UserError, match=r"is\s+larger\s+than\s+4,194,304"):
        saved_job(path)


def test_a_name_that_no_system_takes_is_a_mistake(capsys):
    assert main(["verify", "x" * 256]) == 2
    assert "is no path: File name too long" in capsys.readouterr().err
