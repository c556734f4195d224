"""Invariants 5 and 11: damage is reported and survived, and loading never runs foreign code."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import xxhash
from ranks import World, start_small
from test_manifest import reseal
from tiny_run import PROOF, Malicious, TinyRun, assert_equal, list_names, load_model_weights
from torch.distributed.checkpoint.metadata import Metadata

from titanlite.checkpoint import load as load_module
from titanlite.checkpoint.manifest import list_checkpoints
from titanlite.config.errors import CheckpointError, UserError
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")

FILES = ["__0_0.distcp", ".metadata", "manifest.json"]


def resumed_step(folder: Path, lines: list[str] | None = None) -> int:
    checkpoints = TinyRun(seed=99).checkpoints(folder, lines=lines)
    state = checkpoints.load()
    checkpoints.close()
    return state["step"]


@pytest.mark.parametrize("file", FILES)
def test_resume_from_a_damaged_checkpoint_names_the_file_and_uses_an_older_one(two_saved, file):
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
    assert list_names(folder) == ["step-00000002", "step-00000004.damaged"]
    assert any(f"step-00000004 is DAMAGED ({file}" in line for line in lines)
    path.parent.with_suffix(".damaged").rename(path.parent)
    with pytest.raises(CheckpointError, match=f"load_step = 4(?s:.*)step-00000004: {file}"):
        TinyRun().checkpoints(folder, load_step=4).load()  # never another one in place of it


def flip_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_resume_detects_a_file_that_changes_after_the_check(two_saved, monkeypatch):
    folder, run = two_saved
    expected = TinyRun(seed=98)
    expected.checkpoints(folder).resumer.load_before(3)
    check = load_module.check_checkpoint

    def check_then_damage(path: Path, *args: Any, **keys: Any) -> dict[str, Any]:
        manifest = check(path, *args, **keys)
        if path.name == "step-00000004":
            flip_byte(path / "__0_0.distcp", 5000)
        return manifest

    monkeypatch.setattr(load_module, "check_checkpoint", check_then_damage)
    resumed = TinyRun(seed=99)
    assert resumed.checkpoints(folder).load() == run.train_state(2)
    assert_equal(resumed.copy_state(), expected.copy_state())
    assert list_names(folder) == ["step-00000002", "step-00000004.damaged"]


def test_rollback_with_only_damaged_checkpoints_erases_the_live_state(two_saved):
    folder, run = two_saved
    checkpoints = run.checkpoints(folder)
    for step in ("step-00000002", "step-00000004"):
        flip_byte(folder / step / "__0_0.distcp", 5000)
    with pytest.raises(
        CheckpointError, match=r"before step 5(?s:.*)step-00000004(?s:.*)step-00000002"
    ):
        checkpoints.resumer.load_before(5)
    assert not any(tensor.nan_to_num().any() for tensor in run.copy_state().values())
    assert list_names(folder) == ["step-00000002", "step-00000004"]


def bytes_read() -> int:
    """The bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_resume_reads_a_large_checkpoint_once_and_verifies_all_of_it(tmp_path):
    large: dict[str, Any] = {"model": {"vocab_size": 20_000, "dim": 128}}  # 62 MB
    run = TinyRun(**large)
    checkpoints = run.checkpoints(tmp_path)
    checkpoints.save(2, run.train_state(2))
    checkpoints.save(4, run.train_state(4))
    file = tmp_path / "step-00000004" / "__0_0.distcp"
    size = file.stat().st_size

    resumed = TinyRun(seed=99, **large)
    before = bytes_read()
    assert resumed.checkpoints(tmp_path).load() == run.train_state(4)
    assert bytes_read() - before < 1.01 * size
    assert_equal(resumed.copy_state(), run.copy_state())

    for position in (size // 8, size // 2, size - 2000):
        flip_byte(file, position)
        lines: list[str] = []
        state = TinyRun(seed=99, **large).checkpoints(tmp_path, lines=lines).load()
        assert state == run.train_state(2)
        assert "__0_0.distcp" in next(line for line in lines if "DAMAGED" in line)
        file.parent.with_suffix(".damaged").rename(file.parent)
        flip_byte(file, position)


@pytest.mark.slow
def test_damage_on_one_of_four_ranks_is_erased_on_all_ranks(tmp_path):
    """The older checkpoint has no averages, so those of the damaged one must not survive."""

    def train(folder: str, steps: int, *keys: object) -> World:
        batch = "--training.local_batch_size", 1
        return start_small(tmp_path / folder, *batch, "--training.steps", steps, *keys, ranks=4)

    ema = "--ema.decay", 0.9
    train("run", 5).ends_with(0)
    shutil.copytree(tmp_path / "run", tmp_path / "expected")
    train("expected", 7, *ema).ends_with(0)
    train("run", 10, *ema).ends_with(0)
    damaged = tmp_path / "run/checkpoint/step-00000010/__3_0.distcp"
    flip_byte(damaged, damaged.stat().st_size // 2)

    assert "Resumed after step 5 " in train("run", 7, *ema).ends_with(0)
    assert damaged.parent.with_suffix(".damaged").is_dir()
    expected = tmp_path / "expected/checkpoint/step-00000007"
    for name in ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"):
        found = tmp_path / "run/checkpoint/step-00000007" / name
        assert found.read_bytes() == (expected / name).read_bytes()

    for folder in (expected, expected.with_name("step-00000005")):
        flip_byte(folder / "__2_0.distcp", 5000)
    last_metrics = (expected.parents[1] / "metrics.jsonl").read_bytes()
    train("expected", 8, *ema).ends_with(4)
    assert (expected.parents[1] / "metrics.jsonl").read_bytes() == last_metrics
    assert list_names(expected.parent) == ["step-00000005.damaged", "step-00000007.damaged"]


def test_unreadable_file_stops_the_run_and_renames_nothing(two_saved, monkeypatch):
    folder, _ = two_saved
    before, opened, stale = (
        list_names(folder),
        os.open,
        Mock(side_effect=OSError(116, "Stale file handle")),
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "open", lambda path, *a: (stale if "4/__0_0" in str(path) else opened)(path, *a)
        )
        with pytest.raises(
            CheckpointError, match=r"cannot read .*__0_0\.distcp: .*Stale file handle"
        ):
            TinyRun().checkpoints(folder).load()
    assert list_names(folder) == before
    assert resumed_step(folder) == 4


def test_run_without_a_valid_checkpoint_fails_at_every_start(two_saved):
    folder, _ = two_saved
    for path in list_checkpoints(folder):
        (path / ".metadata").unlink()
    with pytest.raises(
        CheckpointError, match=r"no valid checkpoint(?s:.*)step-00000002: .metadata: missing"
    ):
        TinyRun().checkpoints(folder).load()
    with pytest.raises(CheckpointError, match="renamed earlier"):  # never from scratch in silence
        TinyRun().checkpoints(folder).load()


@pytest.mark.parametrize("keys", [{}, {"load_step": 2}])
@pytest.mark.parametrize("file", ["lit_model.pth", "manifest.json"])
def test_resume_keeps_step_folders_of_other_programs(two_saved, keys, file):
    folder, _ = two_saved
    foreign = folder / "step-00001000" / file
    foreign.parent.mkdir()
    foreign.write_text("{}")
    assert TinyRun().checkpoints(folder, **keys).load()["step"] == (keys.get("load_step") or 4)
    assert foreign.read_text() == "{}"


@pytest.mark.parametrize(
    "place", [{"step": 4, "rows": [10**12]}, {"step": 4, "rows": [257]}, {"step": 5, "rows": [8]}]
)
def test_resume_skips_checkpoints_with_an_impossible_data_position(tmp_path, place):
    run = TinyRun()
    checkpoints = run.checkpoints(tmp_path)
    for step, schedule in ((2, {"step": 2, "rows": [8]}), (4, place)):
        checkpoints.save(
            step, {"step": step, "tokens": 64 * step, "data": {"version": 2, "schedule": schedule}}
        )
    assert resumed_step(tmp_path) == 2


class Nested:
    def __reduce__(self):
        return getattr, (torch.Size, "mro")


def leave_the_folder(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = f"../step-00000002/{place.relative_path}"


# The instruction BUILD on a class would change it for the whole process.
CHANGE_TORCH = (
    b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x07planted\x88s\x86b."
)


@pytest.mark.parametrize(
    ("alter", "found"),
    [
        (
            lambda index: vars(index).update(planner_data=Malicious()),
            r"posix\.system, which is not allowed",
        ),
        (
            lambda index: vars(index).update(planner_data=Nested()),
            r"builtins\.getattr, which is not allowed",
        ),
        (
            lambda index: vars(index).update(planner_data=torch.nn.Linear),
            r"Linear, which is not allowed",
        ),
        (leave_the_folder, r"__0_0\.distcp is outside of this folder"),
        # DCP would leave the weight as it was, and say nothing
        (
            lambda index: index.state_dict_metadata["model.norm.weight"].chunks.clear(),
            r"the chunks of .*norm\.weight do not",
        ),
        (lambda _: CHANGE_TORCH, ""),
    ],
)
def test_malicious_index_with_valid_checksums_is_rejected(two_saved, alter, found):
    folder, run = two_saved
    path = folder / "step-00000004"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    reseal(path, None, **{".metadata": alter(metadata) or pickle.dumps(metadata, 4)})
    for load in (
        lambda: load_model_weights(folder, Llama(run.model.arch)),
        TinyRun().checkpoints(folder).load,
    ):
        with pytest.raises(CheckpointError, match=f"cannot read .*metadata: .*{found}"):
            load()
    assert not PROOF.exists()
    assert not hasattr(Metadata, "planted")


@pytest.mark.parametrize("content", [Malicious(), {"a": 1}])
def test_malicious_tensor_file_with_valid_checksums_runs_no_code(two_saved, content):
    """And nobody is told how to load it all the same."""
    folder, run = two_saved
    path = folder / "step-00000004" / "__0_0.distcp"
    size = path.stat().st_size
    torch.save(content, path)
    reseal(path.parent, **{path.name: path.read_bytes().ljust(size, b"\0")})
    metadata = pickle.loads((path.parent / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, path.stat().st_size
        place.xxh3_128 = xxhash.xxh3_128_digest(path.read_bytes())
    reseal(path.parent, None, **{".metadata": pickle.dumps(metadata, 4)})
    with pytest.raises(CheckpointError, match=r"cannot load .*step-00000004") as caught:
        load_model_weights(folder, Llama(run.model.arch))
    assert "can still be loaded" not in str(caught.value)
    assert not PROOF.exists()


def test_load_rejects_weights_that_are_not_finite(tmp_path):
    run = TinyRun()
    model: Any = run.model
    model.layers["1"].attention.wq.weight.data[3, 5] = float("nan")
    model.norm.weight.data[0] = float("inf")
    run.checkpoints(tmp_path / "old").save(1, run.train_state(1))
    for load in (
        TinyRun().checkpoints(tmp_path / "old").load,
        TinyRun().checkpoints(tmp_path / "new", initial_load_path=str(tmp_path / "old")).load,
        lambda: load_model_weights(tmp_path / "old", Llama(run.model.arch)),
    ):
        with pytest.raises(
            CheckpointError, match=r"NaN or infinite:\n.*layers\.1\.attention\.wq\.weight\n.*norm\."
        ):
            load()


def test_weights_load_into_a_model_and_into_a_new_run(two_saved, tmp_path):
    folder, run = two_saved
    model, fresh, lines = Llama(run.model.arch), TinyRun(seed=99), []
    load_model_weights(folder / "step-00000004", model)
    assert_equal(dict(model.state_dict()), run.copy_weights())
    with pytest.raises(UserError, match="elsewhere does not exist"):
        load_model_weights(folder / "elsewhere", model)
    checkpoints = fresh.checkpoints(tmp_path / "new", lines=lines, initial_load_path=str(folder))
    assert checkpoints.load() is None
    assert lines[-1] == f"Starting from the weights in {folder / 'step-00000004'}"
    assert_equal(fresh.copy_weights(), run.copy_weights())
    assert not any(
        value.any() for state in fresh.optimizer.state.values() for value in state.values()
    )
    fresh.train(1)
    checkpoints.save(1, fresh.train_state())
    resumed = TinyRun(
        seed=98
    )  # once there is something to resume, the initial weights are not read again
    assert resumed.checkpoints(tmp_path / "new", initial_load_path="nowhere").load() is not None
    assert_equal(resumed.copy_state(), fresh.copy_state())
