"""checkpoint.keep_best: the checkpoint with the lowest validation loss stays, and `best` leads to it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ranks import titanlite
from small_runs import SMALL
from tiny_run import Checkpoints, TinyRun, names

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.best import BestCheckpoint
from titanlite.checkpoint.find import checkpoints_at
from titanlite.config.schema import JobConfig

JOB = JobConfig().model_dump(mode="json")


def started(run: TinyRun, folder: Path, *, job: dict = JOB, identity: str = "ours", **keys: object) -> Checkpoints:
    manager = run.manager(folder / "checkpoint", job=job, **{"keep_best": True, "keep_latest_k": 1, **keys})
    manager.saver.run = identity
    return manager


def save(manager: Checkpoints, losses: dict[int, float | None], identity: str = "ours", last: int = -1) -> list[bool]:
    """Save one step after the other. Returns whether each was the best one when it was saved."""
    better = []
    for step, loss in losses.items():
        better.append(loss is not None and manager.saver.improves(loss))
        state = {"step": step, "tokens": 0, "run": identity}
        known = {} if loss is None else {"validation_loss": loss}
        manager.save(step, state | known, last=step == last)
    manager.close()
    return better


def kept(folder: Path) -> list[str]:
    return [name for name in names(folder / "checkpoint") if not name.startswith(".")]


@pytest.mark.usefixtures("one_rank")
class TestTheFolder:
    def test_the_best_one_stays_until_a_better_one_is_saved(self, tmp_path: Path) -> None:
        run = TinyRun()
        assert save(started(run, tmp_path), {1: 3.0, 2: 2.0, 3: 2.5, 4: None, 5: 2.0}) == [
            True,
            True,
            False,
            False,
            False,
        ]
        assert kept(tmp_path) == ["best", "step-00000002", "step-00000005"]
        assert checkpoints_at(tmp_path / "checkpoint" / "best") == [tmp_path / "checkpoint" / "step-00000002"]
        assert save(started(run, tmp_path), {6: 1.5}) == [True]  # a later start knows the losses from the disk
        assert kept(tmp_path) == ["best", "step-00000006"]
        assert checkpoints_at(tmp_path / "checkpoint" / "best") == [tmp_path / "checkpoint" / "step-00000006"]

    def test_no_number_is_never_the_best(self, tmp_path: Path) -> None:
        manager = started(TinyRun(), tmp_path)
        assert not manager.saver.improves(float("nan"))
        assert not manager.saver.improves(float("inf"))
        manager.close()

    def test_without_the_key_nothing_is_linked_or_kept(self, tmp_path: Path) -> None:
        assert save(started(TinyRun(), tmp_path, keep_best=False), {1: 1.0, 2: 2.0}) == [False, False]
        assert kept(tmp_path) == ["step-00000002"]

    def test_a_link_that_a_kill_has_left_behind_is_made_good(self, tmp_path: Path) -> None:
        run = TinyRun()
        save(started(run, tmp_path, keep_latest_k=0), {1: 2.0, 2: 1.0})
        link = tmp_path / "checkpoint" / "best"
        link.unlink()
        link.symlink_to("step-00000001")  # killed after the save of step 2
        manager = started(run, tmp_path)
        manager.saver.purge()
        manager.close()
        assert link.resolve().name == "step-00000002"

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("call", ["unlink", "symlink_to", "replace"])
    def test_a_kill_while_the_link_is_moved_leaves_it_at_a_checkpoint(
        self, tmp_path: Path, call: str, after: bool
    ) -> None:
        run, folder = TinyRun(), tmp_path / "checkpoint"
        save(started(run, tmp_path, keep_latest_k=0), {1: 2.0, 2: 1.0})
        link = folder / "best"
        link.unlink()
        link.symlink_to("step-00000001")  # as before step 2 was saved
        child = os.fork()
        if child == 0:
            original = getattr(Path, call)

            def killed(*arguments: Any, **keys: Any) -> None:
                if after:
                    original(*arguments, **keys)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(Path, call, killed)
            BestCheckpoint(folder, tmp_path / "final", JOB, lambda line: None).keep("ours")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        moved = call == "replace" and after
        assert checkpoints_at(link) == [folder / f"step-0000000{2 if moved else 1}"]
        manager = started(run, tmp_path, keep_latest_k=0)
        manager.saver.purge()
        manager.close()
        assert names(folder) == ["best", "step-00000001", "step-00000002"]
        assert link.resolve().name == "step-00000002"

    def test_losses_of_another_run_or_on_other_rows_do_not_count(self, tmp_path: Path) -> None:
        run = TinyRun()
        save(started(run, tmp_path, identity="theirs"), {1: 1.0}, identity="theirs")
        assert save(started(run, tmp_path), {2: 2.0}) == [True]
        other = {**JOB, "validation": {**JOB["validation"], "sequences": 7}}
        assert save(started(run, tmp_path, job=other), {3: 3.0}) == [True]
        more_often = {**other, "validation": {**other["validation"], "freq": 7}}
        assert save(started(run, tmp_path, job=more_often), {4: 4.0}) == [False]

    def test_a_best_one_that_is_gone_or_damaged_is_followed_by_the_next(self, tmp_path: Path) -> None:
        run = TinyRun()
        save(started(run, tmp_path, keep_latest_k=0), {1: 1.0, 2: 2.0, 3: 3.0})
        (tmp_path / "checkpoint" / "step-00000001" / "manifest.json").write_text("{}")
        step_folders.set_aside(tmp_path / "checkpoint" / "step-00000002")
        manager = started(run, tmp_path, keep_latest_k=0)
        assert manager.saver.improves(2.5)
        manager.saver.purge()
        manager.close()
        assert checkpoints_at(tmp_path / "checkpoint" / "best")[0].name == "step-00000003"

    def test_the_last_weights_alone_can_be_the_best(self, tmp_path: Path) -> None:
        manager = started(TinyRun(), tmp_path, last_save_model_only=True)
        save(manager, {1: 2.0, 2: 1.0}, last=2)
        assert (tmp_path / "checkpoint" / "best").resolve() == tmp_path / "final" / "step-00000002"


VALIDATED = """
[validation]
freq = 2
holdout = 0.05
sequences = 4
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_gets_worse_keeps_its_best_step_over_a_restart(tmp_path: Path, ranks: int) -> None:
    keys = "interval = 5\nkeep_best = true\nkeep_latest_k = 1"
    (tmp_path / "job.toml").write_text(SMALL.replace("interval = 5", keys) + VALIDATED)
    words = ["train", "--job.config_file", tmp_path / "job.toml", "--job.dump_folder", tmp_path / "out"]
    batch = ["--training.local_batch_size", 2 if ranks == 1 else 1, "--training.global_batch_size", 2]
    said = ""
    for steps, rate in ((7, 0.01), (12, 1.0)):
        said += titanlite(*words, *batch, "--training.steps", steps, "--optimizer.lr", rate, ranks=ranks)
    lines = (tmp_path / "out" / "validation.jsonl").read_text().splitlines()
    losses = {entry["step"]: entry["loss"] for entry in map(json.loads, lines) if entry["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert 0 < best < 12, losses
    link = tmp_path / "out" / "checkpoint" / "best"
    assert link.resolve().name == step_folders.step_name(best)
    assert f"step-{best:08d} has the lowest validation loss so far, {losses[best]:.4f}" in said
    assert {path.name for path in step_folders.list_checkpoints(link.parent)} == {f"step-{best:08d}", "step-00000012"}
    assert "def" in titanlite("generate", "--checkpoint", link, "--prompt", "def", "--max-new-tokens", 2)
