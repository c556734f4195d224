"""`titanlite replay` rejects steps that it cannot reproduce. See test_guards for replayed steps."""

import shutil
from pathlib import Path

import pytest
from ranks import run_ranks, run_small, titanlite, train_small
from small_runs import read_events, read_metrics, read_printed_json

from titanlite.hooks.hook import Hook

pytestmark = pytest.mark.slow
OPTIONS = "--checkpoint.interval 2 --lr_scheduler.decay_ratio 0 --training.steps"


def replay(out: Path, step: int, *options: object) -> bool:
    """Replay a step, and return whether its values equal the logged ones bitwise."""
    output = titanlite("replay", out, "--step", step, "--json", *options)
    result = read_printed_json(output)
    assert result["logged"]["loss"] == read_metrics(out)[step]["loss"]
    return result["now"] == result["logged"]


def replay_rejected_step(out: Path, step: int) -> str:
    return titanlite("replay", out, "--step", step, code=2)


def remove_checkpoints(out: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(out / "checkpoint" / f"step-{step:08}")


def test_a_step_after_a_rollback_needs_its_checkpoint(tmp_path):
    out = tmp_path / "out"
    # With these texts, the gradient norm rises in step 4. The texts of the standard library depend
    # on the version of Python.
    data = tmp_path / "data.txt"
    texts = ["x " * (i * 7919 % 97) + str(i) for i in range(5000)]
    data.write_text("\n\n".join(texts))
    options = (
        "--guards.on_spike roll_back --guards.spike_history 3 --guards.spike_deviations 1e-6 "
        f"--guards.max_roll_backs 9 --dataset.source text --dataset.path {data}"
    )
    run_small(out, OPTIONS, 5, options)

    assert read_events(out, "roll back")[0]["step"] == 4
    assert replay(out, 5)

    remove_checkpoints(out, 4)
    assert replay(out, 4)
    assert "rolled back after step 4" in replay_rejected_step(out, 5)


def test_a_run_without_recorded_events_is_replayed(tmp_path):
    out = tmp_path / "out"
    run_small(out, OPTIONS, 4)
    (out / "events.jsonl").unlink()

    assert replay(out, 4)


def test_a_step_whose_logged_line_is_damaged_is_rejected(tmp_path):
    out = tmp_path / "out"
    run_small(out, OPTIONS, 4)
    metrics = out / "metrics.jsonl"
    *lines, _last_line = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines, "{damaged", ""]))

    assert "metrics.jsonl" in replay_rejected_step(out, 4)


def test_a_step_of_an_earlier_start_needs_its_options(tmp_path):
    out = tmp_path / "out"
    run_small(out, OPTIONS, 4)
    run_small(out, OPTIONS, 7, "--optimizer.lr 3e-3")

    assert replay(out, 7)

    remove_checkpoints(out, 6)
    # Step 7 still needs only the learning rate of the second start.
    assert replay(out, 7)
    assert "optimizer.lr: 0.002 -> 0.003" in replay_rejected_step(out, 4)
    assert replay(out, 4, "--optimizer.lr", 2e-3)
    # The learning rate of a step does not change its loss.
    assert replay(out, 3)

    remove_checkpoints(out, 4)
    assert "steps 3 to 4 were trained with other options" in replay_rejected_step(out, 7)


class Observer(Hook):
    observes_only = True


class Changer(Hook):
    pass


def train(folder: Path) -> None:
    train_small(folder / "observed", Observer(), OPTIONS, 3)
    train_small(folder / "changed", Changer(), OPTIONS, 3)


def test_a_step_with_a_hook_that_may_change_training_is_rejected(tmp_path):
    run_ranks(1, train, tmp_path)
    assert replay(tmp_path / "observed" / "out", 3)
    assert "Changer" in replay_rejected_step(tmp_path / "changed" / "out", 3)
