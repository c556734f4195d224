"""Saves contain the state of their step, run during training, and fail without stopping it."""

import dataclasses
import fcntl
import os
import shutil
import threading
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_run import (
    Checkpoints,
    TinyRun,
    assert_equal,
    list_names,
    load_model_weights,
    train_state,
)
from torch.distributed.fsdp import fully_shard

from titanlite.checkpoint import dcp, save, saved_folders
from titanlite.checkpoint.live_state import LiveState, model_tensors, to_local
from titanlite.checkpoint.manifest import read_manifest
from titanlite.config.errors import UserError
from titanlite.model.llama import Llama
from titanlite.runtime.folder_lock import lock_folder

pytestmark = pytest.mark.usefixtures("one_rank")


def test_save_waits_for_the_save_in_progress_and_counts_it(tmp_path, monkeypatch):
    run = TinyRun()
    release = threading.Event()
    publish = dcp.publish_checkpoint

    def publish_when_released(*args: Any) -> Any:
        release.wait(20)
        return publish(*args)

    monkeypatch.setattr(dcp, "publish_checkpoint", publish_when_released)
    checkpoints = run.checkpoints(tmp_path, async_mode="async")
    checkpoints.save(1)

    assert "step-00000001" not in list_names(tmp_path)

    threading.Timer(0.2, release.set).start()
    checkpoints.save(2)
    checkpoints.close()

    assert checkpoints.stats()["save_waits"] == 1
    assert list_names(tmp_path) == ["step-00000001", "step-00000002"]


def test_manifest_describes_the_run(saved_run, tmp_path):
    info = read_manifest(tmp_path / "step-00000002")["info"]

    assert info["layout"] == {"world_size": 1}
    assert info["architecture"] == dataclasses.asdict(saved_run.model.arch)
    assert info["versions"]["torch"] == version("torch")


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (torch.UntypedStorage, "copy_", RuntimeError("no memory")),
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (torch.UntypedStorage, "copy_", KeyError("another type")),
    ],
)
def test_save_that_cannot_be_staged_is_written_while_training_waits(
    saved_run, tmp_path, owner, name, error
):
    """Old checkpoints are also removed after such a save."""
    checkpoints = saved_run.checkpoints(tmp_path, async_mode="async", keep_latest_k=2)
    with patch.object(owner, name, side_effect=error):
        checkpoints.save(6)

    assert list_names(tmp_path) == ["step-00000004", "step-00000006"]

    checkpoints.close()
    cause = f"{type(error).__name__}: {error}"

    assert checkpoints.lines[0] == f"Saving step 6 while training waits ({cause})"
    assert checkpoints.stats()["failed_saves"] == 0


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("error", [KeyError("key"), OSError(28, "disk full")])
@pytest.mark.parametrize("place", [(save, "dcp_save"), (dcp, "publish_checkpoint")])
def test_failed_save_does_not_affect_the_next_one(tmp_path, mode, error, place):
    run = TinyRun()
    checkpoints = run.checkpoints(tmp_path, async_mode=mode)
    with patch.object(*place, side_effect=error):
        checkpoints.save(1)
        checkpoints.saver.wait_until_saved()

    assert not checkpoints.has_saved(1)
    assert list_names(tmp_path) == []

    run.train(1)
    checkpoints.save(2)
    checkpoints.close()

    assert checkpoints.stats()["failed_saves"] == 1

    resumed = TinyRun(seed=99)
    assert resumed.checkpoints(tmp_path).load() == train_state(2)
    assert_equal(resumed.copy_state(), run.copy_state())


def test_failed_removal_of_old_checkpoints_does_not_fail_the_save(saved_run, tmp_path):
    checkpoints = saved_run.checkpoints(tmp_path, async_mode="async", keep_latest_k=1)
    with patch.object(saved_folders, "remove_checkpoint", side_effect=KeyError("key")):
        checkpoints.save(6)
        checkpoints.saver.wait_until_saved()

    assert (checkpoints.stats()["failed_saves"], checkpoints.has_saved(6)) == (0, True)

    checkpoints.save(8)
    checkpoints.close()

    assert list_names(tmp_path) == ["step-00000008"]


def test_save_whose_rename_may_not_be_durable_counts_as_saved(saved_run, tmp_path, caplog):
    checkpoints = saved_run.checkpoints(tmp_path, keep_latest_k=1)
    sync = os.fsync

    def fail_for_the_folder(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise OSError(5, "Input/output error")
        sync(descriptor)

    with patch.object(os, "fsync", fail_for_the_folder):
        checkpoints.save(6)

    assert checkpoints.has_saved(6)
    assert checkpoints.stats()["failed_saves"] == 0
    assert str(tmp_path / "step-00000006") in caplog.text  # a warning
    # The older checkpoints stay until a save is durable, because the new one may be lost.
    assert list_names(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]

    checkpoints.save(8)
    assert list_names(tmp_path) == ["step-00000008"]


def test_save_with_fp8_all_gather_stores_plain_weights(tmp_path):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = Llama(dataclasses.replace(TinyRun().model.arch, n_heads=2, n_kv_heads=2))
    model.init_weights(1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: "output" not in name
    )
    fully_shard(model)
    checkpoints = Checkpoints(tmp_path, LiveState(model))

    assert any(type(to_local(parameter)) is not torch.Tensor for parameter in model.parameters())

    checkpoints.save(0)

    plain = Llama(model.arch)
    load_model_weights(tmp_path, plain)

    assert_equal(dict(plain.state_dict()), expected)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoints.load()

    assert_equal({name: to_local(value) for name, value in model_tensors(model).items()}, expected)


def test_run_that_cannot_save_fails_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/checkpoint"):
        TinyRun().checkpoints(tmp_path / "file" / "checkpoint")

    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="needs a GPU"):
            TinyRun().checkpoints(tmp_path, async_mode="async_with_pinned_mem")

    context = TinyRun().checkpoints(tmp_path).context
    free = shutil.disk_usage(tmp_path).free
    context.check_free_space(free // 2)

    with pytest.raises(UserError, match=r"takes about .* GB are free"):
        context.check_free_space(2 * free)


def test_folder_without_file_locks_is_used_with_a_warning(tmp_path):
    lines: list[str] = []

    with patch.object(fcntl, "lockf", side_effect=OSError(37, "No locks available")):
        assert lock_folder(tmp_path, 0, lines.append) is None
    assert "No locks available" in lines[0]
