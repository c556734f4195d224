"""Which checkpoints stay: the newest, every n-th, the best, and what the last save leaves."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import titanlite
from small_runs import SMALL
from tiny_run import TinyRun, assert_equal, list_names, load_model_weights

from titanlite.checkpoint import huggingface
from titanlite.checkpoint.find import find_checkpoints
from titanlite.checkpoint.huggingface import hf_weights
from titanlite.checkpoint.manifest import list_checkpoints, step_folder_name
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
def test_retention_keeps_the_newest_and_foreign_files(tmp_path, keys, kept):
    run = TinyRun()
    other = run.checkpoints(tmp_path)
    other.save(0, run.train_state(0) | {"run": "another run"})
    foreign = ["step-00000000-notes", "step-00000000/notes.txt", "step-00000001/notes.txt"]
    foreign += ["step-00000100/lit_model.pth", "step-00000101/manifest.json", ".tmp-step-00000200"]
    checkpoints = run.checkpoints(tmp_path, **keys)
    for step in range(1, 8):
        for _ in range(2):  # the second has nothing to do
            checkpoints.save(step, run.train_state(step) | {"run": "this run"})
        if step == 1:
            write_all(tmp_path, foreign)
    checkpoints.close()
    others = {Path(name).parts[0] for name in foreign}
    assert {*list_names(tmp_path)} - others == {*map(step_folder_name, kept)} - others
    assert checkpoints.stats()["failed_saves"] == 0
    if 1 not in kept:
        assert list_names(tmp_path / "step-00000001") == ["notes.txt"]

    checkpoints = run.checkpoints(tmp_path, keep_latest_k=1)  # the end removes what a kill has left
    checkpoints.load()
    checkpoints.save(7, run.train_state(7) | {"run": "this run"}, is_last=True)
    checkpoints.close()
    assert {*list_names(tmp_path)} == {*others, "step-00000007"}
    assert all((tmp_path / name).read_text() == name for name in foreign)
    assert (tmp_path / "step-00000000" / "manifest.json").is_file()


def write_all(folder: Path, files: list[str]) -> None:
    """Write files that no run has written. Each holds its name."""
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)


def scored(run: TinyRun, step: int, loss: float) -> dict[str, Any]:
    name = (
        "best_checkpoint" if step % 2 else "BestCheckpoint"
    )  # as this version or an earlier one saves it
    return run.train_state(step) | {"hooks": {name: {"step": step, "loss": loss}}}


def best_of(folder: Path) -> str:
    return find_checkpoints(folder / "best")[0].name


def test_best_checkpoint_is_linked_and_kept_until_a_better_one_is_saved(tmp_path):
    run, folder = TinyRun(), tmp_path / "checkpoint"
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0, 5: 3.5, 6: 2.0, 8: 1.0}
    for steps, best, kept, keys in (
        (range(1, 6), 2, [2, 5], {"async_mode": "async"}),
        ([6], 6, [6], {}),
        ([8], 8, [6], {"last_save_model_only": True}),
    ):
        folder.mkdir(exist_ok=True)
        (folder / ".best.new").symlink_to("anything")  # a kill has left it
        checkpoints = run.checkpoints(folder, keep_latest_k=1, keep_best=True, **keys)
        for step in steps:
            assert checkpoints.saver.is_best(losses[step]) == (step in (1, 2, 6, 8))
            checkpoints.save(step, scored(run, step, losses[step]), is_last=step == 8)
        checkpoints.close()
        assert list_names(folder) == ["best", *map(step_folder_name, kept)]
        assert best_of(folder) == step_folder_name(best)
    assert (folder / "best").resolve() == tmp_path / "final" / "step-00000008"


def test_best_checkpoint_is_determined_by_the_files_alone(tmp_path):
    run = TinyRun()
    checkpoints = run.checkpoints(tmp_path, keep_best=True)
    checkpoints.save(
        2, run.train_state(2) | {"validation_loss": 2.0}
    )  # as an earlier version has written it
    checkpoints.save(4, scored(run, 4, 1.0))
    checkpoints.save(6, scored(run, 4, 1.0))  # step 6 was not validated
    checkpoints.close()
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("step-00000002")  # a kill came before the link was moved
    checkpoints = run.checkpoints(tmp_path, keep_best=True)
    checkpoints.load()
    checkpoints.saver.update_best_link()
    checkpoints.close()
    assert best_of(tmp_path) == "step-00000004"
    checkpoints = run.checkpoints(
        tmp_path, keep_best=True, keep_latest_k=1, load_step=2
    )  # 4 and 6 make room
    checkpoints.load()
    checkpoints.saver.update_best_link()
    assert best_of(tmp_path) == "step-00000002"
    (tmp_path / "step-00000003").mkdir()  # in the way of the save
    checkpoints.save(3, scored(run, 3, 0.5))
    assert checkpoints.stats()["failed_saves"] == 1
    assert checkpoints.saver.is_best(0.9)
    (tmp_path / "step-00000003").rmdir()
    checkpoints.save(5, scored(run, 5, 3.0))
    checkpoints.close()
    assert best_of(tmp_path) == "step-00000002"


@pytest.mark.slow
def test_best_checkpoint_survives_worse_steps_and_a_restart(tmp_path):
    keys = 'interval = 5\nkeep_best = true\nkeep_latest_k = 1\nasync_mode = "async"'
    validation = "[validation]\nfreq = 2\nholdout = 0.05\nsequences = 4\n"
    (tmp_path / "job.toml").write_text(SMALL.replace("interval = 5", keys) + validation)
    words = [
        "train",
        "--job.config_file",
        tmp_path / "job.toml",
        "--job.dump_folder",
        tmp_path / "out",
    ]
    batch = ["--training.local_batch_size", 1, "--training.global_batch_size", 2]
    for steps, rate in ((7, 0.01), (12, 1.0)):
        titanlite(*words, *batch, "--training.steps", steps, "--optimizer.lr", rate, ranks=2)
    lines = (tmp_path / "out" / "validation.jsonl").read_text().splitlines()
    losses = {entry["step"]: entry["loss"] for entry in map(json.loads, lines) if entry["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert 0 < best < 12, losses
    link = tmp_path / "out" / "checkpoint" / "best"
    assert link.resolve().name == step_folder_name(best)
    assert {path.name for path in list_checkpoints(link.parent)} == {
        f"step-{best:08d}",
        "step-00000012",
    }
    assert "def" in titanlite(
        "generate", "--checkpoint", link, "--prompt", "def", "--max-new-tokens", 2
    )
    link.unlink()
    link.symlink_to("step-00000099")  # as of a run that went back to an earlier step
    titanlite(*words, "--training.steps", 12)
    assert link.resolve().name == step_folder_name(best)


@pytest.mark.parametrize("model_only", [False, True])
def test_last_save_writes_final_outputs_and_archives_earlier_ones(tmp_path, model_only):
    final = "final" if model_only else "checkpoint"
    run, lines = TinyRun(), []

    def last_save(step: int) -> None:
        keys = {"last_save_in_hf": True, "last_save_model_only": model_only, "async_mode": "async"}
        checkpoints = run.checkpoints(tmp_path / "checkpoint", lines=lines, **keys)
        if checkpoints.load() is None or step > run.step:
            run.train(1)
            run.step = step
        checkpoints.save(step, run.train_state(step), is_last=True)
        checkpoints.close()
        assert checkpoints.has_saved(step)
        found = hf_weights(tmp_path / "final_hf").read("norm.weight")
        assert torch.equal(found, run.copy_state()["norm.weight"])
        model = Llama(run.model.arch)
        load_model_weights(tmp_path / final / step_folder_name(step), model)
        assert_equal(dict(model.state_dict()), run.copy_weights())

    last_save(4)
    last_save(8)
    assert (tmp_path / "final_hf.archived").is_dir()
    lines.clear()
    last_save(8)
    if model_only:  # nothing to resume from: step 8 is trained once more
        assert list_names(tmp_path / "final") == [
            "step-00000004",
            "step-00000008",
            "step-00000008.archived",
        ]
        with pytest.raises(CheckpointError, match="weights only"):
            TinyRun().checkpoints(tmp_path / "final").load()
    else:
        assert lines[-1] == f"Keeping {tmp_path}/final_hf, which exists already"


def test_failed_export_leaves_no_files_and_counts_as_failed_save(tmp_path, monkeypatch):
    run, lines = TinyRun(), []
    checkpoints = run.checkpoints(tmp_path / "checkpoint", lines=lines, last_save_in_hf=True)
    run.train(1)
    no_space = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "save_file", lambda *args: (_ for _ in ()).throw(no_space))
        checkpoints.save(1, run.train_state(1), is_last=True)
    checkpoints.close()
    assert re.search("FAILED .*No space left on device", lines[-1])
    assert (checkpoints.stats()["failed_saves"], checkpoints.has_saved(1)) == (1, False)
    leftovers = (
        f"final/.tmp-step-00000002-{checkpoints.context.token}-1",
        f".tmp-final_hf-{checkpoints.context.token}",
    )
    foreign = "final/.tmp-step-00000002-0123456789abcdef-01234567-1", ".tmp-final_hf-y"
    for name in (*leftovers, *foreign):
        (tmp_path / name).mkdir(parents=True)
    checkpoints = run.checkpoints(tmp_path / "checkpoint", last_save_in_hf=True)
    checkpoints.load()
    checkpoints.save(1, run.train_state(1), is_last=True)
    assert checkpoints.has_saved(1)
    assert list_names(tmp_path) == [".tmp-final_hf-y", "checkpoint", "final", "final_hf"]
    assert list_names(tmp_path / "final") == [Path(foreign[0]).name]


@pytest.mark.parametrize(
    "name", ["final_hf/model.pt", "final/step-00000001/model.pt", "checkpoint/best"]
)
def test_last_save_never_replaces_files_of_other_programs(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("foreign")
    run, keys = (
        TinyRun(),
        {"last_save_in_hf": "hf" in name, "last_save_model_only": "final/" in name},
    )
    checkpoints = run.checkpoints(tmp_path / "checkpoint", keep_best=True, **keys)
    run.train(1)
    checkpoints.save(1, scored(run, 1, 2.0), is_last=True)
    checkpoints.close()
    assert (tmp_path / name).read_text() == "foreign"
    assert checkpoints.has_saved(1) == ("best" in name)
    assert not [*tmp_path.rglob("*.archived")]


@pytest.mark.slow
def test_foreign_final_hf_is_an_error_before_training(tmp_path):
    (tmp_path / "job.toml").write_text(SMALL)
    foreign = tmp_path / "out" / "final_hf" / "model.pt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("foreign")
    job = ["--job.config_file", tmp_path / "job.toml", "--job.dump_folder", tmp_path / "out"]

    log = titanlite("train", *job, "--checkpoint.last_save_in_hf", code=2)

    assert "checkpoint.last_save_in_hf" in log
    assert str(foreign.parent) in log
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["final_hf"]
    assert foreign.read_text() == "foreign"


def test_next_start_finishes_an_interrupted_removal(two_saved, monkeypatch):
    folder, run = two_saved
    checkpoints, unlink = run.checkpoints(folder, keep_latest_k=1), Path.unlink

    def fail_at_index(path: Path, missing_ok: bool = False) -> None:
        if path.name == ".metadata":
            raise OSError(5, "Input/output error")
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail_at_index)
        checkpoints.save(6, run.train_state(6))
    checkpoints.close()
    assert list_checkpoints(folder) == [folder / "step-00000006"]
    assert list_names(folder) == ["step-00000002", "step-00000004", "step-00000006"]
    run.checkpoints(folder)
    assert list_names(folder) == ["step-00000006"]
