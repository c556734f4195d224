"""Hooks are called in the same order on all ranks, and their requests take effect on all ranks.

test_ema.py and test_guards.py test the state that hooks keep.
"""

import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_small, small_trainer, train_small
from small_runs import (
    list_saved_steps,
    read_documented_program,
    read_events,
    read_jsonl,
    read_log,
    read_metrics,
)

from titanlite.config.errors import StoppedBySignal, UserError
from titanlite.hooks.hook import Hook, Request
from titanlite.train.request_exchange import REQUEST_DELAY

pytestmark = pytest.mark.slow


class RequestingHook(Hook):
    """Logs numbers. Rank 1 requests a save, a validation and the end after steps 3, 4 and 5."""

    def wants(self, step: int) -> Request:
        is_rank_1 = dist.get_rank() == 1
        reason = "Good enough." if is_rank_1 and step == 5 else ""
        return Request(
            save=is_rank_1 and step == 3, validate=is_rank_1 and step == 4, finish=reason
        )

    def numbers(self, step: int) -> dict[str, float]:
        return {"skipped_records": 7, "mine": step / 2, "losses": 3}


def record_calls(folder: Path, delay: int) -> list[tuple[str, int]]:
    """Train with a hook, and return its calls with their steps.

    A call without a step gets the step of the call before it.
    """
    REQUEST_DELAY["cpu"] = delay
    hook = Mock(spec=Hook, wraps=RequestingHook())
    options = "--checkpoint.interval 2 --metrics.log_freq 2"
    options += " --validation.freq 9 --validation.holdout 0.1 --validation.sequences 2"

    train_small(folder, hook, options)

    calls = []
    step = 0
    for name, args, _ in hook.mock_calls:
        if name not in ("wants", "numbers", "state_dict", "tensors"):
            if args and isinstance(args[0], int):
                step = args[0]
            calls.append((name, step))
    return calls


STEP = "before_step gradients before_update updated after_step"
CALLS = {
    0: "built started train_begins validated",
    1: f"{STEP} logged check act",
    2: f"{STEP} logged check saving saved act",
    3: f"{STEP} check saving saved act",
    4: f"{STEP} logged check saving saved validated act",
    5: f"{STEP} check saving saved validated act ended close",
}
"""Expected calls of a hook in each step, in order."""


@pytest.mark.parametrize("delay", [0, 1], ids=["CPU", "GPU"])
def test_a_hook_is_called_and_its_requests_take_effect_in_the_same_order_on_all_ranks(
    tmp_path, delay
):
    """On a GPU, requests are collected one step earlier, and take effect after the same step."""
    first, second = run_ranks(2, record_calls, tmp_path, delay)

    expected = []
    for step, names in CALLS.items():
        expected += [(name, step) for name in names.split()]
    assert first == second == expected

    assert list_saved_steps(tmp_path / "out") == [2, 3, 4, 5]
    (finish,) = read_events(tmp_path / "out", "finish")
    assert finish["step"] == 5
    assert "Good enough." in finish["text"]
    lines = read_metrics(tmp_path / "out").values()
    numbers = [(line["skipped_records"], line["mine"], line["losses"]) for line in lines]
    assert numbers == [(7, 0.5, 3), (7, 1.0, 3), (7, 2.0, 3)]


class MeasuredMetric(Hook):
    """Returns a metric that titanlite measures itself."""

    def __init__(self, metric: str) -> None:
        self._metric = metric

    def numbers(self, step: int) -> dict[str, float]:
        return {self._metric: 1.0}


def train_with_measured_metric(folder: Path, metric: str) -> None:
    trainer = small_trainer(folder, MeasuredMetric(metric))
    with pytest.raises(UserError, match=f"MeasuredMetric.*{metric!r}"):
        trainer.train()
    assert trainer.steps_done == 1


@pytest.mark.parametrize("metric", ["step", "lr", "loss", "memory_active"])
def test_a_metric_that_titanlite_measures_is_rejected_at_the_first_step(tmp_path, metric):
    run_ranks(2, train_with_measured_metric, tmp_path, metric)


class TensorHook(Hook):
    """Returns a tensor where JSON is required."""

    name = "tensor_hook"

    def __init__(self, method: str) -> None:
        setattr(self, method, lambda *_: {"best": torch.tensor(1.0)})

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("method", ["numbers", "state_dict"])
def test_a_hook_that_returns_a_tensor_instead_of_json_is_named(tmp_path, method, single_rank):
    with pytest.raises(UserError, match="tensor_hook"):
        train_small(tmp_path, TensorHook(method), "--checkpoint.interval 2")


class Interrupting(Hook):
    """Sends a stop signal during step 2, and records the calls after each step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def after_step(self, step: int, result: object) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    def check(self, step: int, request: Request) -> None:
        self.calls.append(("check", step))

    def act(self, step: int, request: Request) -> None:
        self.calls.append(("act", step))


def test_a_hook_class_instead_of_an_object_is_rejected(tmp_path, single_rank):
    with pytest.raises(UserError, match="Interrupting"):
        train_small(tmp_path, Interrupting)  # type: ignore[arg-type]


def calls_until_stopped(folder: Path) -> list[tuple[str, int]]:
    hook = Interrupting()
    with pytest.raises(StoppedBySignal):
        train_small(folder, hook)
    return hook.calls


def test_a_stopped_run_calls_check_and_act_once_after_its_last_step(tmp_path):
    (calls,) = run_ranks(1, calls_until_stopped, tmp_path)

    expected = []
    for step in (1, 2, 3):
        expected += [("check", step), ("act", step)]
    assert calls == expected
    assert list_saved_steps(tmp_path / "out") == [3]


def train_until_stopped_in_the_last_step(folder: Path) -> None:
    options = "--validation.freq 2 --validation.holdout 0.1 --validation.sequences 2"
    train_small(folder, Interrupting(), "--training.steps 3", options)


def test_a_run_that_is_stopped_in_its_last_step_validates_this_step(tmp_path):
    run_ranks(1, train_until_stopped_in_the_last_step, tmp_path)

    validations = read_jsonl(tmp_path / "out" / "validation.jsonl")
    assert [entry["step"] for entry in validations] == [0, 2, 3]


def test_the_early_stopping_hook_of_the_docs_ends_a_run_with_exit_code_0(tmp_path, write_plugin):
    source = read_documented_program("plugin_hooks", "my_early_stopping.py")
    write_plugin("my_early_stopping", source)
    plugin = "--job.plugins my_early_stopping --job.hooks early_stopping --optimizer.lr 1e-30"
    validation = "--validation.freq 1 --validation.holdout 0.1 --validation.sequences 2"

    run_small(tmp_path / "out", plugin, validation)

    # Step 0 has the best loss. The validations of steps 1 to 3 do not lower it, which ends step 4.
    (finish,) = read_events(tmp_path / "out", "finish")
    assert finish["step"] == 4
    assert "stopped improving" in finish["text"]


class Tally(Hook):
    """Adds a number in each step, to a JSON value and to a tensor."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self._number = number
        self._count = 0
        self._total = torch.zeros(1)

    def updated(self, step: int) -> None:
        self._count += self._number
        self._total += self._number

    def state_dict(self) -> dict[str, int]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._count = state["count"]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"total": self._total}

    @property
    def sums(self) -> list[int]:
        return [self._count, int(self._total)]


def test_two_hooks_of_one_class_keep_their_states_and_a_renamed_hook_is_reported(
    tmp_path, single_rank
):
    """Train, resume twice, and rename a hook at the second resume."""
    options = "--checkpoint.interval 1 --lr_scheduler.decay_ratio 0 --training.steps"
    train_small(tmp_path, [Tally("one", 1), Tally("ten", 10)], options, 2)

    one = Tally("one", 1)
    ten = Tally("ten", 10)
    train_small(tmp_path, [one, ten], options, 4)
    assert (one.sums, ten.sums) == ([4, 4], [40, 40])

    renamed = Tally("uno", 1)
    train_small(tmp_path, [renamed, ten], options, 5)
    assert renamed.sums == [1, 1]

    log = read_log(tmp_path / "out")
    assert re.findall(r" hooks .*: (\w+)$| hooks, .*: (\w+)$", log, flags=re.M) == [
        ("one", ""),
        ("", "uno"),
    ]


@pytest.mark.parametrize(
    "names",
    [("one", "one"), ("ema.x",), ("",), ("spike_guard",)],
)
def test_hooks_with_state_need_unique_valid_names(names, tmp_path, single_rank):
    with pytest.raises(UserError, match="Tally") as caught:
        small_trainer(tmp_path, [Tally(name, 1) for name in names])
    assert caught.value.exit_code == 2
