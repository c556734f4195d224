"""Invariants 5 and 11: damage is reported and survived, and loading never runs foreign code."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import xxhash
from ranks import run_small
from test_manifest import reseal
from tiny_run import (
    PROOF,
    Malicious,
    TinyRun,
    assert_equal,
    list_names,
    load_model_weights,
    train_state,
)
from torch.distributed.checkpoint.metadata import Metadata

from titanlite.checkpoint.find import resume_hint
from titanlite.checkpoint.manifest import list_checkpoints
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")

LATEST = "step-00000004"


def flip_bit(path: Path, position: int | None = None) -> None:
    """Flip a bit of a file, by default in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    path.write_bytes(content)


def resume(folder: Path, **keys: Any) -> int:
    """Resume a run, and return the step of the loaded checkpoint."""
    return TinyRun(seed=99).checkpoints(folder, **keys).load()["step"]


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_resume_from_a_damaged_checkpoint_names_the_file_and_uses_an_older_one(
    saved_run, tmp_path, file
):
    damaged = tmp_path / LATEST
    flip_bit(damaged / file)
    model = Llama(saved_run.model.arch)
    lines = []

    assert load_model_weights(tmp_path, model, lines.append)["train_state"]["step"] == 2
    assert f"{LATEST} is damaged: {file}" in lines[0]
    with pytest.raises(CheckpointError, match=f"{LATEST} is damaged: {file}"):
        load_model_weights(damaged, model)

    checkpoints = TinyRun().checkpoints(tmp_path)
    assert checkpoints.load()["step"] == 2
    assert list_names(tmp_path) == ["step-00000002", f"{LATEST}.damaged"]
    assert any(f"{LATEST} is damaged: {file}" in line for line in checkpoints.lines)

    # load_step never falls back to another checkpoint.
    damaged.with_suffix(".damaged").rename(damaged)
    with pytest.raises(CheckpointError, match=f"load_step = 4(?s:.*){LATEST}: {file}"):
        resume(tmp_path, load_step=4)


def test_rollback_with_only_damaged_checkpoints_erases_the_live_state(saved_run, tmp_path):
    checkpoints = saved_run.checkpoints(tmp_path)
    before = list_names(tmp_path)
    for step_folder in before:
        flip_bit(tmp_path / step_folder / "__0_0.distcp")

    message = rf"before step 5(?s:.*){LATEST}(?s:.*)step-00000002"

    with pytest.raises(CheckpointError, match=message):
        checkpoints.resumer.load_before(5)

    assert not any(tensor.nan_to_num().any() for tensor in saved_run.copy_state().values())
    assert list_names(tmp_path) == before


def count_bytes_read() -> int:
    """Return the number of bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_resume_reads_a_large_checkpoint_once_and_verifies_all_of_it(tmp_path):
    large = {"vocab_size": 10_000, "dim": 128}  # 31 MB
    run = TinyRun(model=large)
    checkpoints = run.checkpoints(tmp_path)
    run.train(1)
    checkpoints.save(2)
    older_state = run.copy_state()
    run.train(1)
    checkpoints.save(4)
    file = tmp_path / LATEST / "__0_0.distcp"
    size = file.stat().st_size

    resumed = TinyRun(seed=99, model=large)
    before = count_bytes_read()

    assert resumed.checkpoints(tmp_path).load() == train_state(4)
    assert count_bytes_read() - before < 1.01 * size
    assert_equal(resumed.copy_state(), run.copy_state())

    for position in (size // 8, size // 2, size - 2000):
        flip_bit(file, position)
        resumed = TinyRun(seed=99, model=large)
        checkpoints = resumed.checkpoints(tmp_path)
        assert checkpoints.load() == train_state(2)
        assert_equal(resumed.copy_state(), older_state)
        assert "__0_0.distcp" in next(line for line in checkpoints.lines if "damaged" in line)
        file.parent.with_suffix(".damaged").rename(file.parent)
        flip_bit(file, position)


@pytest.mark.slow
def test_damage_on_one_rank_is_erased_on_all_ranks(tmp_path):
    """The older checkpoint has no averages, so those of the damaged one must not survive."""

    def train(
        name: str,
        steps: int,
        options: str = "--ema.decay 0.9",
        code: int = 0,
    ) -> str:
        batch = f"--training.local_batch_size 1 --training.steps {steps}"
        return run_small(tmp_path / name, batch, options, ranks=2, code=code)

    run = tmp_path / "run/checkpoint"
    expected = tmp_path / "expected/checkpoint"
    train("run", 5, options="")
    shutil.copytree(run.parent, expected.parent)
    train("expected", 7)
    train("run", 10)
    flip_bit(run / "step-00000010/__1_0.distcp")

    assert "Resumed after step 5 " in train("run", 7)

    assert (run / "step-00000010.damaged").is_dir()

    for name in ("step-00000007/__0_0.distcp", "step-00000007/__1_0.distcp"):
        assert (run / name).read_bytes() == (expected / name).read_bytes()

    for step_folder in expected.iterdir():
        flip_bit(step_folder / "__1_0.distcp")
    metrics = expected.with_name("metrics.jsonl")
    before = metrics.read_bytes()
    train("expected", 8, code=4)

    assert metrics.read_bytes() == before
    assert list_names(expected) == ["step-00000005.damaged", "step-00000007.damaged"]


def test_unreadable_file_stops_the_run_and_renames_nothing(saved_run, tmp_path):
    before = list_names(tmp_path)
    open_file = os.open

    def open_or_fail(path: Any, *args: Any) -> int:
        if "4/__0_0" in str(path):
            raise OSError(116, "Stale file handle")
        return open_file(path, *args)

    message = r"cannot read .*__0_0\.distcp: .*Stale file handle"
    with patch.object(os, "open", open_or_fail), pytest.raises(CheckpointError, match=message):
        resume(tmp_path)

    assert list_names(tmp_path) == before
    assert resume(tmp_path) == 4


def test_run_without_a_valid_checkpoint_fails_at_every_start(saved_run, tmp_path):
    for path in list_checkpoints(tmp_path):
        (path / ".metadata").unlink()

    for message in (r"no valid checkpoint(?s:.*)step-00000002: .metadata: mis", "renamed earlier"):
        with pytest.raises(CheckpointError, match=message):
            resume(tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("destroy", [Path.unlink, truncate])
def test_step_whose_manifest_is_destroyed_is_set_aside_and_saved_again(
    saved_run, tmp_path, destroy
):
    destroy(tmp_path / LATEST / "manifest.json")
    resumed = TinyRun(seed=99)
    checkpoints = resumed.checkpoints(tmp_path)

    resumed.step = checkpoints.load()["step"]
    resumed.train(2)
    checkpoints.save(4, is_last=True)

    assert checkpoints.has_saved(4)
    assert list_names(tmp_path) == ["step-00000002", LATEST, f"{LATEST}.damaged"]
    assert resume(tmp_path) == 4
    assert_equal(resumed.copy_state(), saved_run.copy_state())


@pytest.mark.parametrize(
    ("load_step", "step"),
    [(-1, 4), (2, 2)],
    ids=["newest", "load_step"],
)
def test_resume_keeps_step_folders_of_other_programs(saved_run, tmp_path, load_step, step):
    foreign = tmp_path / "step-00001000"
    foreign.mkdir()
    for name in ("manifest.json", ".metadata"):
        (foreign / name).write_text("{}")

    assert resume(tmp_path, load_step=load_step) == step
    assert list_names(foreign) == [".metadata", "manifest.json"]


def test_the_hint_to_resume_names_the_newest_valid_checkpoint(saved_run, tmp_path):
    (tmp_path / LATEST / "manifest.json").write_text("{")
    job = {"job": {"dump_folder": str(tmp_path.parent)}, "checkpoint": {"folder": tmp_path.name}}

    hint = resume_hint(Run(JobConfig(**job)), ["--training.steps", "9"])

    assert f"{tmp_path}/step-00000002" in hint
    assert hint.endswith("titanlite train --training.steps 9")


def test_resume_skips_a_checkpoint_whose_data_position_is_after_its_step(tmp_path):
    checkpoints = TinyRun().checkpoints(tmp_path)
    for step, data_step in ((2, 2), (4, 5)):
        data = {"version": 2, "schedule": {"step": data_step, "rows": [8]}}
        checkpoints.save(step, data=data)

    assert resume(tmp_path) == 2


class Nested:
    def __reduce__(self):
        return getattr, (torch.Size, "mro")


def plant(value: object) -> Callable[[Metadata], None]:
    return lambda index: vars(index).update(planner_data=value)


def leave_the_folder(index: Metadata) -> None:
    for info in index.storage_data.values():
        info.relative_path = f"../step-00000002/{info.relative_path}"


def remove_chunks(index: Metadata) -> None:
    """DCP would silently keep the weight that the model has."""
    index.state_dict_metadata["model.norm.weight"].chunks.clear()  # type: ignore[union-attr]


# The pickle instruction BUILD on a class would change the class for the whole process.
CHANGE_TORCH = (
    b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x07planted\x88s\x86b."
)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (plant(Malicious()), r"posix\.system, which is not allowed"),
        (plant(Nested()), r"builtins\.getattr, which is not allowed"),
        (plant(torch.nn.Linear), r"Linear, which is not allowed"),
        (leave_the_folder, r"__0_0\.distcp is outside of this folder"),
        (remove_chunks, r"the chunks of .*norm\.weight do not"),
        (lambda _: CHANGE_TORCH, ""),
    ],
    ids=["call", "nested call", "class", "path", "chunks", "build"],
)
def test_malicious_index_with_valid_checksums_is_rejected(saved_run, tmp_path, alter, message):
    path = tmp_path / LATEST
    index = pickle.loads((path / ".metadata").read_bytes())
    # `alter` changes the index in place, or returns the content that replaces the file.
    metadata = alter(index) or pickle.dumps(index, 4)
    reseal(path, None, **{".metadata": metadata})

    rejected = f"cannot read .*metadata: .*{message}"
    with pytest.raises(CheckpointError, match=rejected):
        load_model_weights(tmp_path, Llama(saved_run.model.arch))
    with pytest.raises(CheckpointError, match=rejected):
        resume(tmp_path)

    assert not PROOF.exists()
    assert not hasattr(Metadata, "planted")


@pytest.mark.parametrize(
    "content",
    [Malicious(), {"a": 1}],
    ids=["code", "no tensor"],
)
def test_malicious_tensor_file_with_valid_checksums_runs_no_code(saved_run, tmp_path, content):
    """The message does not suggest to load it without a check."""
    path = tmp_path / LATEST / "__0_0.distcp"
    size = path.stat().st_size
    torch.save(content, path)
    reseal(path.parent, **{path.name: path.read_bytes().ljust(size, b"\0")})
    index = pickle.loads((path.parent / ".metadata").read_bytes())
    for info in index.storage_data.values():
        info.offset = 0
        info.length = size
        info.xxh3_128 = xxhash.xxh3_128_digest(path.read_bytes())
    reseal(path.parent, None, **{".metadata": pickle.dumps(index, 4)})

    with pytest.raises(CheckpointError, match=rf"cannot load .*{LATEST}") as caught:
        load_model_weights(tmp_path, Llama(saved_run.model.arch))

    assert "can still be loaded" not in str(caught.value)
    assert not PROOF.exists()


def test_load_rejects_weights_that_are_not_finite(tmp_path):
    run = TinyRun()
    run.model.get_parameter("layers.1.attention.wq.weight").data[3, 5] = float("nan")
    run.model.get_parameter("norm.weight").data[0] = float("inf")
    saved = tmp_path / "saved"
    run.checkpoints(saved).save(1)

    message = r"NaN or infinite:\n.*layers\.1\.attention\.wq\.weight\n.*norm\."
    with pytest.raises(CheckpointError, match=message):
        resume(saved)
    with pytest.raises(CheckpointError, match=message):
        resume(tmp_path / "new", initial_load_path=str(saved))
    with pytest.raises(CheckpointError, match=message):
        load_model_weights(saved, Llama(run.model.arch))


def test_initial_weights_are_loaded_by_a_new_run_and_not_by_its_restart(saved_run, tmp_path):
    with pytest.raises(UserError, match="elsewhere does not exist"):
        load_model_weights(tmp_path / "elsewhere", saved_run.model)

    fresh = TinyRun(seed=99)
    checkpoints = fresh.checkpoints(tmp_path / "new", initial_load_path=str(tmp_path))

    assert checkpoints.load() is None
    assert checkpoints.lines[-1] == f"Starting from the weights in {tmp_path / LATEST}"
    assert_equal(fresh.copy_weights(), saved_run.copy_weights())
    assert fresh.has_empty_optimizer()

    # A run that has a checkpoint does not read the initial weights again.
    fresh.train(1)
    checkpoints.save(1)
    resumed = TinyRun(seed=98)

    assert resumed.checkpoints(tmp_path / "new", initial_load_path="nowhere").load() is not None
    assert_equal(resumed.copy_state(), fresh.copy_state())
