"""Invariant 5: a checkpoint exists or it does not."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlite.checkpoint import manifest, step_folders
from titanlite.config.errors import CheckpointError

INFO = {
    "train_state": {"note": 3},
    "job": None,
    "architecture": None,
    "optimizer_groups": [],
    "layout": {"world_size": 1, "meshes": {}},
    "versions": {},
}


def archive(values: bytes) -> bytes:
    """What torch writes of a tensor of bytes."""
    buffer = io.BytesIO()
    torch.save(torch.frombuffer(bytearray(values), dtype=torch.uint8), buffer)
    return buffer.getvalue()


def index_of(files: dict[str, bytes], sizes: dict[str, int]) -> bytes:
    """DCP's index of a tensor of bytes in each of `files`."""
    tensors, places = {}, {}
    for name, content in files.items():
        size = torch.Size([sizes[name]])
        chunk = ChunkStorageMetadata(torch.Size([0]), size)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=torch.uint8), size, [chunk])
        places[MetadataIndex(name, [0])] = _StorageInfo(name, 0, len(content))
    return pickle.dumps(Metadata(tensors, storage_data=places), protocol=4)


def write_checkpoint(folder: Path, step: int, files: dict[str, bytes] | None = None) -> Path:
    """A published checkpoint of two small tensors; or of `files` with any bytes, which are no tensors."""
    values = files or {"a.bin": b"weights" * 100, "b.bin": b"more"}
    files = files or {name: archive(content) for name, content in values.items()}
    unfinished = folder / step_folders.unfinished_name(step, "token")
    unfinished.mkdir(parents=True)
    digests = []
    for name, content in {
        **files,
        ".metadata": index_of(files, {name: len(content) for name, content in values.items()}),
    }.items():
        file = step_folders.HashingFile(unfinished / name)
        for start in range(0, len(content), 7):
            file.write(content[start : start + 7])
        file.close()
        digests.append(file.digest())
    return step_folders.publish(unfinished, step, digests, INFO)


def reseal(
    path: Path,
    body: dict[str, Any] | None = None,
    index: bytes | None = None,
    data: bytes | None = None,
    name: str = "__0_0.distcp",
) -> None:
    """Put another manifest, index or data file into a checkpoint, with all checksums as if it had been written so."""
    body = body or manifest.read_manifest(path)
    for file, content in ((".metadata", index), (name, data)):
        if content is not None:
            (path / file).write_bytes(content)
            body["files"][file] = {"size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    (path / "manifest.json").write_bytes(manifest.encode_manifest(body))


def test_a_published_checkpoint_is_good_and_keeps_the_callers_value(tmp_path):
    path = write_checkpoint(tmp_path, 100)
    assert path.name == "step-00000100"
    assert step_folders.verify_folder(path) == []
    assert step_folders.read_manifest(path)["info"] == INFO
    assert step_folders.list_checkpoints(tmp_path) == [path]
    assert os.listdir(tmp_path) == ["step-00000100"]


@pytest.mark.parametrize("name", ["a.bin", "b.bin", "manifest.json"])
def test_a_flipped_bit_anywhere_in_any_file_is_detected(tmp_path, name):
    path = write_checkpoint(tmp_path, 100, {"a.bin": b"w" * 40, "b.bin": b"x"})
    content = (path / name).read_bytes()
    for position in range(len(content)):
        for bit in (position % 8, (position + 5) % 8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            (path / name).write_bytes(flipped)
            damage = step_folders.verify_folder(path)
            assert len(damage) == 1
            assert damage[0].startswith(name), damage
    (path / name).write_bytes(content)
    assert step_folders.verify_folder(path) == []


@pytest.mark.parametrize("name", ["a.bin", "b.bin", "manifest.json"])
def test_every_truncation_and_a_deletion_is_detected(tmp_path, name):
    path = write_checkpoint(tmp_path, 100, {"a.bin": b"w" * 40, "b.bin": b"x"})
    content = (path / name).read_bytes()
    for size in range(len(content)):
        (path / name).write_bytes(content[:size])
        assert [line.split(":")[0] for line in step_folders.verify_folder(path)] == [name]
    (path / name).unlink()
    assert [line.split(":")[0] for line in step_folders.verify_folder(path)] == [name]


def test_a_newer_format_is_not_called_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 2)
    path = write_checkpoint(tmp_path, 100)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 2 is unknown to this version, which reads 1"):
        step_folders.verify_folder(path)


def test_a_checkpoint_under_another_steps_name_is_damaged(tmp_path):
    path = write_checkpoint(tmp_path, 100)
    assert step_folders.verify_folder(path.rename(tmp_path / "step-00000200")) == ["manifest.json: belongs to step 100"]


def test_nothing_is_published_over_an_existing_folder(tmp_path):
    path = write_checkpoint(tmp_path, 100)
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(FileExistsError, match="exists already"):
        write_checkpoint(tmp_path, 100, {"a.bin": b"other"})
    assert (path / "manifest.json").read_bytes() == before


def test_what_is_synced_to_the_disk_is_the_whole_file(tmp_path):
    file = step_folders.HashingFile(tmp_path / "a.bin")
    file.write(b"less than a buffer")
    assert os.fstat(file.fileno()).st_size == file.tell() == 18


def test_publishing_needs_every_file_in_its_full_size(tmp_path):
    unfinished = tmp_path / ".tmp-step-00000100-x"
    unfinished.mkdir()
    with pytest.raises(OSError, match="do all nodes share this folder"):
        step_folders.publish(unfinished, 100, [step_folders.FileDigest("a.bin", 3, "00")], {})


def test_foreign_unfinished_and_set_aside_folders_are_no_checkpoints(tmp_path):
    good = write_checkpoint(tmp_path, 7)
    for name in (".tmp-step-00000009-x", "step-9", "step-00000009.damaged", "step-00000009-old", "notes", "step-abc"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000011").write_text("a file")
    assert step_folders.list_checkpoints(tmp_path) == [good]
    assert step_folders.list_checkpoints(tmp_path / "absent") == []


def test_checkpoints_are_ordered_by_step_beyond_eight_digits(tmp_path):
    steps = [99_999_999, 100_000_000, 5]
    for step in steps:
        write_checkpoint(tmp_path, step)
    assert [step_folders.step_of(path) for path in step_folders.list_checkpoints(tmp_path)] == sorted(steps)


def test_only_leftovers_are_removed_at_start(tmp_path):
    write_checkpoint(tmp_path, 7)
    (tmp_path / ".tmp-step-00000009-x").mkdir()
    (tmp_path / ".tmp-step-00000009-x" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    assert step_folders.remove_unfinished(tmp_path) == ([".tmp-step-00000009-x"], [])
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-00000007"]


def test_a_leftover_that_cannot_be_removed_is_named_and_passed_over(tmp_path, monkeypatch):
    for name in (".tmp-step-00000007-x", ".tmp-step-00000009-y"):
        (tmp_path / name).mkdir()
    rmtree = step_folders.shutil.rmtree

    def busy(path):
        if path.name.endswith("x"):
            raise OSError(16, "Device or resource busy", ".nfs0001")
        rmtree(path)

    monkeypatch.setattr(step_folders.shutil, "rmtree", busy)
    gone, kept = step_folders.remove_unfinished(tmp_path)
    assert gone == [".tmp-step-00000009-y"]
    assert kept == [
        "could not remove the unfinished .tmp-step-00000007-x: [Errno 16] Device or resource busy: '.nfs0001'"
    ]


def test_a_removal_cut_short_leaves_no_partial_checkpoint(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path, 7)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(step_folders.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        step_folders.remove(path)
    monkeypatch.undo()
    assert step_folders.list_checkpoints(tmp_path) == []
    assert len(step_folders.remove_unfinished(tmp_path)[0]) == 1
    assert os.listdir(tmp_path) == []


def test_setting_aside_keeps_every_earlier_one(tmp_path):
    names = [step_folders.set_aside(write_checkpoint(tmp_path, 7)).name for _ in range(3)]
    assert names == ["step-00000007.damaged", "step-00000007.damaged-2", "step-00000007.damaged-3"]
    assert [path.name for path in step_folders.list_set_aside(tmp_path)] == names


@pytest.mark.parametrize("key", ["a.bin", ".metadata"])
def test_manifest_and_index_name_the_same_files(tmp_path, key):
    path = write_checkpoint(tmp_path, 100)
    body = manifest.read_manifest(path)
    del body["files"][key]
    reseal(path, body)
    expected = {
        "a.bin": f".metadata: a.bin holds {len(archive(b'weights' * 100))} bytes by the index, nothing by the manifest",
        ".metadata": "manifest.json: does not list .metadata",
    }
    assert step_folders.verify_folder(path) == [expected[key]]
    body["files"]["a.bin"] = {"size": 3, "xxh3_128": "0" * 32}
    body["files"]["more.bin"] = {"size": 3, "xxh3_128": "0" * 32}
    reseal(path, body, index_of({"b.bin": b"more"}, {"b.bin": 4}))
    assert ".metadata: a.bin holds nothing by the index, 3 bytes by the manifest" in step_folders.verify_folder(path)
