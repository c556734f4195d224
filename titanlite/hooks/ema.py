"""Maintain an exponential moving average (EMA) of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titanlite.checkpoint.dcp import plain
from titanlite.checkpoint.manifest import EMA
from titanlite.hooks.hook import Hook
from titanlite.model.llama import Llama
from titanlite.optim.adamw import local_shard
from titanlite.optim.clip import StepSums

if TYPE_CHECKING:
    from titanlite.train.trainer import Trainer


class Ema(Hook):
    """Maintains an exponential moving average of the weights.

    Each step updates average += (1 - decay) * (weight - average).

    The average is in fp32, is sharded like the weights, and is part of each checkpoint. It starts
    with the weights of the first start that enables the hook. Skipped steps do not change it. The
    update causes no host sync.
    """

    name = EMA

    def __init__(self, decay: float) -> None:
        self._decay = decay

    def built(self, trainer: Trainer) -> None:
        """Allocate the averages of the trainer's model."""
        self.follow(trainer.model)

    def follow(self, model: Llama) -> None:
        """Allocate an average for each parameter of `model`.

        From now on, `updated` averages this model.
        """
        self._weights = dict(model.named_parameters())
        # NaN marks averages that neither a checkpoint nor `saving` has set.
        self._averages = {}
        for name, weight in self._weights.items():
            average = plain(weight).to(torch.float32, copy=True)
            self._averages[name] = average.fill_(torch.nan)

    def started(self, step: int) -> None:
        """Set the averages that were not loaded from a checkpoint to the current weights."""
        self.saving(step)

    @torch.no_grad()
    def saving(self, step: int) -> None:
        """Set each average that contains NaN to the current weights.

        An average is NaN if no checkpoint contains it, at the start or after a rollback.
        """
        for average, weight in self._shards():
            if average.isnan().any():
                average.copy_(weight)

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Keep the step's skip flag for `updated`.

        Guards may still set the flag after this call.
        """
        self._skip = skip

    @torch.no_grad()
    def updated(self, step: int) -> None:
        """Update the averages with the new weights, unless the step was skipped."""
        weight_of_step = (1 - self._decay) * (1 - self._skip)
        for average, weight in self._shards():
            average.lerp_(weight.float(), weight_of_step)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, for example "layers.3.attention.wq.weight"."""
        return dict(self._averages)

    def _shards(self) -> list[tuple[Tensor, Tensor]]:
        """Return a pair for each parameter: this rank's shard of the average, and of the weight."""
        return [
            (local_shard(self._averages[name]), local_shard(weight))
            for name, weight in self._weights.items()
        ]
