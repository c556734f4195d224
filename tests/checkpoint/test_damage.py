"""Invariant 5: damage is detected, named and survived."""

import os
import pickle

import pytest
import torch
from test_commit import reseal
from tiny_run import TinyRun, names

from titanlite.checkpoint import commit
from titanlite.checkpoint.manager import load_model_weights
from titanlite.checkpoint.verify import verify
from titanlite.config.errors import CheckpointError, UserError
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
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_damage_and_keeps_nobody_waiting(two_saved, file, make):
    folder, _ = two_saved
    path = folder / "step-00000004" / file
    path.unlink()
    make(path)
    assert [row["damage"] for row in verify(folder)["checkpoints"]] == [[], [f"{file}: not a regular file"]]
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


def test_a_tensor_that_its_file_holds_otherwise_than_the_index_says_is_never_loaded(two_saved):
    folder, run = two_saved
    path = folder / "step-00000004"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.norm.weight"].properties.dtype = torch.bfloat16
    reseal(path, index=pickle.dumps(metadata, 4))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: model\.norm\.weight: not the tensor of the index"):
        TinyRun(seed=99).manager(folder).load()
    with pytest.raises(CheckpointError, match="not the tensor of the index"):
        load_model_weights(path, Llama(run.model.arch))


@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json"])
def test_a_file_that_cannot_be_read_now_stops_the_run_and_renames_nothing(two_saved, file):
    folder, _ = two_saved
    path = folder / "step-00000004" / file
    aside = path.rename(folder / file)
    path.symlink_to(file)
    with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
        TinyRun().manager(folder).load()
    aside.rename(path)
    state = TinyRun().manager(folder).load()
    assert state is not None
    assert state["step"] == 4


def test_with_none_left_good_the_run_stops_now_and_at_the_next_start(two_saved):
    folder, _ = two_saved
    for path in commit.list_checkpoints(folder):
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
