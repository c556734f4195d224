"""The doors of the loop: a hook is called on all ranks, and asks for things.

(What it keeps: test_ema, test_guards.)
"""

import json
import os
import re
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, small_trainer, start_small
from small_runs import logged

from titanlite.config.errors import StoppedBySignal, UserError
from titanlite.hooks.hook import Hook, Request
from titanlite.train.request_exchange import REQUEST_DELAY

pytestmark = pytest.mark.slow


class Asking(Hook):
    """Has numbers of its own.

    Rank 1 asks for a save after step 3, and for a validation after step 4.
    """

    def wants(self, step: int) -> Request:
        return Request(
            save=step == 3 and dist.get_rank() == 1, validate=step == 4 and dist.get_rank() == 1
        )

    def numbers(self, step: int) -> dict[str, float]:
        return {"skipped_records": 7, "mine": step / 2}


def follow(folder: str, delay: int) -> list[tuple[str, int | None]]:
    """The calls of a hook, each with its step."""
    REQUEST_DELAY["cpu"] = delay
    hook = Mock(spec=Hook, wraps=Asking())
    words = [
        "--training.steps",
        "4",
        "--checkpoint.interval",
        "2",
        "--metrics.log_freq",
        "2",
        "--validation.freq",
        "9",
    ]
    words += ["--validation.holdout", "0.1", "--validation.sequences", "2"]
    with small_trainer(folder, hook, *words) as trainer:
        trainer.train()
    calls = [
        (name, args[0] if args and isinstance(args[0], int) else None)
        for name, args, _ in hook.mock_calls
    ]
    return [call for call in calls if call[0] not in ("wants", "numbers", "state_dict", "tensors")]


@pytest.mark.parametrize("delay", [0, 1], ids=["CPU", "GPU"])
def test_a_hook_is_called_in_one_order_on_all_ranks(tmp_path, delay: int):
    """On a GPU requests are sent a step earlier, and take effect after the same step."""
    first, second = run_ranks(2, follow, str(tmp_path), delay)
    assert first == second

    step = ("before_step", "gradients", "before_update", "updated", "after_step")
    assert first == [
        *[("built", None), ("started", 0), ("train_begins", 0), ("validated", 0)],
        *[(name, 1) for name in step],
        *[("logged", None), ("check", 1), ("act", 1)],
        *[(name, 2) for name in step],
        *[("logged", None), ("check", 2), ("saving", 2), ("saved", 2), ("act", 2)],
        *[(name, 3) for name in (*step, "check", "saving", "saved", "act")],
        *[(name, 4) for name in step],
        *[
            ("logged", None),
            ("check", 4),
            ("saving", 4),
            ("saved", 4),
            ("validated", 4),
            ("act", 4),
            ("ended", 4),
            ("close", None),
        ],
    ]

    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoint").glob("step-*"))
    assert saved == ["step-00000002", "step-00000003", "step-00000004"]

    lines = logged(tmp_path / "out").values()
    assert [(line["skipped_records"], line["mine"]) for line in lines] == [
        (7, 0.5),
        (7, 1.0),
        (7, 2.0),
    ]


class Finishing(Hook):
    """Rank 1 requests the end of the run after step 3."""

    def wants(self, step: int) -> Request:
        return Request(finish="Good enough." if step == 3 and dist.get_rank() == 1 else "")


def train_until_finished(folder: str) -> int:
    with small_trainer(folder, Finishing()) as trainer:
        trainer.train()
    return trainer.steps_done


def finish_event(folder: Path) -> tuple[int, str]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
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

    assert calls == [(name, step) for step in (1, 2, 3) for name in ("check", "act")]
    assert [path.name for path in (tmp_path / "out" / "checkpoint").iterdir()] == ["step-00000003"]


def test_the_early_stopping_hook_of_the_docs_ends_a_run_with_exit_code_0(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "plugin_hooks.md").read_text()
    block = re.search(r'```python title="my_early_stopping.py"\n(.*?)```', page, flags=re.DOTALL)

    assert block is not None

    (tmp_path / "my_early_stopping.py").write_text(block[1])
    monkeypatch.syspath_prepend(str(tmp_path))

    options = [
        "--job.plugins",
        "my_early_stopping",
        "--job.hooks",
        "early_stopping",
        "--optimizer.lr",
        "1e-30",
    ]
    options += [
        "--validation.freq",
        "1",
        "--validation.holdout",
        "0.1",
        "--validation.sequences",
        "2",
    ]
    start_small(tmp_path / "out", *options).ends_with(0)

    # Step 0 has the best loss. The validations of steps 1 to 3 do not lower it, which ends step 4.
    step, text = finish_event(tmp_path / "out")

    assert step == 4
    assert "stopped improving" in text


class Tally(Hook):
    """Adds a number in each step, to a JSON value and to a tensor."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self._number = name, number
        self._count, self._total = 0, torch.zeros(1)

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


def tally(folder: str) -> list[list[int]]:
    """The sums of two hooks after two starts of two steps each, and those of a hook that is renamed at a third."""
    words = ["--checkpoint.interval", "1", "--lr_scheduler.decay_ratio", "0", "--training.steps"]
    for steps in ("2", "4"):
        hooks: list[Hook] = [one := Tally("one", 1), ten := Tally("ten", 10)]
        with small_trainer(folder, hooks, *words, steps) as trainer:
            trainer.train()
    with small_trainer(
        folder, [renamed := Tally("uno", 1), Tally("ten", 10)], *words, "5"
    ) as trainer:
        trainer.train()
    return [one.sums, ten.sums, renamed.sums]


def test_two_hooks_of_a_class_keep_their_state_and_a_renamed_one_is_reported(
    tmp_path,
):
    assert run_ranks(1, tally, str(tmp_path)) == [[[4, 4], [40, 40], [1, 1]]]

    log = (tmp_path / "out" / "train.log").read_text()
    assert re.findall(r" hooks .*: (\w+)$| hooks, .*: (\w+)$", log, flags=re.M) == [
        ("one", ""),
        ("", "uno"),
    ]


def refusal(folder: str, *names: str) -> str:
    with pytest.raises(UserError) as caught:
        small_trainer(folder, [Tally(name, 1) for name in names])
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("names", [("one", "one"), ("ema.x",), ("",), ("spike_guard",)])
def test_a_hook_with_state_needs_a_name_of_its_own(names: tuple[str, ...], tmp_path):
    (message,) = run_ranks(1, refusal, str(tmp_path), *names)
    assert "Tally" in message
