"""Invariant 5: damage is detected, named and survived."""

import errno
import io
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_step_folders import reseal
from tiny_run import TinyRun, assert_equal, names, train_ranks, weights

from titanlite.checkpoint import dcp, step_folders
from titanlite.checkpoint.index import read_index
from titanlite.checkpoint.load_weights import load_model_weights
from titanlite.checkpoint.verify import verify
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "deleted", "flipped"])
def test_a_damaged_file_is_named_and_the_older_checkpoint_used(two_saved, file, damage):
    folder, _ = two_saved
    path = folder / "step-00000004" / file
    content = bytearray(path.read_bytes())
    if damage == "deleted":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    lines: list[str] = []
    run = TinyRun(seed=99)
    state = run.manager(folder, lines=lines).load()
    assert state is not None
    assert state["step"] == 2
    assert names(folder) == ["step-00000002", "step-00000004.damaged"]
    assert any("step-00000004 is DAMAGED" in line and file in line for line in lines)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to(path), "a symbolic link"),  # to itself
        (lambda path: path.symlink_to(f"../step-00000002/{path.name}"), "a symbolic link"),
    ],
    ids=["pipe", "folder", "circle", "link"],
)
def test_what_is_no_regular_file_is_damage_and_keeps_nobody_waiting(two_saved, file, make, found):
    folder, _ = two_saved
    path = folder / "step-00000004" / file
    path.unlink()
    make(path)
    assert [row["damage"] for row in verify(folder)["checkpoints"]] == [[], [f"{file}: {found}"]]
    state = TinyRun(seed=99).manager(folder).load()
    assert state is not None
    assert state["step"] == 2
    assert names(folder) == ["step-00000002", "step-00000004.damaged"]


def test_a_tensor_whose_chunks_are_gone_from_the_index_is_damage(two_saved):
    """DCP would leave it at its initial values, and say nothing."""
    folder, _ = two_saved
    path = folder / "step-00000004"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.norm.weight"].chunks.clear()
    reseal(path, index=pickle.dumps(metadata, 4))
    [_, row] = verify(folder)["checkpoints"]
    assert row["damage"] == [".metadata: model.norm.weight: its chunks do not cover it exactly once"]
    state = TinyRun(seed=99).manager(folder).load()
    assert state is not None
    assert state["step"] == 2


def another_dtype(path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.norm.weight"].properties.dtype = torch.bfloat16
    reseal(path, index=pickle.dumps(metadata, 4))


def garbage(path: Path) -> None:
    reseal(path, data=b"\xff" * (path / "__0_0.distcp").stat().st_size)


def garbage_at_the_end(path: Path) -> None:
    """The tensors before are good, and are in the model by the time that it is found."""
    data = (path / "__0_0.distcp").read_bytes()
    last = list(read_index(path)["model.output.weight"].chunks)[-1]
    reseal(path, data=data[: last.start] + b"\xff" * (len(data) - last.start))


def compressed(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    for place in (at.start() for at in re.finditer(b"PK\x01\x02", bytes(data))):
        data[place + 10] = zipfile.ZIP_DEFLATED
    reseal(path, data=bytes(data))


@pytest.mark.parametrize("alter", [another_dtype, garbage, garbage_at_the_end, compressed])
def test_a_file_whose_checksum_fits_but_which_holds_no_such_tensors_is_damage(two_saved, alter):
    folder, run = two_saved
    alter(folder / "step-00000004")
    [good, damaged] = verify(folder)["checkpoints"]
    assert good["state"] == "good"
    assert damaged["state"] == "damaged"
    assert damaged["damage"][0].startswith("__0_0.distcp: ")
    expected = TinyRun()
    expected.manager(folder, load_step=2).load()
    (folder / "step-00000004.superseded").rename(folder / "step-00000004")
    lines: list[str] = []
    model = Llama(run.model.arch)
    assert load_model_weights(folder, model, lines.append)["train_state"]["step"] == 2
    assert_equal(dict(model.state_dict()), weights(expected))
    assert re.search(r"step-00000004 is damaged: __0_0\.distcp: .*; taking an older one", lines[0])
    with pytest.raises(CheckpointError, match=r"step-00000004 is damaged: __0_0\.distcp"):
        load_model_weights(folder / "step-00000004", model)
    with pytest.raises(CheckpointError, match=r"load_step = 4 is damaged: __0_0\.distcp"):
        TinyRun(seed=99).manager(folder, load_step=4).load()
    again = TinyRun(seed=99)
    state = again.manager(folder, lines=lines).load()
    assert state is not None
    assert state["step"] == 2
    assert_equal(again.everything(), expected.everything())
    assert names(folder) == ["step-00000002", "step-00000004.damaged"]
    assert any(re.match(r"checkpoint step-00000004 is DAMAGED \(__0_0\.distcp: ", line) for line in lines)


def test_nothing_of_a_damaged_checkpoint_stays_where_the_older_one_has_no_optimizer(tmp_path):
    run = TinyRun()
    manager = run.manager(tmp_path)
    manager.save(0, run.train_state())
    run.train(2)
    manager.save(2, run.train_state())
    garbage_at_the_end(tmp_path / "step-00000002")
    again = TinyRun(seed=99)
    assert again.manager(tmp_path).load() is not None
    assert_equal(again.everything(), TinyRun().everything())
    again.step = 0
    assert again.train(4) == TinyRun().train(4)


def fall_back(folder: Path, alone: bool) -> tuple[int, list[str]]:
    """What a rank resumes from where the file that the last rank alone reads is broken, or its view of the index."""
    run, lines = TinyRun(seed=9), []
    if alone and dist.get_rank() == 1:
        read = dcp.read_index

        def broken(path: Path, *rest: Any):
            if path.name == "step-00000004":
                raise Damage(".metadata: seen by one rank alone")
            return read(path, *rest)

        dcp.read_index = broken
    manager = run.manager(folder, lines=lines)
    state = manager.load()
    manager.close()
    assert state is not None
    good = TinyRun(seed=8)
    other = good.manager(folder)
    other.load()
    other.close()
    assert_equal(run.everything(), good.everything())
    return state["step"], lines


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True], ids=["its file", "its view"])
def test_damage_that_one_rank_alone_sees_is_damage_for_all(tmp_path, alone):
    train_ranks(2, tmp_path, 0, 4)
    file = tmp_path / "step-00000004" / "__1_0.distcp"
    if not alone:
        reseal(file.parent, data=b"\xff" * file.stat().st_size, name=file.name)
    results = run_ranks(2, fall_back, tmp_path, alone)
    assert [step for step, _ in results] == [2, 2]
    assert names(tmp_path) == ["step-00000002", "step-00000004.damaged"]
    seen = ".metadata: seen by one" if alone else "__1_0.distcp: "
    assert any(f"step-00000004 is DAMAGED ({seen}" in line for line in results[0][1])


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
def test_a_file_that_cannot_be_read_now_stops_the_run_and_renames_nothing(two_saved, monkeypatch, file, code):
    folder, _ = two_saved
    before, opened = names(folder), os.open

    def refuse(path: Any, *arguments: Any, **keywords: Any) -> int:
        if str(path).endswith(f"step-00000004/{file}"):
            raise OSError(code, os.strerror(code))
        return opened(path, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert [row["state"] for row in verify(folder)["checkpoints"]] == ["good", "unreadable"]
        with pytest.raises(CheckpointError, match=f"{file} cannot be read: .*{os.strerror(code)}"):
            TinyRun().manager(folder).load()
    assert names(folder) == before
    state = TinyRun().manager(folder).load()
    assert state is not None
    assert state["step"] == 4


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError()], ids=repr)
def test_storage_or_memory_that_fails_while_tensors_are_read_is_no_damage(two_saved, monkeypatch, error):
    folder, _ = two_saved

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        if isinstance(error, OSError):
            patch.setattr(dcp, "open_file", lambda path: Failing(path, error))
        else:
            patch.setattr(torch, "load", fail)
        with pytest.raises(CheckpointError, match=r"step-00000004.* cannot be (read|loaded): .*Error"):
            TinyRun().manager(folder).load()
    assert names(folder) == ["step-00000002", "step-00000004"]


class Failing(io.FileIO):
    """A file of which nothing can be read."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(path)
        self._error = error

    def readinto(self, buffer: Any) -> int:
        raise self._error


def test_with_none_left_good_the_run_stops_now_and_at_the_next_start(two_saved):
    folder, _ = two_saved
    for path in step_folders.list_checkpoints(folder):
        (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no good checkpoint is left(?s:.*)step-00000002: .metadata: missing"):
        TinyRun().manager(folder).load()
    with pytest.raises(CheckpointError, match="set aside earlier"):  # never from scratch in silence
        TinyRun().manager(folder).load()


def test_load_step_that_is_absent_or_damaged_is_an_error(two_saved):
    folder, _ = two_saved
    with pytest.raises(CheckpointError, match=r"load_step = 3.*present: 2, 4"):
        TinyRun().manager(folder, load_step=3).load()
    (folder / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"load_step = 2 is damaged: __0_0.distcp: 0 bytes"):
        TinyRun().manager(folder, load_step=2).load()
    assert names(folder) == ["step-00000002", "step-00000004"]


def test_weights_from_a_damaged_or_absent_checkpoint_are_refused(two_saved):
    folder, run = two_saved
    (folder / "step-00000004" / "__0_0.distcp").write_bytes(b"")
    assert load_model_weights(folder, Llama(run.model.arch))["train_state"]["step"] == 2
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0\.distcp"):
        load_model_weights(folder / "step-00000004", Llama(run.model.arch))
    with pytest.raises(UserError, match="elsewhere: does not exist"):
        load_model_weights(folder / "elsewhere", Llama(run.model.arch))
