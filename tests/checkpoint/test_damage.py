"""Invariants 5 and 11: damage is found, named and survived, and loading a checkpoint runs nothing of it."""

import os
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ranks import run_ranks
from test_step_folders import reseal
from tiny_run import WAS_HERE, Malicious, TinyRun, assert_equal, load_model_weights, names, weights
from torch.distributed.checkpoint.metadata import Metadata

from titanlite.checkpoint import step_folders
from titanlite.config.errors import CheckpointError, UserError
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")

FILES = ["__0_0.distcp", ".metadata", "manifest.json"]


def resumed_step(folder: Path, lines: list[str] | None = None) -> int:
    manager = TinyRun(seed=99).manager(folder, lines=lines)
    state = manager.load()
    manager.close()
    return state["step"]


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_the_older_checkpoint_used(two_saved, file):
    folder, run = two_saved
    path = folder / "step-00000004" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    lines, model = [], Llama(run.model.arch)
    assert load_model_weights(folder, model, lines.append)["train_state"]["step"] == 2
    assert f"step-00000004 is damaged: {file}" in lines[0]
    with pytest.raises(CheckpointError, match=f"step-00000004 is damaged: {file}"):
        load_model_weights(path.parent, model)
    assert resumed_step(folder, lines) == 2
    assert names(folder) == ["step-00000002", "step-00000004.damaged"]
    assert any(f"step-00000004 is DAMAGED ({file}" in line for line in lines)
    path.parent.with_suffix(".damaged").rename(path.parent)
    with pytest.raises(CheckpointError, match=f"load_step = 4(?s:.*)step-00000004: {file}"):
        TinyRun().manager(folder, load_step=4).load()  # never another one in place of it


def save_twice(folder: Path) -> None:
    run = TinyRun()
    manager = run.manager(folder)
    manager.save(2, run.train_state(2))
    manager.save(4, run.train_state(4))
    manager.close()


@pytest.mark.slow
def test_damage_that_one_rank_alone_reads_is_damage_for_all(tmp_path):
    run_ranks(2, save_twice, tmp_path)
    file = tmp_path / "step-00000004" / "__1_0.distcp"
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert run_ranks(2, resumed_step, tmp_path) == [2, 2]
    assert names(tmp_path) == ["step-00000002", "step-00000004.damaged"]


def test_a_file_that_cannot_be_read_now_stops_the_run_and_renames_nothing(two_saved, monkeypatch):
    folder, _ = two_saved
    before, opened, stale = names(folder), os.open, Mock(side_effect=OSError(116, "Stale file handle"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, *a: (stale if "4/__0_0" in str(path) else opened)(path, *a))
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read: .*Stale file handle"):
            TinyRun().manager(folder).load()
    assert names(folder) == before
    assert resumed_step(folder) == 4


def test_with_none_left_good_the_run_stops_now_and_at_the_next_start(two_saved):
    folder, _ = two_saved
    for path in step_folders.list_checkpoints(folder):
        (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no good checkpoint is left(?s:.*)step-00000002: .metadata: missing"):
        TinyRun().manager(folder).load()
    with pytest.raises(CheckpointError, match="set aside earlier"):  # never from scratch in silence
        TinyRun().manager(folder).load()


@pytest.mark.parametrize("place", [{"step": 4, "rows": [10**12]}, {"step": 4, "rows": [257]}, {"step": 5, "rows": [8]}])
def test_rows_that_no_run_comes_to_are_not_resumed_from(tmp_path, place):
    run = TinyRun()
    manager = run.manager(tmp_path)
    for step, schedule in ((2, {"step": 2, "rows": [8]}), (4, place)):
        manager.save(step, {"step": step, "tokens": 64 * step, "data": {"version": 2, "schedule": schedule}})
    assert resumed_step(tmp_path) == 2


class Nested:
    def __reduce__(self):
        return getattr, (torch.Size, "mro")


def leave_the_folder(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = f"../step-00000002/{place.relative_path}"


# The instruction BUILD on a class would change it for the whole process.
CHANGE_TORCH = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x07planted\x88s\x86b."


@pytest.mark.parametrize(
    ("alter", "found"),
    [
        (lambda index: vars(index).update(planner_data=Malicious()), r"posix\.system, which has no place"),
        (lambda index: vars(index).update(planner_data=Nested()), r"builtins\.getattr, which has no place"),
        (lambda index: vars(index).update(planner_data=torch.nn.Linear), r"Linear, which has no place"),
        (leave_the_folder, r"__0_0\.distcp is no file of this folder"),
        # DCP would leave the weight as it was, and say nothing
        (
            lambda index: index.state_dict_metadata["model.norm.weight"].chunks.clear(),
            r"norm\.weight: its parts do not",
        ),
        (lambda _: CHANGE_TORCH, ""),
    ],
)
def test_an_index_with_good_checksums_runs_nothing_and_leaves_the_folder_nowhere(two_saved, alter, found):
    folder, run = two_saved
    path = folder / "step-00000004"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    reseal(path, None, **{".metadata": alter(metadata) or pickle.dumps(metadata, 4)})
    for load in (lambda: load_model_weights(folder, Llama(run.model.arch)), TinyRun().manager(folder).load):
        with pytest.raises(CheckpointError, match=f"metadata cannot be read: .*{found}"):
            load()
    assert not WAS_HERE.exists()
    assert not hasattr(Metadata, "planted")


@pytest.mark.parametrize("content", [Malicious(), {"a": 1}])
def test_a_file_of_tensors_with_good_checksums_runs_nothing(two_saved, content):
    """And nobody is told how to load it all the same."""
    folder, run = two_saved
    path = folder / "step-00000004" / "__0_0.distcp"
    size = path.stat().st_size
    torch.save(content, path)
    reseal(path.parent, **{path.name: path.read_bytes().ljust(size, b"\0")})
    metadata = pickle.loads((path.parent / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, path.stat().st_size
    reseal(path.parent, None, **{".metadata": pickle.dumps(metadata, 4)})
    with pytest.raises(CheckpointError, match="step-00000004 cannot be loaded") as caught:
        load_model_weights(folder, Llama(run.model.arch))
    assert "can still be loaded" not in str(caught.value)
    assert not WAS_HERE.exists()


def test_weights_that_are_not_finite_are_named_when_they_are_loaded(tmp_path):
    run = TinyRun()
    model: Any = run.model
    model.layers["1"].attention.wq.weight.data[3, 5] = float("nan")
    model.norm.weight.data[0] = float("inf")
    run.manager(tmp_path / "old").save(1, run.train_state(1))
    for load in (
        TinyRun().manager(tmp_path / "old").load,
        TinyRun().manager(tmp_path / "new", initial_load_path=str(tmp_path / "old")).load,
        lambda: load_model_weights(tmp_path / "old", Llama(run.model.arch)),
    ):
        with pytest.raises(CheckpointError, match=r"not finite .*:\n.*layers\.1\.attention\.wq\.weight\n.*norm\."):
            load()


def test_weights_alone_load_into_a_model_and_into_a_new_run(two_saved, tmp_path):
    folder, run = two_saved
    model, fresh, lines = Llama(run.model.arch), TinyRun(seed=99), []
    load_model_weights(folder / "step-00000004", model)
    assert_equal(dict(model.state_dict()), weights(run))
    with pytest.raises(UserError, match="elsewhere: does not exist"):
        load_model_weights(folder / "elsewhere", model)
    manager = fresh.manager(tmp_path / "new", lines=lines, initial_load_path=str(folder))
    assert manager.load() is None
    assert lines[-1] == f"starting from the weights in {folder / 'step-00000004'}"
    assert_equal(weights(fresh), weights(run))
    assert not any(value.any() for state in fresh.optimizer.state.values() for value in state.values())
    fresh.train(1)
    manager.save(1, fresh.train_state())
    resumed = TinyRun(seed=98)  # once there is something to resume, the initial weights are not read again
    assert resumed.manager(tmp_path / "new", initial_load_path="nowhere").load() is not None
    assert_equal(resumed.everything(), fresh.everything())
