"""Invariant 5: a checkpoint exists or it does not, and what it holds is what was written."""

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import xxhash

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.find import job_of, use_newest, verify
from titanlite.cli import main
from titanlite.config.errors import CheckpointError, UserError

INFO = {"train_state": {"note": 3}, "job": None, "architecture": None, "versions": {}}
FILES = {"a.bin": b"weights" * 10, "b.bin": b"more"}


def write_checkpoint(folder: Path, step: int) -> Path:
    """A published checkpoint with two small files."""
    unfinished = folder / f".tmp-{step_folders.step_name(step)}-token"
    unfinished.mkdir(parents=True)
    entries = {}
    for name, content in FILES.items():
        with step_folders.HashingFile(unfinished / name) as file:
            for start in range(0, len(content), 7):
                file.write(content[start : start + 7])
            assert os.fstat(file.fileno()).st_size == len(content)  # what is synced to the disk is the whole file
            entries[name] = file.entry()
    return step_folders.publish(unfinished, step, entries, INFO)


def reseal(path: Path, body: dict[str, Any] | None = None, **contents: bytes) -> None:
    """Put another manifest or other files into a checkpoint, with all checksums as if it had been written so."""
    body = body or step_folders.read_manifest(path)
    for name, content in contents.items():
        (path / name).write_bytes(content)
        body["files"][name] = {"size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    (path / "manifest.json").write_bytes(step_folders.encode_manifest(body))


def damage_of(path: Path) -> list[str]:
    [row] = verify(path)["checkpoints"]
    assert (row["state"] == "good") == (not row["damage"])
    return row["damage"]


@pytest.mark.parametrize("name", ["a.bin", "b.bin", "manifest.json"])
def test_every_flipped_bit_and_every_truncation_is_found_and_named(tmp_path, name):
    path = write_checkpoint(tmp_path, 100)
    assert damage_of(path) == []
    assert step_folders.read_manifest(path)["info"] == INFO
    content = (path / name).read_bytes()
    flipped = [content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :] for i in range(len(content))]
    others = [b"", b"null", b"[]", b"{}", b'{"checksum": 1}', b"\xff\xfe", b"[" * 10_000]
    for altered in [*flipped, *(content[:size] for size in range(len(content))), content + b"\0", *others]:
        (path / name).write_bytes(altered)
        assert [line.split(":")[0] for line in damage_of(path)] == [name]
    (path / name).unlink()
    assert damage_of(path) == [f"{name}: missing"]
    for make in (os.mkfifo, os.mkdir, lambda path: os.mknod(path, stat.S_IFSOCK), lambda path: path.symlink_to(path)):
        make(path / name)
        assert damage_of(path) == [f"{name}: not a regular file"]  # and nobody waits for a pipe
        os.rmdir(path / name) if (path / name).is_dir() else os.unlink(path / name)
    (tmp_path / "elsewhere").write_bytes(content)
    (path / name).symlink_to("../elsewhere")
    assert damage_of(path) == [f"{name}: not a regular file"]


def test_a_manifest_of_another_step_or_folder_is_damage_and_a_newer_format_is_not(tmp_path):
    path = write_checkpoint(tmp_path, 100)
    body = step_folders.read_manifest(path)
    for name in ("../a.bin", "/etc/passwd"):
        reseal(path, body | {"files": {**body["files"], name: body["files"]["a.bin"]}})
        assert damage_of(path) == ["manifest.json: files outside of the folder"]
    reseal(path, body | {"step": 99})
    assert damage_of(path) == ["manifest.json: belongs to step 99"]
    reseal(path, body | {"format": 9})
    with pytest.raises(CheckpointError, match="format 9 is unknown to this version, which reads up to 2"):
        step_folders.check_folder(path)
    assert verify(path)["checkpoints"][0]["state"] == "unreadable"


def test_nothing_is_published_over_an_existing_folder_or_without_all_files(tmp_path):
    path = write_checkpoint(tmp_path, 100)
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(FileExistsError, match="exists already"):
        write_checkpoint(tmp_path, 100)
    assert (path / "manifest.json").read_bytes() == before
    with pytest.raises(OSError, match="do all nodes share this folder"):
        step_folders.publish(path, 200, {"a.bin": {"size": 3, "xxh3_128": "00"}}, {})


def test_only_published_folders_are_checkpoints_and_only_leftovers_are_removed(tmp_path, monkeypatch):
    expected = [write_checkpoint(tmp_path, step) for step in (7, 99_999_999, 100_000_000)]
    others = ("step-9", "step-00000009.damaged", "step-00000009-old", "notes", "step-abc")
    for name in (".tmp-step-00000009-x", *others):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000011").write_text("a file")
    assert step_folders.list_checkpoints(tmp_path) == expected
    assert step_folders.list_checkpoints(tmp_path / "absent") == []
    lines: list[str] = []
    with monkeypatch.context() as patch:
        busy = OSError(16, "Device or resource busy", ".nfs0001")
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(busy))
        step_folders.remove_unfinished(tmp_path, lines.append)
    step_folders.remove_unfinished(tmp_path, lines.append)
    assert ["could not" in line for line in lines] == [True, False]
    assert set(os.listdir(tmp_path)) == {*others, "step-00000011", *(path.name for path in expected)}


def test_verify_lists_all_of_a_folder_and_what_is_no_checkpoint(tmp_path, capsys):
    good, bad = write_checkpoint(tmp_path, 100), write_checkpoint(tmp_path, 200)
    size = sum(file.stat().st_size for file in good.iterdir())
    assert main(["verify", str(good), "--json"]) == 0
    row = {"name": good.name, "step": 100, "bytes": size, "state": "good", "damage": []}
    found = json.loads(capsys.readouterr().out)
    assert found == {"folder": str(good), "checkpoints": [row], "unfinished": [], "set_aside": []}
    (bad / "b.bin").write_bytes(b"m0re")
    (tmp_path / ".tmp-step-00000300-x").mkdir()
    set_aside = [step_folders.set_aside(write_checkpoint(tmp_path, 7)).name for _ in range(2)]
    assert set_aside == ["step-00000007.damaged", "step-00000007.damaged-2"]  # each is kept
    assert main(["verify", str(tmp_path)]) == 4
    out = capsys.readouterr()
    first = [line.split()[0] for line in out.out.splitlines()]
    assert first == [good.name, bad.name, "b.bin:", ".tmp-step-00000300-x", *set_aside]
    assert out.err == "1 of 2 checkpoints damaged or unreadable: step-00000200\n"
    for wrong, code in (("elsewhere", 2), ("x" * 256, 2), ("empty", 4)):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert main(["verify", str(tmp_path / wrong)]) == code


def test_a_folder_stands_for_its_newest_good_checkpoint_by_any_of_its_names(tmp_path, monkeypatch):
    older = write_checkpoint(tmp_path / "saves", 100)
    newest = write_checkpoint(tmp_path / "final", 200)
    (tmp_path / "config.toml").write_text("unknown = 1")  # as of another version
    (tmp_path / "latest").symlink_to(newest)
    monkeypatch.chdir(newest)
    for name in ("../../latest", ".", "..", "../..", newest):
        assert use_newest(Path(name), Path) == newest
    assert [row["name"] for row in verify(tmp_path)["checkpoints"]] == ["saves/step-00000100", "final/step-00000200"]
    (newest / "a.bin").unlink()
    lines: list[str] = []
    assert use_newest(tmp_path, Path, log=lines.append) == older
    assert lines == [f"{newest} is damaged: a.bin: missing; taking an older one"]
    os.truncate(tmp_path / "config.toml", 1 << 40)
    with pytest.raises(UserError, match=r"is\s+larger\s+than"):
        job_of(older)
