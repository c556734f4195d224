"""Maintain an exponential moving average (EMA) of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titanlite.checkpoint.live_state import to_plain
from titanlite.checkpoint.manifest import EMA
from titanlite.hooks.hook import Hook
from titanlite.model.llama import Llama
from titanlite.optim.clip import StepSums, local_shard

if TYPE_CHECKING:
    from titanlite.train.trainer import Trainer


class Ema(Hook):
    """Maintains an exponential moving average of the weights.

    After each step that is not skipped, average += (1 - decay) * (weight - average). The average is
    stored in fp32, sharded like the weights, and saved in each checkpoint. It is initialized with
    the weights at the start of training or when a resumed run enables EMA.

    Args:
        decay: Decay per step, such as 0.999.
    """

    name = EMA

    def __init__(self, decay: float) -> None:
        self._decay = decay

    def built(self, trainer: Trainer) -> None:
        """Allocate the averages for the model of the trainer."""
        self.follow(trainer.model)

    def follow(self, model: Llama) -> None:
        """Allocate an average for each parameter of `model`.

        The averages are NaN until they are loaded from a checkpoint, or until `started` or `saving`
        initializes them with the weights.
        """
        self._weights = dict(model.named_parameters())
        # NaN marks averages that are not initialized yet.
        self._averages = {}
        for name, weight in self._weights.items():
            average = to_plain(weight).to(torch.float32, copy=True)
            self._averages[name] = average.fill_(torch.nan)

    def started(self, step: int) -> None:
        """Initialize the averages with the weights if no checkpoint with averages was loaded."""
        self.saving(step)

    @torch.no_grad()
    def saving(self, step: int) -> None:
        """Initialize averages that are still NaN with the current weights.

        Averages are NaN if a rollback loaded a checkpoint without averages.
        """
        for average, weight in self._shards():
            if average.isnan().any():
                average.copy_(weight)

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Store the skip flag of the step for `updated`.

        Guards may still set the flag after this call, so do not read it yet.
        """
        self._skip = skip

    @torch.no_grad()
    def updated(self, step: int) -> None:
        """Move the averages toward the new weights, except after a skipped step."""
        is_updated = 1 - self._skip  # a tensor, 1.0 or 0.0, which avoids a host sync
        fraction = (1 - self._decay) * is_updated
        for average, weight in self._shards():
            average.lerp_(weight.float(), fraction)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, for example "layers.3.attention.wq.weight"."""
        return dict(self._averages)

    def _shards(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's shards of each average and the corresponding weight, as pairs."""
        return [
            (local_shard(self._averages[name]), local_shard(weight))
            for name, weight in self._weights.items()
        ]
