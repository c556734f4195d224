"""Which checkpoints stay, and when the others go."""

import pytest
from tiny_run import TinyRun, names

from titanlite.checkpoint import step_folders

pytestmark = pytest.mark.usefixtures("one_rank")


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
    assert len(step_folders.list_checkpoints(tmp_path)) == 5


def test_some_steps_are_kept_for_good(tmp_path):
    run = TinyRun()
    manager = run.manager(tmp_path, keep_latest_k=1, keep_every_n_steps=3)
    for step in range(1, 8):
        manager.save(step, run.train_state(step))
    manager.close()
    assert names(tmp_path) == ["step-00000003", "step-00000006", "step-00000007"]
