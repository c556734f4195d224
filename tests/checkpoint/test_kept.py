"""Which checkpoints stay: the newest, every n-th, the best, and what the last save leaves."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import titanlite
from small_runs import SMALL
from tiny_run import Checkpoints, TinyRun, assert_equal, load_model_weights, names, weights

from titanlite.checkpoint import published, step_folders
from titanlite.checkpoint.find import checkpoints_at
from titanlite.checkpoint.published import HuggingFaceReader
from titanlite.config.errors import CheckpointError
from titanlite.config.schema import JobConfig
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")

JOB = JobConfig().model_dump(mode="json")


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"keep_latest_k": 2}, [6, 7]),
        ({"keep_latest_k": 0}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_latest_k": 1, "keep_every_n_steps": 3}, [3, 6, 7]),
    ],
)
@pytest.mark.parametrize("threads", [True, False])
def test_retention_keeps_the_newest_and_touches_nothing_else(tmp_path, monkeypatch, keys, kept, threads):
    others = ["step-00000000", "step-00000000-notes"]  # without a manifest, none of ours
    run, lines = TinyRun(), []
    manager = run.manager(tmp_path, lines=lines, **keys)
    for name in others:
        (tmp_path / name).mkdir()
    if not threads:  # as with `ulimit -v`
        failed = RuntimeError("can't start new thread")
        monkeypatch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(failed))
    for step in range(1, 8):
        for _ in range(2):  # the second has nothing to do
            manager.save(step, run.train_state(step))
    assert threads or names(tmp_path) == [*others, *map(step_folders.step_name, kept)]
    manager.close()
    assert names(tmp_path) == [*others, *map(step_folders.step_name, kept)]
    assert manager.stats()["failed_saves"] == 0
    removals = [line for line in lines if getattr(line, "kind", "") == "foreground"]
    assert len(removals) == (0 if threads else 7)
    manager = run.manager(tmp_path, keep_latest_k=1)  # the end removes what a kill has left
    manager.load()
    manager.save(7, run.train_state(7), last=True)
    manager.close()
    assert names(tmp_path) == [*others, "step-00000007"]


def started(run: TinyRun, folder: Path, *, job: dict = JOB, identity: str = "ours", **keys: object) -> Checkpoints:
    manager = run.manager(folder / "checkpoint", job=job, **{"keep_best": True, "keep_latest_k": 1, **keys})
    manager.saver.run = identity
    return manager


def save(manager: Checkpoints, losses: dict[int, float | None], identity: str = "ours", last: int = -1) -> list[bool]:
    """Save one step after the other. Returns whether each was the best one when it was saved."""
    better = []
    for step, loss in losses.items():
        better.append(loss is not None and manager.saver.improves(loss))
        known = {} if loss is None else {"validation_loss": loss}
        manager.save(step, {"step": step, "tokens": 0, "run": identity, **known}, last=step == last)
    manager.close()
    return better


def test_the_best_one_stays_until_a_better_one_is_saved(tmp_path):
    run, best = TinyRun(), tmp_path / "checkpoint" / "best"
    better = save(started(run, tmp_path, async_mode="async"), {1: 3.0, 2: 2.0, 3: 2.5, 4: None, 5: 2.0})
    assert better == [True, True, False, False, False]
    assert names(best.parent) == ["best", "step-00000002", "step-00000005"]
    assert checkpoints_at(best) == [best.parent / "step-00000002"]
    manager = started(run, tmp_path)
    assert not any(map(manager.saver.improves, (float("nan"), float("inf"), 2.5)))
    assert save(manager, {6: 1.5}) == [True]  # a later start knows the losses from the disk
    assert names(best.parent) == ["best", "step-00000006"]
    assert save(started(run, tmp_path, last_save_model_only=True), {8: 1.0}, last=8) == [True]
    assert best.resolve() == tmp_path / "final" / "step-00000008"


@pytest.mark.parametrize("call", ["unlink", "symlink_to", "replace"])
def test_a_kill_while_the_link_is_moved_leaves_it_at_a_checkpoint(tmp_path, call):
    run, link = TinyRun(), tmp_path / "checkpoint" / "best"
    save(started(run, tmp_path, keep_latest_k=0), {1: 2.0, 2: 1.0})
    link.unlink()
    link.symlink_to("step-00000001")  # as before step 2 was saved
    manager = started(run, tmp_path, keep_latest_k=0)
    if (child := os.fork()) == 0:
        setattr(Path, call, lambda *arguments, **keys: os.kill(os.getpid(), signal.SIGKILL))
        manager.saver._purge()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert link.resolve().name == "step-00000001"
    manager.saver.purge()
    manager.close()
    assert link.resolve().name == "step-00000002"


def test_losses_of_another_run_or_on_other_rows_or_of_lost_checkpoints_do_not_count(tmp_path):
    run, folder = TinyRun(), tmp_path / "checkpoint"
    save(started(run, tmp_path, identity="theirs"), {1: 1.0}, identity="theirs")
    assert save(started(run, tmp_path), {2: 2.0}) == [True]
    other = {**JOB, "validation": {**JOB["validation"], "sequences": 7}}
    assert save(started(run, tmp_path, job=other), {3: 3.0}) == [True]
    more_often = {**other, "validation": {**other["validation"], "freq": 7}}
    assert save(started(run, tmp_path, job=more_often), {4: 4.0, 5: 5.0}) == [False, False]
    (folder / "step-00000003" / "manifest.json").write_text("{}")
    manager = started(run, tmp_path, job=other)
    assert manager.saver.improves(4.5)
    manager.close()
    (folder / "best").unlink()
    assert save(started(run, tmp_path, keep_best=False), {6: 1.0}) == [False]
    assert "best" not in names(folder)


VALIDATED = """
[validation]
freq = 2
holdout = 0.05
sequences = 4
"""


@pytest.mark.slow
def test_a_run_that_gets_worse_keeps_its_best_step_over_a_restart(tmp_path: Path) -> None:
    keys = 'interval = 5\nkeep_best = true\nkeep_latest_k = 1\nasync_mode = "async"'
    (tmp_path / "job.toml").write_text(SMALL.replace("interval = 5", keys) + VALIDATED)
    words = ["train", "--job.config_file", tmp_path / "job.toml", "--job.dump_folder", tmp_path / "out"]
    batch = ["--training.local_batch_size", 1, "--training.global_batch_size", 2]
    for steps, rate in ((7, 0.01), (12, 1.0)):
        titanlite(*words, *batch, "--training.steps", steps, "--optimizer.lr", rate, ranks=2)
    lines = (tmp_path / "out" / "validation.jsonl").read_text().splitlines()
    losses = {entry["step"]: entry["loss"] for entry in map(json.loads, lines) if entry["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert 0 < best < 12, losses
    link = tmp_path / "out" / "checkpoint" / "best"
    assert link.resolve().name == step_folders.step_name(best)
    assert {path.name for path in step_folders.list_checkpoints(link.parent)} == {f"step-{best:08d}", "step-00000012"}
    assert "def" in titanlite("generate", "--checkpoint", link, "--prompt", "def", "--max-new-tokens", 2)


@pytest.mark.parametrize("model_only", [False, True])
def test_a_last_save_leaves_what_is_asked_for_and_an_earlier_one_is_superseded(tmp_path, model_only):
    final = "final" if model_only else "checkpoint"
    run, lines = TinyRun(), []

    def last_save(step: int) -> None:
        keys = {"last_save_in_hf": True, "last_save_model_only": model_only, "async_mode": "async"}
        manager = run.manager(tmp_path / "checkpoint", lines=lines, write_tokenizer=lambda folder: {}, **keys)
        if manager.load() is None or step > run.step:
            run.train(1)
            run.step = step
        manager.save(step, run.train_state(step), last=True)
        manager.close()
        assert manager.holds(step)
        found = HuggingFaceReader(tmp_path / "final_hf").read("norm.weight")
        assert torch.equal(found, run.everything()["norm.weight"])
        model = Llama(run.model.arch)
        load_model_weights(tmp_path / final / step_folders.step_name(step), model)
        assert_equal(dict(model.state_dict()), weights(run))

    last_save(4)
    last_save(8)
    assert (tmp_path / "final_hf.superseded").is_dir()
    lines.clear()
    last_save(8)
    if model_only:  # nothing to resume from: step 8 is trained once more
        assert names(tmp_path / "final") == ["step-00000004", "step-00000008", "step-00000008.superseded"]
        with pytest.raises(CheckpointError, match="holds weights only"):
            TinyRun().manager(tmp_path / "final").load()
    else:
        assert lines[-1] == f"{tmp_path}/final_hf exists already and is kept"


def test_a_failed_export_leaves_nothing_and_is_a_failed_save(tmp_path, monkeypatch):
    run, lines = TinyRun(), []
    keys: dict[str, Any] = {"last_save_in_hf": True, "write_tokenizer": lambda folder: {}}
    manager = run.manager(tmp_path / "checkpoint", lines=lines, **keys)
    run.train(1)
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr(published, "save_file", lambda *args: (_ for _ in ()).throw(no_space))
    manager.save(1, run.train_state(1), last=True)
    monkeypatch.undo()
    manager.close()
    assert "FAILED" in lines[-1]
    assert "No space left on device" in lines[-1]
    assert manager.stats()["failed_saves"] == 1
    assert not manager.holds(1)
    for name in ("final/.tmp-step-00000002-x", ".tmp-final_hf-y", ".tmp-mine"):
        (tmp_path / name).mkdir(parents=True)
    manager = run.manager(tmp_path / "checkpoint", lines=lines, **keys)
    assert lines[-1] == "removed 2 unfinished checkpoint folders: .tmp-step-00000002-x, .tmp-final_hf-y"
    manager.load()
    manager.save(1, run.train_state(1), last=True)
    assert manager.holds(1)
    assert names(tmp_path) == [".checkpoint.lock", ".tmp-mine", "checkpoint", "final", "final_hf"]
