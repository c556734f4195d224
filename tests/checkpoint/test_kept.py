"""Which checkpoints stay: the newest, every n-th, the best, and what the last save leaves."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import titanlite
from small_runs import SMALL
from tiny_run import TinyRun, assert_equal, load_model_weights, names, weights

from titanlite.checkpoint import published, step_folders
from titanlite.checkpoint.find import checkpoints_at
from titanlite.checkpoint.published import hf_weights
from titanlite.config.errors import CheckpointError
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"keep_latest_k": 2}, [6, 7]),
        ({"keep_latest_k": 0}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_latest_k": 1, "keep_every_n_steps": 3}, [3, 6, 7]),
    ],
)
def test_retention_keeps_the_newest_and_touches_nothing_else(tmp_path, keys, kept):
    others = ["step-00000000", "step-00000000-notes"]  # without a manifest, none of ours
    run = TinyRun()
    manager = run.manager(tmp_path, **keys)
    for name in others:
        (tmp_path / name).mkdir()
    for step in range(1, 8):
        for _ in range(2):  # the second has nothing to do
            manager.save(step, run.train_state(step))
    manager.close()
    assert names(tmp_path) == [*others, *map(step_folders.step_name, kept)]
    assert manager.stats()["failed_saves"] == 0
    manager = run.manager(tmp_path, keep_latest_k=1)  # the end removes what a kill has left
    manager.load()
    manager.save(7, run.train_state(7), last=True)
    manager.close()
    assert names(tmp_path) == [*others, "step-00000007"]


def scored(run: TinyRun, step: int, loss: float) -> dict[str, Any]:
    return run.train_state(step) | {"hooks": {"BestCheckpoint": {"step": step, "loss": loss}}}


def best_of(folder: Path) -> str:
    return checkpoints_at(folder / "best")[0].name


def test_the_link_leads_to_the_best_one_which_stays_until_a_better_one_is_saved(tmp_path):
    run, folder = TinyRun(), tmp_path / "checkpoint"
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0, 5: 3.5, 6: 2.0, 8: 1.0}
    for steps, best, kept, keys in (
        (range(1, 6), 2, [2, 5], {"async_mode": "async"}),
        ([6], 6, [6], {}),
        ([8], 8, [6], {"last_save_model_only": True}),
    ):
        folder.mkdir(exist_ok=True)
        (folder / ".best.new").symlink_to("anything")  # a kill has left it
        manager = run.manager(folder, keep_latest_k=1, keep_best=True, **keys)
        for step in steps:
            assert manager.saver.improves(losses[step]) == (step in (1, 2, 6, 8))
            manager.save(step, scored(run, step, losses[step]), last=step == 8)
        manager.close()
        assert names(folder) == ["best", *map(step_folders.step_name, kept)]
        assert best_of(folder) == step_folders.step_name(best)
    assert (folder / "best").resolve() == tmp_path / "final" / "step-00000008"


def test_the_files_alone_say_which_one_is_the_best(tmp_path):
    run = TinyRun()
    manager = run.manager(tmp_path, keep_best=True)
    manager.save(2, run.train_state(2) | {"validation_loss": 2.0})  # as an earlier version has written it
    manager.save(4, scored(run, 4, 1.0))
    manager.save(6, scored(run, 4, 1.0))  # step 6 was not validated
    manager.close()
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("step-00000002")  # a kill came before the link was moved
    manager = run.manager(tmp_path, keep_best=True)
    manager.load()
    manager.saver.link_best()
    manager.close()
    assert best_of(tmp_path) == "step-00000004"
    manager = run.manager(tmp_path, keep_best=True, keep_latest_k=1, load_step=2)  # 4 and 6 make room
    manager.load()
    manager.saver.link_best()
    assert best_of(tmp_path) == "step-00000002"
    (tmp_path / "step-00000003").mkdir()  # in the way of the save
    manager.save(3, scored(run, 3, 0.5))
    assert manager.stats()["failed_saves"] == 1
    assert manager.saver.improves(0.9)
    (tmp_path / "step-00000003").rmdir()
    manager.save(5, scored(run, 5, 3.0))
    manager.close()
    assert best_of(tmp_path) == "step-00000002"


@pytest.mark.slow
def test_a_run_that_gets_worse_keeps_its_best_step_over_a_restart(tmp_path: Path) -> None:
    keys = 'interval = 5\nkeep_best = true\nkeep_latest_k = 1\nasync_mode = "async"'
    validation = "[validation]\nfreq = 2\nholdout = 0.05\nsequences = 4\n"
    (tmp_path / "job.toml").write_text(SMALL.replace("interval = 5", keys) + validation)
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
    link.unlink()
    link.symlink_to("step-00000099")  # as of a run that went back to an earlier step
    titanlite(*words, "--training.steps", 12)
    assert link.resolve().name == step_folders.step_name(best)


@pytest.mark.parametrize("model_only", [False, True])
def test_a_last_save_leaves_what_is_asked_for_and_an_earlier_one_is_superseded(tmp_path, model_only):
    final = "final" if model_only else "checkpoint"
    run, lines = TinyRun(), []

    def last_save(step: int) -> None:
        keys = {"last_save_in_hf": True, "last_save_model_only": model_only, "async_mode": "async"}
        manager = run.manager(tmp_path / "checkpoint", lines=lines, **keys)
        if manager.load() is None or step > run.step:
            run.train(1)
            run.step = step
        manager.save(step, run.train_state(step), last=True)
        manager.close()
        assert manager.holds(step)
        found = hf_weights(tmp_path / "final_hf").read("norm.weight")
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
    manager = run.manager(tmp_path / "checkpoint", lines=lines, last_save_in_hf=True)
    run.train(1)
    no_space = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(published, "save_file", lambda *args: (_ for _ in ()).throw(no_space))
        manager.save(1, run.train_state(1), last=True)
    manager.close()
    assert re.search("FAILED .*No space left on device", lines[-1])
    assert (manager.stats()["failed_saves"], manager.holds(1)) == (1, False)
    for name in ("final/.tmp-step-00000002-x", ".tmp-final_hf-y", ".tmp-mine"):
        (tmp_path / name).mkdir(parents=True)
    manager = run.manager(tmp_path / "checkpoint", last_save_in_hf=True)
    manager.load()
    manager.save(1, run.train_state(1), last=True)
    assert manager.holds(1)
    assert names(tmp_path) == [".tmp-mine", "checkpoint", "final", "final_hf"]
    assert not names(tmp_path / "final")
