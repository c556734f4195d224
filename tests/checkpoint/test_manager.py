"""Invariants 4 and 5: exact resume, and damage is detected, named and survived."""

import dataclasses
import fcntl
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_commit import reseal
from tiny_run import TinyRun, assert_equal, go_on
from torch.distributed.fsdp import fully_shard

from titanlite.checkpoint import commit, find, state
from titanlite.checkpoint.huggingface import HuggingFaceReader, HuggingFaceWriter
from titanlite.checkpoint.manager import CheckpointManager, load_model_weights
from titanlite.checkpoint.ranks import Ranks
from titanlite.checkpoint.verify import verify
from titanlite.config import schema
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.schema import JobConfig
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def two_saved(tmp_path) -> tuple[Path, TinyRun]:
    """A run that saved at steps 2 and 4."""
    run = TinyRun()
    manager = run.manager(tmp_path)
    for _ in range(2):
        run.train(2)
        manager.save(run.step, run.train_state())
    return tmp_path, run


HALF = {"dtype": torch.bfloat16, "rounded": "bfloat16"}


@pytest.mark.parametrize("kind", [{}, {"tied": True}, {"wrapped": True}, {"offload": True}, HALF])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, kind):
    straight = TinyRun(**kind)
    losses = straight.train(6)

    first = TinyRun(**kind)
    first.train(3)
    first.manager(tmp_path).save(3, first.train_state(3))
    second = TinyRun(seed=99, **kind)
    assert second.manager(tmp_path).load() == {"step": 3, "tokens": 0, "cursor": {"row": 12}}
    second.step = 3
    assert_equal(second.everything(), first.everything())
    assert second.train(3) == losses[3:]
    assert_equal(second.everything(), straight.everything())


@pytest.mark.parametrize("kind", [HALF, {"rounded": "bfloat16"}, {"rounded": "float32", "dtype": torch.bfloat16}])
def test_other_dtypes_of_weights_and_moments_are_cast_when_loaded(tmp_path, kind):
    """And back without a loss, where the others hold more."""
    saved, other = TinyRun(), TinyRun(seed=99, **kind)
    for before, now, folder in ((saved, other, tmp_path / "there"), (other, saved, tmp_path / "back")):
        if before is saved:
            before.train(2)
        before.manager(folder).save(2, before.train_state(2))
        expected = before.everything()
        now.manager(folder).load()
        found = now.everything()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in found)
    assert {tensor.dtype for tensor in other.everything().values()} >= {torch.bfloat16}


def test_a_save_before_the_first_step_holds_weights_only(tmp_path):
    first = TinyRun()
    first.manager(tmp_path).save(0, first.train_state(0))
    second = TinyRun(seed=99)
    assert second.manager(tmp_path).load() == first.train_state()
    assert second.train(2) == first.train(2)


def test_a_save_after_a_forward_pass_alone_holds_the_sharded_parameters(tmp_path):
    run = TinyRun()
    run.train(1)
    with torch.no_grad():
        run.model(torch.zeros(1, 4, dtype=torch.int64))  # as a validation does; FSDP leaves the root gathered
    run.manager(tmp_path).save(1, run.train_state(1))
    resumed = TinyRun(seed=99)
    resumed.manager(tmp_path).load()
    assert_equal(resumed.everything(), run.everything())


def test_wrapped_and_plain_models_read_each_others_checkpoints(tmp_path):
    wrapped = TinyRun(wrapped=True)
    wrapped.train(1)
    wrapped.manager(tmp_path).save(1, wrapped.train_state())
    plain = TinyRun(seed=99)
    plain.manager(tmp_path).load()
    plain.step = 1
    assert plain.train(1) == wrapped.train(1)


def test_a_rate_that_is_a_tensor_survives_loading(two_saved):
    folder, _ = two_saved
    run = TinyRun(seed=99)
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)
    run.manager(folder).load()
    assert [float(group["lr"]) for group in run.optimizer.param_groups] == [0.5, 0.5]


def test_the_random_state_comes_back(tmp_path):
    run = TinyRun()
    torch.manual_seed(5)
    run.manager(tmp_path).save(1, run.train_state(1))
    drawn = torch.rand(3)
    run.manager(tmp_path).load()
    assert torch.equal(torch.rand(3), drawn)


def test_the_manifest_says_what_was_saved_and_by_what(two_saved):
    folder, run = two_saved
    manifest = commit.read_manifest(folder / "step-00000004")
    info = manifest["info"]
    assert manifest["step"] == 4
    assert info["train_state"] == run.train_state()
    assert info["layout"] == {"world_size": 1, "meshes": {"dp_shard": [1]}}
    assert info["architecture"] == dataclasses.asdict(run.model.arch)
    assert info["versions"]["torch"] == version("torch")
    assert [group["weight_decay"] for group in info["optimizer_groups"]] == [0.1, 0.0]
    hashes = set()
    for seed in (0, 0, 1):
        job = JobConfig.model_validate({"training": {"seed": seed}}).model_dump(mode="json")
        hashes.add(run.manager(folder, job=job)._describe({})["job_hash"])
    assert len(hashes) == 2


def test_an_empty_folder_holds_nothing_to_resume(tmp_path):
    assert TinyRun().manager(tmp_path / "new").load() is None
    assert names(tmp_path / "new") == []


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


def test_load_step_goes_back_and_puts_the_later_ones_aside(two_saved):
    folder, _ = two_saved
    lines: list[str] = []
    run = TinyRun(seed=99)
    manager = run.manager(folder, lines=lines, load_step=2)
    state = manager.load()
    assert state is not None
    assert state["step"] == 2
    assert names(folder) == ["step-00000002", "step-00000004.superseded"]
    run.step = 2
    run.train(2)
    manager.save(4, run.train_state(4))
    assert "step-00000004" in names(folder)


def test_a_restart_goes_on_where_the_start_that_went_back_has_come(two_saved):
    folder, run = two_saved
    keys: dict[str, Any] = {"load_step": 2, "exclude_from_loading": ("optimizer", "data"), "keep_latest_k": 1}
    job = JobConfig.model_validate({"checkpoint": keys}).model_dump(mode="json")
    manager = run.manager(folder, job=job, **keys)
    state = manager.load()
    assert state is not None
    assert state["step"] == 2
    run.step = 2
    run.train(4)
    saved = run.train_state() | {"data": {"row": 3}}
    manager.save(6, saved)
    manager.close()
    assert names(folder) == ["step-00000004.superseded", "step-00000006"]  # step 2 is not needed any more
    lines: list[str] = []
    restarted = TinyRun(seed=99)
    assert restarted.manager(folder, lines=lines, job=job, **keys).load() == saved
    assert lines[0] == "checkpoint.load_step = 2: gone back to by an earlier start of this run"
    assert lines[1] == "step-00000006 was saved after data, optimizer had been started afresh: loaded this time"
    assert_equal(restarted.everything(), run.everything())
    keys |= {"load_step": 6, "keep_latest_k": 2}
    run.manager(folder, job=job, **keys).save(8, saved | {"step": 8})
    lines.clear()
    job = JobConfig.model_validate({"checkpoint": keys}).model_dump(mode="json")
    TinyRun().manager(folder, lines=lines, job=job, **keys).load()  # another value goes back again
    assert lines[0] == "going back to step 6: step-00000008 renamed to step-00000008.superseded"


def test_load_step_that_is_absent_or_damaged_is_an_error(two_saved):
    folder, _ = two_saved
    with pytest.raises(CheckpointError, match=r"load_step = 3.*present: 2, 4"):
        TinyRun().manager(folder, load_step=3).load()
    (folder / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"load_step = 2 is damaged: __0_0.distcp: 0 bytes"):
        TinyRun().manager(folder, load_step=2).load()
    assert names(folder) == ["step-00000002", "step-00000004"]


def test_other_optimizer_groups_are_refused_in_words(two_saved):
    folder, _ = two_saved
    expected = r"tok_embeddings.weight: saved in group 0 \(weight_decay 0.1\), now in group 1 \(weight_decay 0.0\)"
    with pytest.raises(UserError, match=expected):
        TinyRun(decay_embeddings=False).manager(folder).load()


def test_another_model_is_refused_with_the_list(two_saved):
    folder, _ = two_saved
    with pytest.raises(UserError, match=r"model.output.weight: only in it"):
        TinyRun(tied=True).manager(folder).load()


def test_retention_keeps_the_newest_and_touches_nothing_else(tmp_path):
    (tmp_path / "step-00000000-notes").mkdir()
    run = TinyRun()
    manager = run.manager(tmp_path, keep_latest_k=2)
    (tmp_path / "step-00000000").mkdir()  # without a manifest it is none of ours
    (tmp_path / ".tmp-step-00000009-other").mkdir()
    for step in (1, 2, 3, 4):
        manager.save(step, run.train_state(step))
        manager.save(step, run.train_state(step))  # nothing to do: saved already
    manager.close()
    assert manager.stats()["failed_saves"] == 0
    assert names(tmp_path) == [
        ".tmp-step-00000009-other",
        "step-00000000",
        "step-00000000-notes",
        "step-00000003",
        "step-00000004",
    ]


def test_the_end_removes_what_a_run_left_that_was_killed_between_its_last_save_and_the_removal(two_saved):
    folder, run = two_saved
    manager = run.manager(folder, keep_latest_k=1)
    manager.load()
    manager.save(4, run.train_state(4))
    assert names(folder) == ["step-00000002", "step-00000004"]
    manager.save(4, run.train_state(4), last=True)
    manager.close()
    assert names(folder) == ["step-00000004"]


def test_keep_latest_k_zero_keeps_all(tmp_path):
    run = TinyRun()
    manager = run.manager(tmp_path, keep_latest_k=0)
    for step in range(5):
        manager.save(step, run.train_state(step))
    assert len(commit.list_checkpoints(tmp_path)) == 5


def test_a_failed_save_is_counted_leaves_nothing_and_the_next_one_works(two_saved):
    folder, run = two_saved
    lines: list[str] = []
    manager = run.manager(folder, lines=lines)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the system refuses to write on, as a full disk does
    manager.save(6, run.train_state(6))
    assert manager.stats()["failed_saves"] == 1
    assert not manager.holds(6)
    assert "FAILED" in lines[-1]
    assert "File too large" in lines[-1]
    assert names(folder) == ["step-00000002", "step-00000004"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    manager.save(6, run.train_state(6))
    assert manager.holds(6)
    assert manager.stats()["failed_saves"] == 1
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_killed_save_leaves_a_folder_that_the_next_start_removes(two_saved, monkeypatch):
    folder, run = two_saved
    manager = run.manager(folder)

    def killed(*args):
        raise SystemExit  # stands for SIGKILL: no line after it runs, neither does any clean-up

    monkeypatch.setattr(commit, "write_manifest", killed)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **keys: None)
    manager.save(6, run.train_state(6))
    monkeypatch.undo()
    left = names(folder)
    assert [name[:18] for name in left] == [".tmp-step-00000006", "step-00000002", "step-00000004"]
    lines: list[str] = []
    resumed = TinyRun(seed=99).manager(folder, lines=lines)
    assert lines == [f"removed 1 unfinished checkpoint folders: {left[0]}"]
    assert names(folder) == ["step-00000002", "step-00000004"]
    state = resumed.load()
    assert state is not None
    assert state["step"] == 4


def test_weights_alone_load_into_an_unsharded_model(two_saved):
    folder, run = two_saved
    expected = {k: v for k, v in run.everything().items() if k in dict(run.model.named_parameters())}
    for path in (folder, folder / "step-00000004"):
        model = Llama(run.model.arch)
        info = load_model_weights(path, model)
        assert info["train_state"]["step"] == 4
        assert_equal(dict(model.state_dict()), expected)


def test_weights_from_a_damaged_or_absent_checkpoint_are_refused(two_saved):
    folder, run = two_saved
    (folder / "step-00000004" / "__0_0.distcp").write_bytes(b"")
    assert load_model_weights(folder, Llama(run.model.arch))["train_state"]["step"] == 2
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0\.distcp"):
        load_model_weights(folder / "step-00000004", Llama(run.model.arch))
    with pytest.raises(UserError, match="elsewhere: does not exist"):
        load_model_weights(folder / "elsewhere", Llama(run.model.arch))


def test_some_steps_are_kept_for_good(tmp_path):
    run = TinyRun()
    manager = run.manager(tmp_path, keep_latest_k=1, keep_every_n_steps=3)
    for step in range(1, 8):
        manager.save(step, run.train_state(step))
    manager.close()
    assert names(tmp_path) == ["step-00000003", "step-00000006", "step-00000007"]


def test_an_async_save_holds_the_state_of_its_own_step(tmp_path):
    straight = TinyRun()
    losses = straight.train(8)
    first = TinyRun()
    lines: list[str] = []
    manager = first.manager(tmp_path, lines=lines, async_mode="async", keep_latest_k=0)
    for _ in range(3):  # the next steps change the live state while a save is under way
        first.train(2)
        manager.save(first.step, first.train_state())
    first.train(2)
    manager.close()
    assert manager.stats()["failed_saves"] == 0
    assert sum("of which training waited" in line for line in lines) == 3
    for step in (2, 4, 6):
        resumed = TinyRun(seed=99)
        assert resumed.manager(tmp_path, load_step=-1).load() == {
            "step": 8 - step,
            "tokens": 0,
            "cursor": {"row": (8 - step) * 4},
        }
        resumed.step = 8 - step
        assert resumed.train(step) == losses[8 - step :]
        shutil.rmtree(tmp_path / f"step-{8 - step:08d}")


def test_a_save_under_way_is_waited_for_and_counted(tmp_path, monkeypatch):
    run = TinyRun()
    lines: list[str] = []
    manager = run.manager(tmp_path, lines=lines, async_mode="async")
    release = threading.Event()
    publish = commit.publish

    def slow_publish(*args):
        assert release.wait(20)
        return publish(*args)

    monkeypatch.setattr(commit, "publish", slow_publish)
    manager.save(1, run.train_state(1))
    assert "step-00000001" not in names(tmp_path)
    threading.Timer(0.2, release.set).start()
    manager.save(2, run.train_state(2))
    manager.close()
    assert manager.stats()["save_waits"] >= 1
    assert "waiting for the save of step 1, which is still under way" in lines
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_failed_async_save_is_counted_and_the_next_one_works(two_saved, monkeypatch):
    folder, run = two_saved
    lines: list[str] = []
    manager = run.manager(folder, lines=lines, async_mode="async")
    monkeypatch.setattr(commit, "write_manifest", lambda *args: (_ for _ in ()).throw(OSError(122, "Quota exceeded")))
    manager.save(6, run.train_state(6))
    manager._saver.settle()
    monkeypatch.undo()
    assert manager.stats()["failed_saves"] == 1
    assert "Quota exceeded" in lines[-1]
    manager.save(6, run.train_state(6))
    manager.close()
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_state_that_cannot_be_staged_is_a_failed_save(two_saved, monkeypatch):
    """As where shared memory is small; on one rank, all would fail."""
    folder, run = two_saved
    lines: list[str] = []
    manager = run.manager(folder, lines=lines, async_mode="async")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **keys: (_ for _ in ()).throw(RuntimeError("no memory")))
    manager.save(6, run.train_state(6))
    monkeypatch.undo()
    assert lines[-1] == "save of step 6 FAILED (OSError: staging: no memory)"
    manager.save(6, run.train_state(6))
    manager.close()
    assert manager.stats()["failed_saves"] == 1
    assert names(folder) == ["step-00000002", "step-00000004", "step-00000006"]


def test_the_process_that_writes_may_open_a_file_for_each_tensor(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    TinyRun().manager(tmp_path, async_mode="process").close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_second_run_in_the_same_folder_waits_and_then_gives_up(tmp_path, monkeypatch):
    hold = f"""
import time
from pathlib import Path
from titanlite.checkpoint import commit
commit.lock(Path("{tmp_path}/checkpoint"), 0, print)
print("held", flush=True)
time.sleep(60)
"""
    (tmp_path / "checkpoint" / ".tmp-step-00000002-x").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        monkeypatch.setattr("titanlite.checkpoint.manager.LOCK_PATIENCE", 0.3)
        lines: list[str] = []
        with pytest.raises(UserError, match="another run is using it"):
            TinyRun().manager(tmp_path / "checkpoint", lines=lines)
        assert lines == [f"{tmp_path}/checkpoint: another run is using it; waiting up to 0 s for its end"]
        assert names(tmp_path / "checkpoint") == [".tmp-step-00000002-x"]  # its unfinished save is left alone
        monkeypatch.undo()
        threading.Timer(0.3, other.kill).start()
        TinyRun().manager(tmp_path / "checkpoint").close()  # the lock ends with the process
    assert names(tmp_path / "checkpoint") == []


def test_a_file_system_without_locks_is_said_to_have_none(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "lockf", lambda *args: (_ for _ in ()).throw(OSError(37, "No locks available")))
    lines: list[str] = []
    TinyRun().manager(tmp_path, lines=lines).close()
    assert "its file system has no locks: No locks available" in lines[0]


def test_pinned_memory_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(UserError, match="needs a GPU"):
        TinyRun().manager(tmp_path, async_mode="async_with_pinned_mem")


def test_a_run_that_could_not_save_is_told_at_start(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/checkpoint"):
        TinyRun().manager(tmp_path / "file" / "checkpoint")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"takes about 0\.00 GB, 0\.00 GB are free"):
        TinyRun().manager(tmp_path)


def test_a_new_run_starts_from_the_weights_of_another(two_saved, tmp_path):
    folder, run = two_saved
    lines: list[str] = []
    fresh = TinyRun(seed=99)
    manager = fresh.manager(tmp_path / "new" / "checkpoint", lines=lines, initial_load_path=str(folder))
    assert manager.load() is None
    assert lines[-1] == f"starting from the weights in {folder / 'step-00000004'}"
    assert_equal(dict(weights(fresh)), dict(weights(run)))
    assert not fresh.optimizer.state
    fresh.train(1)
    manager.save(1, fresh.train_state())
    resumed = TinyRun(seed=98)  # once there is something to resume, the initial weights are not read again
    state = resumed.manager(tmp_path / "new" / "checkpoint", initial_load_path="nowhere").load()
    assert state is not None
    assert_equal(resumed.everything(), fresh.everything())


def test_the_first_rank_alone_looks_which_weights_are_the_newest(two_saved, tmp_path, monkeypatch):
    """A run that goes on there could show each rank another one."""
    folder, _ = two_saved
    manager = TinyRun().manager(tmp_path / "new" / "checkpoint", initial_load_path=str(folder))
    asked: list[str] = []
    on_rank0 = Ranks.on_rank0
    monkeypatch.setattr(Ranks, "on_rank0", lambda ranks, find: (asked.append("rank 0"), on_rank0(ranks, find))[1])
    checkpoints_at = find.checkpoints_at
    monkeypatch.setattr(find, "checkpoints_at", lambda path: (asked.append("look"), checkpoints_at(path))[1])
    manager.load()
    assert asked[-2:] == ["rank 0", "look"]
    assert asked.count("look") == 1


def weights(run: TinyRun) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in run.everything().items() if name[0].isalpha()}


def test_what_is_excluded_from_loading_starts_afresh(two_saved):
    folder, run = two_saved
    fresh = TinyRun(seed=99)
    run.train(1)
    saved = run.train_state() | {"data": {"row": 3}}
    run.manager(folder).save(5, saved)
    expected = run.train_state()
    state = fresh.manager(folder, exclude_from_loading=("optimizer", "data", "rng")).load()
    assert state == expected
    assert_equal(weights(fresh), weights(run))
    assert not fresh.optimizer.state


def test_a_last_save_of_the_weights_alone_is_never_resumed_from(tmp_path):
    run = TinyRun()
    manager = run.manager(tmp_path / "checkpoint", last_save_model_only=True)
    run.train(1)
    manager.save(1, run.train_state(1))
    run.train(1)
    manager.save(2, run.train_state(2), last=True)
    manager.close()
    assert names(tmp_path / "checkpoint") == ["step-00000001"]
    assert names(tmp_path / "final") == ["step-00000002"]
    sizes = [commit.folder_size(path) for path in (tmp_path / "checkpoint", tmp_path / "final")]
    assert sizes[1] < 0.5 * sizes[0]
    resumed = TinyRun(seed=99)
    state = resumed.manager(tmp_path / "checkpoint").load()
    assert state is not None
    assert state["step"] == 1
    with pytest.raises(CheckpointError, match="holds weights only"):
        TinyRun().manager(tmp_path / "final").load()
    model = Llama(run.model.arch)
    load_model_weights(tmp_path / "final", model)
    assert_equal(dict(model.state_dict()), weights(run))


@pytest.mark.parametrize("model_only", [False, True])
def test_the_last_save_can_be_for_transformers_too(tmp_path, model_only):
    run = TinyRun()
    keys = {"last_save_in_hf": True, "last_save_model_only": model_only, "async_mode": "async"}
    manager = run.manager(tmp_path / "checkpoint", write_tokenizer=lambda folder: {"bos_token_id": 1}, **keys)
    manager.save(2, run.train_state(2), last=True)
    manager.close()
    with HuggingFaceReader(tmp_path / "final_hf") as reader:
        assert torch.equal(reader.read("norm.weight"), run.everything()["norm.weight"])


@pytest.mark.parametrize("model_only", [False, True])
def test_results_of_an_earlier_last_step_are_superseded(tmp_path, model_only):
    keys = {"last_save_in_hf": True, "last_save_model_only": model_only}
    final = "final" if model_only else "checkpoint"
    run, lines = TinyRun(), []

    def last_save(step: int) -> None:
        manager = run.manager(tmp_path / "checkpoint", lines=lines, write_tokenizer=lambda folder: {}, **keys)
        if manager.load() is None or step > run.step:
            run.train(1)
            run.step = step
        manager.save(step, run.train_state(step), last=True)
        manager.close()
        assert manager.holds(step)
        with HuggingFaceReader(tmp_path / "final_hf") as reader:
            assert torch.equal(reader.read("norm.weight"), run.everything()["norm.weight"])
        model = Llama(run.model.arch)
        load_model_weights(tmp_path / final / commit.step_name(step), model)
        assert_equal(dict(model.state_dict()), weights(run))

    last_save(4)
    last_save(8)
    assert (tmp_path / "final_hf.superseded").is_dir()
    lines.clear()
    if model_only:  # nothing to resume from: step 8 is trained once more
        last_save(8)
        assert names(tmp_path / "final") == ["step-00000004", "step-00000008", "step-00000008.superseded"]
    else:
        last_save(8)
        assert lines[-1] == f"{tmp_path}/final_hf exists already and is kept"


def test_a_failed_export_leaves_nothing_and_is_a_failed_save(tmp_path, monkeypatch):
    run, lines = TinyRun(), []
    keys = {"last_save_in_hf": True, "write_tokenizer": lambda folder: {}}
    manager = run.manager(tmp_path / "checkpoint", lines=lines, **keys)
    run.train(1)
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr(HuggingFaceWriter, "publish", lambda *args: (_ for _ in ()).throw(no_space))
    manager.save(1, run.train_state(1), last=True)
    monkeypatch.undo()
    manager.close()
    assert lines[-1] == f"writing {tmp_path}/final_hf FAILED (OSError: [Errno 28] No space left on device)"
    assert manager.stats()["failed_saves"] == 1
    assert not manager.holds(1)
    assert not (tmp_path / "final_hf").exists()
    assert commit.list_unfinished(tmp_path) == []
    manager = run.manager(tmp_path / "checkpoint", **keys)
    manager.load()
    manager.save(1, run.train_state(1), last=True)
    assert manager.holds(1)
    assert (tmp_path / "final_hf").is_dir()


def test_leftovers_of_a_last_save_are_removed_too(tmp_path):
    for name in ("final/.tmp-step-00000002-x", ".tmp-final_hf-y", ".tmp-mine"):
        (tmp_path / name).mkdir(parents=True)
    lines: list[str] = []
    TinyRun().manager(tmp_path / "checkpoint", lines=lines)
    assert lines == ["removed 2 unfinished checkpoint folders: .tmp-step-00000002-x, .tmp-final_hf-y"]
    assert names(tmp_path) == [".checkpoint.lock", ".tmp-mine", "checkpoint", "final"]


def test_a_resume_says_what_changed_and_refuses_another_shape(tmp_path):
    run = TinyRun()
    job = JobConfig().model_dump(mode="json")
    run.manager(tmp_path, job=job).save(1, run.train_state(1))
    lines: list[str] = []
    job["optimizer"]["lr"] = 1.0
    run.manager(tmp_path, job=job, lines=lines).load()
    assert lines[0] == "changed since step-00000001: optimizer.lr: 0.0003 -> 1.0 (changes the curve)"
    job["model"]["n_layers"] = 7
    with pytest.raises(UserError, match=r"model\.n_layers: 6 -> 7(?s:.*)start a new run in another job") as caught:
        run.manager(tmp_path, job=job).load()
    assert caught.value.exit_code == 2  # the job is wrong, not the checkpoint


def test_another_tokenizer_is_refused_even_if_the_data_starts_afresh(tmp_path):
    run = TinyRun()
    job = JobConfig().model_dump(mode="json")
    train_state = run.train_state(1) | {"data": {"tokenizer": "fingerprint"}}
    run.manager(tmp_path, job=job, tokenizer="fingerprint").save(1, train_state)
    for excluded in ((), ("data",)):
        with pytest.raises(UserError, match=r"tokenizer\.path: .* has other contents, which gives the ids"):
            run.manager(tmp_path, job=job, tokenizer="another", exclude_from_loading=excluded).load()
    lines: list[str] = []
    job["tokenizer"]["path"] = "elsewhere/tokenizer.model"
    assert run.manager(tmp_path, job=job, tokenizer="fingerprint", lines=lines).load() == train_state
    assert lines[0].endswith("tokenizer.path: assets/tokenizer/tokenizer.model -> elsewhere/tokenizer.model (harmless)")


def test_the_contents_of_the_data_decide_about_its_keys_and_one_remedy_is_named(tmp_path):
    run = TinyRun()
    job = JobConfig().model_dump(mode="json")
    saved = run.train_state(1) | {"data": {"tokenizer": "fingerprint"}}
    run.manager(tmp_path, job=job).save(1, saved)
    job["dataset"]["path"] = "elsewhere"

    def resume(hard: list[str], soft: list[str], **keys) -> list[str]:
        lines: list[str] = []
        manager = run.manager(tmp_path, job=job, lines=lines, compare_data=lambda data: (hard, soft), **keys)
        assert manager.load() is not None
        return lines

    assert resume([], [])[0] == "changed since step-00000001: dataset.path: None -> elsewhere (harmless)"
    changed = "the source a has changed since"
    with pytest.raises(UserError, match=f"{changed}(?s:.*)Restore the data, or go on .* dataset.on_change = .warn."):
        resume([], [changed])
    job["dataset"]["on_change"] = "warn"
    lines = resume([], [changed])
    assert f"changed since step-00000001: {changed} (changes the curve)" in lines
    assert not any("dataset.path" in line for line in lines)  # said once, by what it means
    step = tmp_path / "step-00000001"
    with pytest.raises(
        UserError, match=f'training.seq_len was(?s:.*)checkpoint.initial_load_path = "{step}"'
    ) as caught:
        resume(["training.seq_len was 32, it is now 64"], [changed])
    assert caught.value.exit_code == 2
    fresh = TinyRun(seed=5)
    manager = fresh.manager(tmp_path / "new", job=job, initial_load_path=str(step))
    assert manager.load() is None  # the remedy works
    assert_equal(weights(fresh), weights(run))


def test_weights_cast_to_fp8_on_the_way_are_saved_as_they_are(tmp_path):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    model = Llama(dataclasses.replace(TinyRun().model.arch, n_heads=2, n_kv_heads=2))
    model.init_weights(1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "output" not in name)
    fully_shard(model)
    assert any(type(parameter.to_local()) is not torch.Tensor for parameter in model.parameters())  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    manager = CheckpointManager(schema.Checkpoint(), tmp_path, model, optimizer, log=lambda line: None)
    manager.save(0, {"step": 0, "tokens": 0})
    plain = Llama(model.arch)
    load_model_weights(tmp_path, plain)
    assert_equal(dict(plain.state_dict()), expected)
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    manager.save(1, {"step": 1, "tokens": 0})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert manager.load() == {"step": 1, "tokens": 0}
    load_model_weights(tmp_path / "step-00000001", plain)
    assert_equal(dict(plain.state_dict()), expected)
    restored = {name: tensor.to_local() for name, tensor in state.model_tensors(model).items()}  # type: ignore[attr-defined]
    assert_equal(restored, expected)


def train_ranks(ranks: int, folder: Path, first: int, last: int, hsdp: bool = False, **keys: object) -> list[float]:
    return run_ranks(ranks, go_on, folder, first, last, hsdp, keys)[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", pytest.param("process", marks=pytest.mark.long)])
def test_two_ranks_save_beside_the_step_loop(tmp_path, mode):
    straight = train_ranks(2, tmp_path / "straight", 0, 6)
    assert train_ranks(2, tmp_path / mode, 0, 4, async_mode=mode) == straight[:4]
    assert train_ranks(2, tmp_path / mode, 4, 6, async_mode=mode) == straight[4:]
    assert names(tmp_path / mode) == ["step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.slow
def test_a_run_moves_between_layouts(tmp_path):
    expected = TinyRun(seed=1).train(8)
    assert train_ranks(1, tmp_path, 0, 2) == expected[:2]  # bitwise: the same layout
    moved = [
        *train_ranks(2, tmp_path, 2, 4),
        *train_ranks(2, tmp_path, 4, 6, hsdp=True),
        *train_ranks(1, tmp_path, 6, 8),
    ]
    assert moved == pytest.approx(expected[2:], abs=1e-5)  # fp32 sums in another order
    assert not commit.verify_folder(tmp_path / "step-00000004")
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(names(tmp_path / "step-00000004"))


@pytest.mark.slow
def test_each_rank_reads_its_slices_of_a_hugging_face_folder(tmp_path):
    run = TinyRun(seed=7)
    writer = HuggingFaceWriter(tmp_path / "hf", run.model.arch, "float32")
    tensors = run.everything()
    for name in writer.names:
        writer.add(name, tensors[name])
    writer.publish()
    keys = {"initial_load_path": str(tmp_path / "hf"), "initial_load_in_hf": True}
    losses = train_ranks(2, tmp_path / "checkpoint", 0, 2, **keys)
    assert losses == pytest.approx(run.train(2), abs=1e-5)  # fp32 sums in another order
