"""Hooks are called in the same order on all ranks, and their requests take effect on all ranks.

test_ema.py and test_guards.py test the state that hooks keep.
"""

import os
import re
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, small_trainer, start_small
from small_runs import read_jsonl, read_metrics

from titanlite.config.errors import StoppedBySignal, UserError
from titanlite.hooks.hook import Hook, Request
from titanlite.train.request_exchange import REQUEST_DELAY

pytestmark = pytest.mark.slow


class RequestingHook(Hook):
    """Logs numbers. Rank 1 requests a save after step 3 and a validation after step 4."""

    def wants(self, step: int) -> Request:
        is_rank_1 = dist.get_rank() == 1
        return Request(save=is_rank_1 and step == 3, validate=is_rank_1 and step == 4)

    def numbers(self, step: int) -> dict[str, float]:
        return {"skipped_records": 7, "mine": step / 2, "losses": 3}


def record_calls(folder: str, delay: int) -> list[tuple[str, int | None]]:
    """Train with a hook, and return its calls with their steps."""
    REQUEST_DELAY["cpu"] = delay
    hook = Mock(spec=Hook, wraps=RequestingHook())
    options = "--training.steps 4 --checkpoint.interval 2 --metrics.log_freq 2 --validation.freq 9"
    options += " --validation.holdout 0.1 --validation.sequences 2"

    with small_trainer(folder, hook, options) as trainer:
        trainer.train()

    calls = []
    for name, args, _ in hook.mock_calls:
        if name not in ("wants", "numbers", "state_dict", "tensors"):
            has_step = args and isinstance(args[0], int)
            calls.append((name, args[0] if has_step else None))
    return calls


@pytest.mark.parametrize("delay", [0, 1], ids=["CPU", "GPU"])
def test_a_hook_is_called_in_the_same_order_on_all_ranks(tmp_path, delay: int):
    """On a GPU, requests are submitted one step earlier, and take effect after the same step."""
    first, second = run_ranks(2, record_calls, str(tmp_path), delay)

    step = ("before_step", "gradients", "before_update", "updated", "after_step")
    save = ("saving", "saved")
    expected = [("built", None), ("started", 0), ("train_begins", 0), ("validated", 0)]
    expected += [(name, 1) for name in step]
    expected += [("logged", None), ("check", 1), ("act", 1)]
    expected += [(name, 2) for name in step] + [("logged", None)]
    expected += [(name, 2) for name in ("check", *save, "act")]
    expected += [(name, 3) for name in (*step, "check", *save, "act")]
    expected += [(name, 4) for name in step] + [("logged", None)]
    expected += [(name, 4) for name in ("check", *save, "validated", "act", "ended")]
    expected += [("close", None)]
    assert first == second == expected

    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoint").glob("step-*"))
    assert saved == ["step-00000002", "step-00000003", "step-00000004"]

    lines = read_metrics(tmp_path / "out").values()
    numbers = [(line["skipped_records"], line["mine"], line["losses"]) for line in lines]
    assert numbers == [(7, 0.5, 3), (7, 1.0, 3), (7, 2.0, 3)]


class MeasuredMetric(Hook):
    """Returns a metric that titanlite measures itself."""

    def __init__(self, metric: str) -> None:
        self._metric = metric

    def numbers(self, step: int) -> dict[str, float]:
        return {self._metric: 1.0}


def train_with_measured_metric(folder: str, metric: str) -> tuple[int, str]:
    """Return the step at which the run ends with an error, and the error."""
    with (
        small_trainer(folder, MeasuredMetric(metric)) as trainer,
        pytest.raises(UserError) as caught,
    ):
        trainer.train()
    return trainer.steps_done, str(caught.value)


@pytest.mark.parametrize("metric", ["step", "lr", "loss", "memory_active"])
def test_a_metric_that_titanlite_measures_is_rejected_at_the_first_step(tmp_path, metric: str):
    ranks = run_ranks(2, train_with_measured_metric, str(tmp_path), metric)

    for step, error in ranks:
        assert step == 1
        assert "MeasuredMetric" in error
        assert repr(metric) in error


class Finishing(Hook):
    """Rank 1 requests the end of the run after step 3."""

    def wants(self, step: int) -> Request:
        return Request(finish="Good enough." if step == 3 and dist.get_rank() == 1 else "")


def train_until_finished(folder: str) -> int:
    with small_trainer(folder, Finishing()) as trainer:
        trainer.train()
    return trainer.steps_done


def finish_event(folder: Path) -> tuple[int, str]:
    events = read_jsonl(folder / "events.jsonl")
    (finish,) = [event for event in events if event["event"] == "finish"]
    return finish["step"], finish["text"]


def test_a_hook_on_one_rank_finishes_the_run_on_all_ranks(tmp_path):
    assert run_ranks(2, train_until_finished, str(tmp_path)) == [3, 3]

    step, text = finish_event(tmp_path / "out")
    assert step == 3
    assert "Good enough." in text
    assert [path.name for path in (tmp_path / "out" / "checkpoint").iterdir()] == ["step-00000003"]


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


def calls_until_stopped(folder: str) -> list[tuple[str, int]]:
    hook = Interrupting()
    with small_trainer(folder, hook) as trainer, pytest.raises(StoppedBySignal):
        trainer.train()
    return hook.calls


def test_a_stopped_run_calls_check_and_act_once_after_its_last_step(tmp_path):
    (calls,) = run_ranks(1, calls_until_stopped, str(tmp_path))

    expected = []
    for step in (1, 2, 3):
        expected += [("check", step), ("act", step)]
    assert calls == expected
    assert [path.name for path in (tmp_path / "out" / "checkpoint").iterdir()] == ["step-00000003"]


def test_the_early_stopping_hook_of_the_docs_ends_a_run_with_exit_code_0(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "plugin_hooks.md").read_text()
    block = re.search(r'```python title="my_early_stopping.py"\n(.*?)```', page, flags=re.DOTALL)

    assert block is not None
    (tmp_path / "my_early_stopping.py").write_text(block[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = "--job.plugins my_early_stopping --job.hooks early_stopping --optimizer.lr 1e-30"
    validation = "--validation.freq 1 --validation.holdout 0.1 --validation.sequences 2"

    start_small(tmp_path / "out", plugin, validation).wait_for_exit(0)

    # Step 0 has the best loss. The validations of steps 1 to 3 do not lower it, which ends step 4.
    step, text = finish_event(tmp_path / "out")

    assert step == 4
    assert "stopped improving" in text


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


def train_with_tallies(folder: str) -> list[list[int]]:
    """Train with two hooks of one class, resume twice, and rename a hook at the second resume.

    Returns:
        The sums of both hooks after the first resume, and of the renamed hook.
    """
    options = ["--checkpoint.interval", "1", "--lr_scheduler.decay_ratio", "0", "--training.steps"]
    first_hooks: list[Hook] = [Tally("one", 1), Tally("ten", 10)]
    with small_trainer(folder, first_hooks, *options, "2") as trainer:
        trainer.train()

    one = Tally("one", 1)
    ten = Tally("ten", 10)
    with small_trainer(folder, [one, ten], *options, "4") as trainer:
        trainer.train()

    renamed = Tally("uno", 1)
    with small_trainer(folder, [renamed, Tally("ten", 10)], *options, "5") as trainer:
        trainer.train()
    return [one.sums, ten.sums, renamed.sums]


def test_two_hooks_of_one_class_keep_their_states_and_a_renamed_hook_is_reported(
    tmp_path,
):
    (tallies,) = run_ranks(1, train_with_tallies, str(tmp_path))

    assert tallies == [[4, 4], [40, 40], [1, 1]]

    log = (tmp_path / "out" / "train.log").read_text()
    assert re.findall(r" hooks .*: (\w+)$| hooks, .*: (\w+)$", log, flags=re.M) == [
        ("one", ""),
        ("", "uno"),
    ]


def build_with_hooks(folder: str, *names: str) -> str:
    """Build a trainer with hooks of the given names, and return the error."""
    with pytest.raises(UserError) as caught:
        small_trainer(folder, [Tally(name, 1) for name in names])
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    "names",
    [("one", "one"), ("ema.x",), ("",), ("spike_guard",)],
)
def test_hooks_with_state_need_unique_valid_names(names: tuple[str, ...], tmp_path):
    (message,) = run_ranks(1, build_with_hooks, str(tmp_path), *names)
    assert "Tally" in message
