"""The doors of the loop: a hook is called on all ranks, asks for things, is saved, and may skip a step."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_runs import SMALL
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.hooks.hook import Hook, Request, StepResult, Training
from titanlite.load_run import load_run
from titanlite.train.loop import Trainer

pytestmark = pytest.mark.slow


class Watcher(Hook):
    """Notes its calls, and has numbers of its own. Rank 1 asks for a save after step 3, a validation after step 4."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def wants(self, step: int) -> Request:
        return Request(save=step == 3 and dist.get_rank() == 1, validate=step == 4 and dist.get_rank() == 1)

    def numbers(self, step: int) -> dict[str, float]:
        return {"skipped_records": 7, "mine": step / 2}

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("wants", "stopping", "calls", "numbers", "state_dict", "tensors") or not callable(value):
            return value

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments[0] if arguments and isinstance(arguments[0], int) else None))
            return value(*arguments)

        return call


class Average(Hook):
    """A running average of the weights, which is sharded as they are, and the number of steps in it."""

    steps = 0

    def built(self, training: Training) -> None:
        self._model = training.model
        self._average = {name: torch.zeros_like(p).detach() for name, p in training.model.named_parameters()}

    @torch.no_grad()
    def after_step(self, step: int, result: StepResult) -> None:
        self.steps += 1
        for name, parameter in self._model.named_parameters():
            self._average[name].lerp_(parameter, 1 / self.steps)

    def tensors(self) -> dict[str, Tensor]:
        return self._average

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Skip(Hook):
    """Makes the gradient of rank 1 infinite in step 2, and lets no rank take that step. The host reads nothing."""

    def built(self, training: Training) -> None:
        self._training = training

    def gradients(self, step: int) -> None:
        if step == 2 and dist.get_rank() == 1:
            gradient = next(self._training.model.parameters()).grad
            assert isinstance(gradient, DTensor)
            gradient.to_local().fill_(math.inf)

    def before_update(self, step: int, grad_norm: Tensor) -> None:
        self._training.optimizer.found_inf = (~grad_norm.isfinite()).float()  # pyright: ignore
        self._training.optimizer.grad_scale = torch.ones(())  # pyright: ignore


def make(folder: str, *words: str, hooks: tuple[Hook, ...]) -> Trainer:
    job = Path(folder, f"{dist.get_rank()}.toml")
    job.write_text(SMALL)
    words = ("--job.config_file", str(job), "--job.dump_folder", f"{folder}/out", *words)
    return Trainer(load_run(words, dist.get_world_size()), torch.device("cpu"), hooks)


def tensors(named: Any) -> list[Tensor]:
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in named]


def follow(folder: str) -> list[tuple[str, object]]:
    watcher = Watcher()
    words = ["--training.steps", "4", "--checkpoint.interval", "2", "--metrics.log_freq", "2", "--validation.freq", "9"]
    words += ["--validation.holdout", "0.1", "--validation.sequences", "2"]
    with make(folder, *words, hooks=(watcher,)) as trainer:
        trainer.train()
    return watcher.calls


def test_a_hook_is_called_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, follow, str(tmp_path))
    assert first == second

    def of(number: int, *after: str) -> list[tuple[str, object]]:
        return [
            (name, number) for name in ("before_step", "gradients", "before_update", "updated", "after_step", *after)
        ]

    assert [(name, None if name == "logged" else at) for name, at in first] == [
        *[("built", None), ("load", None), ("started", 0), ("train_begins", 0), ("validated", 0)],
        *of(1),
        ("logged", None),
        ("act", 1),
        *of(2),
        *[("logged", None), ("saving", 2), ("saved", 2), ("act", 2)],
        *of(3, "saving", "saved", "act"),
        *of(4),
        *[("logged", None), ("saving", 4), ("saved", 4), ("validated", 4), ("act", 4), ("ended", 4)],
    ]
    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoint").glob("step-*"))
    assert saved == ["step-00000002", "step-00000003", "step-00000004"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert [(line["skipped_records"], line["mine"]) for line in lines] == [(7, 0.5), (7, 1.0), (7, 2.0)]


def average(folder: str, *steps: int) -> list[Tensor]:
    hook = Average()
    for until in steps:
        hook = Average()
        with make(folder, "--lr_scheduler.decay_ratio", "0", "--training.steps", str(until), hooks=(hook,)) as trainer:
            trainer.train()
    return [torch.tensor(hook.steps), *tensors(hook.tensors().values())]


def test_what_a_hook_keeps_is_in_the_checkpoint_and_goes_on_bitwise(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    whole, parts = run_ranks(2, average, str(tmp_path), 6)[0], run_ranks(2, average, str(tmp_path / "parts"), 2, 6)[0]
    assert whole[0] == 6
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def skip(folder: str) -> list[list[Tensor]]:
    with make(folder, "--metrics.log_freq", "100", "--checkpoint.no-enable", hooks=(Skip(),)) as trainer:
        states = []
        for _ in range(3):
            trainer.step()
            moments = [state[name] for state in trainer.optimizer.state.values() for name in sorted(state)]
            states.append(tensors([*trainer.model.parameters(), *moments]))
        return states


def test_a_step_can_be_skipped_on_all_ranks_without_reading_its_norm(tmp_path: Path) -> None:
    for before, skipped, after in run_ranks(2, skip, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
        assert all(t.isfinite().all() for t in after)
        assert not torch.equal(before[0], after[0])
