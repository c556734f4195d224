"""Validation, saves and resumes use the evaluation weights of a schedule-free optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks, train_small
from small_runs import read_losses
from torch import Tensor

from titanlite import Trainer, load_checkpoint
from titanlite.checkpoint.live_state import to_local
from titanlite.hooks.hook import Hook

pytestmark = pytest.mark.slow
OPTIONS = (
    "--job.plugins averaging_sgd --optimizer.name averaging_sgd --optimizer.lr 0.1 "
    "--lr_scheduler.decay_ratio 0 --checkpoint.interval 2 --validation.freq 1 "
    "--validation.holdout 0.1 --validation.sequences 2 --samples.freq 2 --samples.prompts def "
    "--training.steps"
)


class CheckMean(Hook):
    """Compares the mean of the weights so far with the weights in saves and validations."""

    def built(self, trainer: Trainer) -> None:
        self._weight = trainer.model.get_parameter("output.weight")
        self._mean: Tensor | None = None
        self._count = 0
        self.evaluated_mean: list[bool] = []

    def updated(self, step: int) -> None:
        weight = to_local(self._weight.detach())
        self._count += 1
        if self._mean is None:
            self._mean = weight.clone()
        else:
            self._mean = self._mean.lerp(weight, 1 / self._count)

    def _compare(self) -> None:
        if self._mean is not None:
            weight = to_local(self._weight.detach())
            self.evaluated_mean.append(torch.equal(weight, self._mean))

    def saving(self, step: int) -> None:
        self._compare()

    def validated(self, step: int, score: Any) -> None:
        if step:
            self._compare()


def train(folder: Path) -> None:
    """Train six steps at once and in two starts, and compare their weights."""
    mean = CheckMean()
    train_small(folder / "whole", mean, OPTIONS, 6)
    for steps in (4, 6):
        train_small(folder / "parts", Hook(), OPTIONS, steps)

    num_saves = 3
    num_validations = 6
    assert mean.evaluated_mean == [True] * (num_saves + num_validations)
    whole = load_checkpoint(folder / "whole/out").model.state_dict()
    parts = load_checkpoint(folder / "parts/out").model.state_dict()
    torch.testing.assert_close(whole, parts, rtol=0, atol=0)


def test_evaluation_weights_are_validated_and_saved_and_a_run_resumes_from_them(tmp_path):
    run_ranks(2, train, tmp_path)

    assert read_losses(tmp_path / "whole/out") == read_losses(tmp_path / "parts/out")
