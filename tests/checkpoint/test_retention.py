"""Retention keeps the newest, every n-th and the best checkpoint, and files of other programs."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_small
from small_runs import read_jsonl
from tiny_run import Checkpoints, TinyRun, assert_equal, list_names, load_model_weights

from titanlite.checkpoint import huggingface
from titanlite.checkpoint.find import find_checkpoints
from titanlite.checkpoint.huggingface import hf_weights
from titanlite.checkpoint.manifest import list_checkpoints, step_folder_name
from titanlite.config.errors import CheckpointError, UserError
from titanlite.load_run import load_run
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
def test_retention_keeps_the_selected_checkpoints_and_foreign_files(tmp_path, keys, kept):
    run = TinyRun()
    run.checkpoints(tmp_path).save(0, run="another run")
    foreign = (
        "step-00000000-notes step-00000000/notes.txt step-00000001/notes.txt .tmp-step-00000200 "
        "step-00000100/lit_model.pth step-00000101/manifest.json"
    ).split()
    others = {Path(name).parts[0] for name in foreign}
    checkpoints = run.checkpoints(tmp_path, **keys)

    for step in range(1, 8):
        for _ in range(2):  # the second save does nothing
            checkpoints.save(step, run="this run")
        if step == 1:
            write_files(tmp_path, *foreign)
    checkpoints.close()

    assert {*list_names(tmp_path)} - others == {*map(step_folder_name, kept)} - others
    assert checkpoints.stats()["failed_saves"] == 0

    if 1 not in kept:
        assert list_names(tmp_path / "step-00000001") == ["notes.txt"]

    # The last save also removes what a killed run has left.
    checkpoints = run.checkpoints(tmp_path, keep_latest_k=1)
    checkpoints.load()
    checkpoints.save(7, run="this run", is_last=True)
    checkpoints.close()

    assert {*list_names(tmp_path)} == {*others, "step-00000007"}
    assert all((tmp_path / name).read_text() == name for name in foreign)
    assert (tmp_path / "step-00000000" / "manifest.json").is_file()


def write_files(folder: Path, *names: str) -> None:
    """Write files of other programs. Each contains its name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def scored(step: int, loss: float) -> dict[str, Any]:
    """Return the state of the hooks after a validation."""
    # An earlier version used the other name.
    name = "best_checkpoint" if step % 2 else "BestCheckpoint"
    return {name: {"step": step, "loss": loss}}


def best_of(folder: Path) -> str:
    return find_checkpoints(folder / "best")[0].name


def test_best_checkpoint_is_linked_and_kept_until_a_better_one_is_saved(tmp_path):
    run = TinyRun()
    folder = tmp_path / "checkpoint"

    def save(
        losses: dict[int, float],
        kept: list[int],
        **keys: Any,
    ) -> None:
        """Save a step for each loss, and check which checkpoints remain. The last one is best."""
        folder.mkdir(exist_ok=True)
        (folder / ".best.new").symlink_to("anything")  # left by a killed run
        checkpoints = run.checkpoints(folder, keep_latest_k=1, keep_best=True, **keys)
        for step, loss in losses.items():
            assert checkpoints.saver.is_best(loss) == (step in (1, 2, 6, 8))
            checkpoints.save(step, hooks=scored(step, loss), is_last=step == 8)
        checkpoints.close()
        assert list_names(folder) == ["best", *map(step_folder_name, kept)]

    save({1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0, 5: 3.5}, kept=[2, 5], async_mode="async")
    assert best_of(folder) == "step-00000002"
    save({6: 2.0}, kept=[6])
    assert best_of(folder) == "step-00000006"
    save({8: 1.0}, kept=[6], last_save_model_only=True)
    assert (folder / "best").resolve() == tmp_path / "final" / "step-00000008"


def test_best_checkpoint_is_determined_by_the_files_alone(tmp_path):
    run = TinyRun()
    checkpoints = run.checkpoints(tmp_path, keep_best=True)
    checkpoints.save(2, validation_loss=2.0)  # as an earlier version
    checkpoints.save(4, hooks=scored(4, 1.0))
    checkpoints.save(6, hooks=scored(4, 1.0))  # step 6 was not validated
    checkpoints.close()

    def restart(**keys: Any) -> Checkpoints:
        checkpoints = run.checkpoints(tmp_path, keep_best=True, **keys)
        checkpoints.load()
        checkpoints.saver.update_best_link()
        return checkpoints

    # The run was killed before it moved the link.
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("step-00000002")
    restart().close()

    assert best_of(tmp_path) == "step-00000004"

    # The rollback renames steps 4 and 6.
    checkpoints = restart(keep_latest_k=1, load_step=2)

    assert best_of(tmp_path) == "step-00000002"

    # A failed save is not the best one.
    in_the_way = tmp_path / "step-00000003"
    in_the_way.touch()
    checkpoints.save(3, hooks=scored(3, 0.5))

    assert checkpoints.stats()["failed_saves"] == 1
    assert checkpoints.saver.is_best(0.9)

    in_the_way.unlink()
    checkpoints.save(5, hooks=scored(5, 3.0))
    checkpoints.close()

    assert best_of(tmp_path) == "step-00000002"


@pytest.mark.slow
def test_best_checkpoint_of_a_run_survives_worse_steps_and_a_restart(tmp_path):
    out = tmp_path / "out"
    options = "--checkpoint.keep_best --checkpoint.keep_latest_k 1 --checkpoint.async_mode async"
    options += " --validation.freq 2 --validation.holdout 0.05 --validation.sequences 4"
    options += " --training.local_batch_size 1 --training.global_batch_size 2 --training.steps"
    for last in ("7 --optimizer.lr 0.01", "12 --optimizer.lr 1"):
        run_small(out, options, last, ranks=2)

    entries = read_jsonl(out / "validation.jsonl")
    losses = {entry["step"]: entry["loss"] for entry in entries if entry["step"]}
    best = min(losses, key=losses.__getitem__)

    assert 0 < best < 12, losses

    link = out / "checkpoint" / "best"
    assert link.resolve().name == step_folder_name(best)

    kept = {path.name for path in list_checkpoints(link.parent)}
    assert kept == {step_folder_name(best), "step-00000012"}

    # Such files exist after a run has resumed from an earlier step.
    link.unlink()
    link.symlink_to("step-00000099")
    run_small(out, options, "12")

    assert link.resolve().name == step_folder_name(best)


@pytest.mark.parametrize("model_only", [False, True])
def test_last_save_writes_final_outputs_and_archives_earlier_ones(tmp_path, model_only):
    final = tmp_path / ("final" if model_only else "checkpoint")
    run = TinyRun()

    def save_last(step: int) -> list[str]:
        checkpoints = run.checkpoints(
            tmp_path / "checkpoint",
            last_save_in_hf=True,
            last_save_model_only=model_only,
            async_mode="async",
        )
        if checkpoints.load() is None or step > run.step:
            run.train(1)
            run.step = step
        checkpoints.save(step, is_last=True)
        checkpoints.close()
        assert checkpoints.has_saved(step)
        exported = hf_weights(tmp_path / "final_hf").read("norm.weight")
        assert torch.equal(exported, run.copy_state()["norm.weight"])
        model = Llama(run.model.arch)
        load_model_weights(final / step_folder_name(step), model)
        assert_equal(dict(model.state_dict()), run.copy_weights())
        return checkpoints.lines

    save_last(4)
    save_last(8)

    assert (tmp_path / "final_hf.archived").is_dir()

    lines = save_last(8)
    if not model_only:
        assert lines[-1] == f"Keeping {tmp_path}/final_hf, which exists already"
        return

    # A run cannot resume from weights, so step 8 is trained again.
    names = ["step-00000004", "step-00000008", "step-00000008.archived"]

    assert list_names(final) == names
    with pytest.raises(CheckpointError, match="weights only"):
        TinyRun().checkpoints(final).load()


def test_failed_export_leaves_no_files_and_counts_as_failed_save(tmp_path):
    run = TinyRun()
    folder = tmp_path / "checkpoint"
    checkpoints = run.checkpoints(folder, last_save_in_hf=True)
    run.train(1)
    no_space = OSError(28, "No space left on device")
    with patch.object(huggingface, "save_file", side_effect=no_space):
        checkpoints.save(1, is_last=True)
    checkpoints.close()

    assert re.search("Could not .*No space left on device", checkpoints.lines[-1])
    assert (checkpoints.stats()["failed_saves"], checkpoints.has_saved(1)) == (1, False)

    token = checkpoints.context.token
    foreign = ".tmp-step-00000002-0123456789abcdef-01234567-1"
    leftovers = f"final/.tmp-step-00000002-{token}-1 .tmp-final_hf-{token}"
    for name in f"{leftovers} final/{foreign} .tmp-final_hf-y".split():
        (tmp_path / name).mkdir(parents=True)
    checkpoints = run.checkpoints(folder, last_save_in_hf=True)
    checkpoints.load()
    checkpoints.save(1, is_last=True)

    assert checkpoints.has_saved(1)
    assert list_names(tmp_path) == [".tmp-final_hf-y", "checkpoint", "final", "final_hf"]
    assert list_names(tmp_path / "final") == [foreign]


def fail_exports() -> None:
    error = OSError(28, "No space left on device")
    patch.object(huggingface, "save_file", side_effect=error).start()


@pytest.mark.slow
def test_error_after_a_failed_export_names_the_saved_checkpoint_and_a_restart_exports_it(tmp_path):
    run = tmp_path / "run"
    options = "--checkpoint.last_save_in_hf --training.steps 2"

    log = run_small(run, options, before=fail_exports, code=4)

    [error] = [line for line in log.splitlines() if "exporting it" in line]
    assert f"{run}/checkpoint/step-00000002" in error

    metrics = (run / "metrics.jsonl").read_bytes()
    run_small(run, options)

    assert (run / "final_hf/config.json").is_file()
    assert (run / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    "name", ["final_hf/model.pt", "final/step-00000001/model.pt", "checkpoint/best"]
)
def test_last_save_never_replaces_files_of_other_programs(tmp_path, name):
    write_files(tmp_path, name)
    run = TinyRun()
    options = {"last_save_in_hf": "hf" in name, "last_save_model_only": "final/" in name}
    checkpoints = run.checkpoints(tmp_path / "checkpoint", keep_best=True, **options)
    run.train(1)
    checkpoints.save(1, hooks=scored(1, 2.0), is_last=True)
    checkpoints.close()

    assert (tmp_path / name).read_text() == name
    assert checkpoints.has_saved(1) == ("best" in name)
    assert not [*tmp_path.rglob("*.archived")]


@pytest.mark.parametrize(
    ("checkpoint_folder", "final_hf"),
    [("checkpoint", "out/final_hf"), ("a/checkpoint", "out/a/final_hf")],
)
def test_foreign_final_hf_is_an_error_before_training(tmp_path, checkpoint_folder, final_hf):
    write_files(tmp_path, f"{final_hf}/model.pt")
    options = ["--job.dump_folder", str(tmp_path / "out"), "--checkpoint.last_save_in_hf"]

    with pytest.raises(UserError, match=rf"checkpoint\.last_save_in_hf(?s:.*){final_hf}"):
        load_run([*options, "--checkpoint.folder", checkpoint_folder], 1)

    assert list_names((tmp_path / final_hf).parent) == ["final_hf"]
    assert list_names(tmp_path / final_hf) == ["model.pt"]


@pytest.mark.parametrize("checkpoint_folder", ["final", "a/final_hf"])
def test_checkpoint_folder_that_the_final_output_would_use_is_an_error(tmp_path, checkpoint_folder):
    options = ["--job.dump_folder", str(tmp_path), "--checkpoint.folder", checkpoint_folder]

    with pytest.raises(UserError, match=r"checkpoint\.folder"):
        load_run([*options, "--checkpoint.last_save_in_hf"], 1)


def test_next_start_finishes_an_interrupted_removal(saved_run, tmp_path):
    checkpoints = saved_run.checkpoints(tmp_path, keep_latest_k=1)
    unlink = Path.unlink

    def fail_at_index(path: Path, missing_ok: bool = False) -> None:
        if path.name == ".metadata":
            raise OSError(5, "Input/output error")
        unlink(path, missing_ok)

    with patch.object(Path, "unlink", fail_at_index):
        checkpoints.save(6)
    checkpoints.close()

    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000006"]
    assert list_names(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]

    saved_run.checkpoints(tmp_path)

    assert list_names(tmp_path) == ["step-00000006"]
