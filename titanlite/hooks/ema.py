"""An exponential moving average of the weights: average += (1 - decay) * (weight - average) after each step.

Invariant: it is in fp32, sharded as the weights are, and one copy of it is in each checkpoint. A step that is skipped
does not count, and the host waits for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanlite.checkpoint.live_tensors import plain
from titanlite.hooks.hook import Hook, Training
from titanlite.model.llama import Llama
from titanlite.optim.adamw import local_shard
from titanlite.optim.clip import StepSums


class Ema(Hook):
    """Averages the weights. It begins with those of the first start that has it."""

    def __init__(self, decay: float) -> None:
        self._decay = decay

    def built(self, training: Training) -> None:
        self.follow(training.model)

    def follow(self, model: Llama) -> None:
        """Average the weights of this model from now on."""
        self._weights = dict(model.named_parameters())
        # NaN until a checkpoint fills it, or `saving`.
        self._averages = {
            name: plain(weight).to(torch.float32, copy=True).fill_(torch.nan) for name, weight in self._weights.items()
        }

    def started(self, step: int) -> None:
        self.saving(step)

    @torch.no_grad()
    def saving(self, step: int) -> None:
        """An average that no checkpoint has filled begins here; a run that goes back is saved at once."""
        for average, weight in self._pairs():
            if average.isnan().any():
                average.copy_(weight)

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        self._skip = skip

    @torch.no_grad()
    def updated(self, step: int) -> None:
        share = (1 - self._decay) * (1 - self._skip)
        for average, weight in self._pairs():
            average.lerp_(weight.float(), share)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._averages)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's shard of each average, and that of the weight."""
        return [(local_shard(self._averages[name]), local_shard(weight)) for name, weight in self._weights.items()]
