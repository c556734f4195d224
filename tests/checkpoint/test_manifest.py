"""Invariant 5: checkpoints are published as a whole, and any damage is found."""

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import xxhash

from titanlite.checkpoint.find import load_newest, read_job, verify
from titanlite.checkpoint.manifest import (
    HashingFile,
    check_checkpoint,
    encode_manifest,
    list_checkpoints,
    publish_checkpoint,
    read_manifest,
    remove_unfinished,
    set_aside,
    step_folder_name,
)
from titanlite.cli import main
from titanlite.config.errors import CheckpointError, UserError

INFO = {"train_state": {"note": 3}, "job": None, "architecture": None, "versions": {}}
FILES = {"a.bin": b"weights" * 10, "b.bin": b"more"}


def write_checkpoint(folder: Path, step: int) -> Path:
    """Publish a checkpoint with two small files."""
    unfinished = folder / f".tmp-{step_folder_name(step)}-token"
    unfinished.mkdir(parents=True)
    entries = {}
    for name, content in FILES.items():
        with HashingFile(unfinished / name) as file:
            for start in range(0, len(content), 7):
                file.write(content[start : start + 7])
            # A sync of the descriptor must write the whole file.
            assert os.fstat(file.fileno()).st_size == len(content)
            entries[name] = file.entry()
    return publish_checkpoint(unfinished, step, entries, INFO)


def reseal(
    path: Path,
    body: dict[str, Any] | None = None,
    **contents: bytes,
) -> None:
    """Replace the manifest or files of a checkpoint, and update all checksums."""
    body = body or read_manifest(path)
    for name, content in contents.items():
        (path / name).write_bytes(content)
        body["files"][name] = {"size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    (path / "manifest.json").write_bytes(encode_manifest(body))


def damage_of(path: Path) -> list[str]:
    [row] = verify(path)["checkpoints"]
    assert (row["state"] == "good") == (not row["damage"])
    return row["damage"]


def states_of(path: Path) -> list[str]:
    return [checkpoint["state"] for checkpoint in verify(path)["checkpoints"]]


@pytest.mark.parametrize("name", ["a.bin", "manifest.json"])
def test_verify_finds_every_flipped_bit_and_every_truncation(tmp_path, name):
    path = write_checkpoint(tmp_path, 100)
    assert damage_of(path) == []
    assert read_manifest(path)["info"] == INFO

    content = (path / name).read_bytes()
    altered = [content + b"\0", b"[" * 10_000, *b'null [] {} {"checksum":1} \xff\xfe'.split()]
    for index, byte in enumerate(content):
        flipped = bytes([byte ^ 1 << index % 8])
        altered.append(content[:index] + flipped + content[index + 1 :])
        altered.append(content[:index])
    for data in altered:
        (path / name).write_bytes(data)
        assert [line.split(":")[0] for line in damage_of(path)] == [name]


@pytest.mark.parametrize("name", ["a.bin", "manifest.json"])
def test_verify_finds_missing_files_and_never_waits_for_a_pipe(tmp_path, name):
    path = write_checkpoint(tmp_path, 100)
    file = path / name
    file.rename(tmp_path / "elsewhere")

    assert damage_of(path) == [f"{name}: missing"]

    for create in (
        os.mkfifo,
        os.mkdir,
        lambda path: os.mknod(path, stat.S_IFSOCK),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("../elsewhere"),
    ):
        create(file)
        assert damage_of(path) == [f"{name}: not a regular file"]
        file.rmdir() if create is os.mkdir else file.unlink()


def test_manifest_of_another_step_is_damage_but_a_newer_format_is_not(tmp_path):
    path = write_checkpoint(tmp_path, 100)
    body = read_manifest(path)
    for name in ("../a.bin", "/etc/passwd"):
        files = body["files"] | {name: body["files"]["a.bin"]}
        reseal(path, body | {"files": files})
        assert damage_of(path) == ["manifest.json: files outside of the folder"]
    reseal(path, body | {"step": 99})

    assert damage_of(path) == ["manifest.json: belongs to step 99"]

    reseal(path, body | {"format": 9})
    with pytest.raises(CheckpointError, match="format 9 is unknown"):
        check_checkpoint(path)
    assert states_of(path) == ["unreadable"]


def test_an_empty_folder_from_an_interrupted_removal_is_ignored_and_replaced(tmp_path):
    write_checkpoint(tmp_path, 100)
    (tmp_path / "step-00000200").mkdir()

    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000100"]
    assert states_of(tmp_path) == ["good"]
    assert states_of(tmp_path / "step-00000200") == ["damaged"]

    write_checkpoint(tmp_path, 200)
    assert states_of(tmp_path) == ["good", "good"]


def test_nothing_is_published_over_an_existing_folder_or_without_all_files(tmp_path):
    path = write_checkpoint(tmp_path, 100)
    before = (path / "manifest.json").read_bytes()

    with pytest.raises(FileExistsError, match="exists already"):
        write_checkpoint(tmp_path, 100)
    assert (path / "manifest.json").read_bytes() == before
    with pytest.raises(OSError, match="do all nodes share this folder"):
        publish_checkpoint(path, 200, {"a.bin": {"size": 3, "xxh3_128": "00"}}, {})


def test_only_published_folders_are_checkpoints_and_only_leftovers_are_removed(tmp_path):
    expected = [write_checkpoint(tmp_path, step) for step in (7, 99_999_999, 100_000_000)]
    (tmp_path / "step-00000011").write_text("a file")
    others = ".tmp-step-00000009 step-9 step-00000009.damaged step-00000009-old notes step-abc"
    leftover = tmp_path / ".tmp-step-00000009-owner-1"
    for name in others.split():
        (tmp_path / name).mkdir()
    kept = set(os.listdir(tmp_path))
    leftover.mkdir()

    assert list_checkpoints(tmp_path) == expected
    assert list_checkpoints(tmp_path / "absent") == []

    lines: list[str] = []
    busy = OSError(16, "Device or resource busy", ".nfs0001")
    with patch.object(shutil, "rmtree", side_effect=busy):
        remove_unfinished(tmp_path, "owner", lines.append)

    assert leftover.exists()

    remove_unfinished(tmp_path, "owner", lines.append)
    assert ["Could not" in line for line in lines] == [True, False]
    assert set(os.listdir(tmp_path)) == kept


def test_verify_lists_checkpoints_unfinished_and_renamed_folders(tmp_path, capsys):
    good = write_checkpoint(tmp_path, 100)
    bad = write_checkpoint(tmp_path, 200)
    (bad / "b.bin").write_bytes(b"m0re")
    (tmp_path / ".tmp-step-00000300-x").mkdir()
    renamed = [set_aside(write_checkpoint(tmp_path, 7)).name for _ in range(2)]

    assert renamed == ["step-00000007.damaged", "step-00000007.damaged-2"]  # each is kept

    assert main(["verify", str(tmp_path)]) == 4

    output = capsys.readouterr()
    first_words = [line.split()[0] for line in output.out.splitlines()]

    assert first_words == [good.name, bad.name, "b.bin:", ".tmp-step-00000300-x", *renamed]
    assert output.err == "1 of 2 checkpoints damaged or unreadable: step-00000200\n"


def test_verify_prints_one_checkpoint_as_json(tmp_path, capsys):
    path = write_checkpoint(tmp_path, 100)
    size = sum(file.stat().st_size for file in path.iterdir())

    assert main(["verify", str(path), "--json"]) == 0

    row = {"name": path.name, "step": 100, "bytes": size, "state": "good", "damage": []}
    expected = {"folder": str(path), "checkpoints": [row], "unfinished": [], "set_aside": []}

    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.parametrize("name", ["elsewhere", "x" * 256])
def test_verify_rejects_a_path_that_does_not_exist(tmp_path, name):
    assert main(["verify", str(tmp_path / name)]) == 2


def test_path_of_a_run_resolves_to_its_newest_valid_checkpoint(tmp_path, monkeypatch):
    older = write_checkpoint(tmp_path / "saves", 100)
    newest = write_checkpoint(tmp_path / "final", 200)
    (tmp_path / "config.toml").write_text("unknown = 1")  # as of another version
    (tmp_path / "latest").symlink_to(newest)
    monkeypatch.chdir(newest)
    for name in ("../../latest", ".", "..", "../..", newest):
        assert load_newest(Path(name), Path) == newest
    names = [row["name"] for row in verify(tmp_path)["checkpoints"]]

    assert names == ["saves/step-00000100", "final/step-00000200"]

    (newest / "a.bin").unlink()
    lines: list[str] = []

    assert load_newest(tmp_path, Path, log=lines.append) == older
    assert lines == [f"{newest} is damaged: a.bin: missing; trying an older one"]

    os.truncate(tmp_path / "config.toml", 1 << 40)
    with pytest.raises(UserError, match=r"is\s+larger\s+than"):
        read_job(older)
