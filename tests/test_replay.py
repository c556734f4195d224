"""`titanlite replay` rejects steps that it cannot reproduce. See test_guards for replayed steps."""

import json
import shutil
from pathlib import Path

import pytest
from ranks import run_ranks, small_trainer, start_small, titanlite
from small_runs import read_jsonl, read_metrics

from titanlite.hooks.hook import Hook

pytestmark = pytest.mark.slow
WORDS = ("--checkpoint.interval", 2, "--lr_scheduler.decay_ratio", 0, "--training.steps")


def replay(out: Path, step: int, *options: object) -> bool:
    """Replay a step, and return whether its values equal the logged ones bitwise."""
    result = json.loads(
        titanlite("replay", out, "--step", step, "--json", *options).splitlines()[-1]
    )
    return (
        result["now"] == result["logged"]
        and result["now"]["loss"] == read_metrics(out)[step]["loss"]
    )


def replay_rejected_step(out: Path, step: int) -> str:
    return titanlite("replay", out, "--step", step, code=2)


def remove_checkpoints(out: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(out / "checkpoint" / f"step-{step:08}")


def test_a_step_after_a_rollback_needs_its_checkpoint(tmp_path):
    out = tmp_path / "out"
    # With these texts, the gradient norm rises in step 4. Those of the standard library depend on
    # the version of Python.
    data = tmp_path / "data.txt"
    texts = ["x " * (i * 7919 % 97) + str(i) for i in range(5000)]
    data.write_text("\n\n".join(texts))
    options = (
        "--guards.on_spike roll_back --guards.spike_history 3 --guards.spike_deviations 1e-6 "
        f"--guards.max_roll_backs 9 --dataset.source text --dataset.path {data}"
    )
    start_small(out, *WORDS, 5, *options.split()).wait_for_exit(0)
    events = read_jsonl(out / "events.jsonl")
    roll_backs = [event["step"] for event in events if event["event"] == "roll back"]

    assert roll_backs[0] == 4
    assert replay(out, 5)

    remove_checkpoints(out, 4)
    assert replay(out, 4)
    assert "rolled back after step 4" in replay_rejected_step(out, 5)


def test_a_run_without_recorded_events_is_replayed(tmp_path):
    out = tmp_path / "out"
    start_small(out, *WORDS, 4).wait_for_exit(0)
    (out / "events.jsonl").unlink()

    assert replay(out, 4)


def test_a_step_of_an_earlier_start_needs_its_options(tmp_path):
    out = tmp_path / "out"
    start_small(out, *WORDS, 4).wait_for_exit(0)
    start_small(out, *WORDS, 7, "--optimizer.lr", 3e-3).wait_for_exit(0)

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


def train(folder: str) -> None:
    for hook in (Observer(), Changer()):
        with small_trainer(
            f"{folder}/{type(hook).__name__}", hook, *map(str, WORDS), "3"
        ) as trainer:
            trainer.train()


def test_a_step_with_a_hook_that_may_change_training_is_rejected(tmp_path):
    run_ranks(1, train, str(tmp_path))
    assert replay(tmp_path / "Observer" / "out", 3)
    assert "Changer" in replay_rejected_step(tmp_path / "Changer" / "out", 3)
