"""A save: what it holds, beside the steps and before them, and how it fails."""

import dataclasses
import fcntl
import shutil
import threading
from importlib.metadata import version

import pytest
import torch
from tiny_run import Checkpoints, TinyRun, assert_equal, load_model_weights, names
from torch.distributed.fsdp import fully_shard

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.config.errors import UserError
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_save_under_way_is_waited_for_and_counted_and_each_says_what_it_is(tmp_path, monkeypatch):
    run, release, publish = TinyRun(), threading.Event(), step_folders.publish
    manager = run.manager(tmp_path, async_mode="async")
    monkeypatch.setattr(step_folders, "publish", lambda *args: release.wait(20) and publish(*args))
    manager.save(1, run.train_state(1))
    assert "step-00000001" not in names(tmp_path)
    threading.Timer(0.2, release.set).start()
    manager.save(2, run.train_state(2))
    manager.close()
    assert manager.stats()["save_waits"] >= 1
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    info = step_folders.read_manifest(tmp_path / "step-00000002")["info"]
    assert info["layout"] == {"world_size": 1}
    assert info["architecture"] == dataclasses.asdict(run.model.arch)
    assert info["versions"]["torch"] == version("torch")


@pytest.mark.parametrize("cause", ["no memory", "can't start new thread"])
def test_a_state_that_cannot_be_staged_is_saved_while_training_waits(two_saved, monkeypatch, cause):
    """And the old checkpoints are removed there, too."""
    folder, run = two_saved
    lines: list[str] = []
    manager = run.manager(folder, lines=lines, async_mode="async", keep_latest_k=2)
    owner, name = (threading.Thread, "start") if "thread" in cause else (torch.UntypedStorage, "copy_")
    monkeypatch.setattr(owner, name, lambda *args, **keys: (_ for _ in ()).throw(RuntimeError(cause)))
    manager.save(6, run.train_state(6))
    monkeypatch.undo()
    assert names(folder) == ["step-00000004", "step-00000006"]
    manager.close()
    assert lines[0] == f"step 6 is saved while training waits (RuntimeError: {cause})"
    assert manager.stats()["failed_saves"] == 0


def test_weights_cast_to_fp8_on_the_way_are_saved_as_they_are(tmp_path):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    model = Llama(dataclasses.replace(TinyRun().model.arch, n_heads=2, n_kv_heads=2))
    model.init_weights(1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "output" not in name)
    fully_shard(model)
    assert any(type(parameter.to_local()) is not torch.Tensor for parameter in model.parameters())  # type: ignore[operator]
    manager = Checkpoints(tmp_path, LiveState(model))
    manager.save(0, {"step": 0, "tokens": 0})
    plain = Llama(model.arch)
    load_model_weights(tmp_path, plain)
    assert_equal(dict(plain.state_dict()), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert manager.load() == {"step": 0, "tokens": 0}
    restored = {name: tensor.to_local() for name, tensor in live_tensors.model_tensors(model).items()}  # type: ignore[attr-defined]
    assert_equal(restored, expected)


def test_a_run_that_could_not_save_is_told_at_start(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/checkpoint"):
        TinyRun().manager(tmp_path / "file" / "checkpoint")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="needs a GPU"):
            TinyRun().manager(tmp_path, async_mode="async_with_pinned_mem")
    manager, free = TinyRun().manager(tmp_path), shutil.disk_usage(tmp_path).free
    manager.folder.check_room(free // 2)
    with pytest.raises(UserError, match=r"takes about .* GB are free"):
        manager.folder.check_room(2 * free)
    lines: list[str] = []
    monkeypatch.setattr(fcntl, "lockf", lambda *args: (_ for _ in ()).throw(OSError(37, "No locks available")))
    assert step_folders.lock(tmp_path, 0, lines.append) is None
    assert "its file system has no locks: No locks available" in lines[0]
