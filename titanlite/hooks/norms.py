"""Norms by group of parameters in the steps that are logged (metrics.details): of gradients, of updates, of weights.

Invariant: they are those of whole parameters, the same on every rank and for any layout. Nothing is changed, and
nothing is read from the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.hooks.hook import Hook, Training
from titanlite.model.formats import parameter_shapes
from titanlite.optim.adamw import local_shard
from titanlite.optim.clip import number_of_copies, sum_of_squares


class Norms(Hook):
    """Of the gradients, of the updates, or of both."""

    def built(self, training: Training) -> None:
        self._is_logged, self._optimizer = training.meter.is_log_step, training.optimizer
        self._details = training.run.job.metrics.details
        names = parameter_shapes(training.run.arch)  # a pipeline has other parameters on other ranks
        places = {name: place for place, name in enumerate(names)}
        self._places = {parameter: places[name] for name, parameter in training.model.named_parameters()}
        # Parameters with the same place in a block, such as attention.wq, and each of the others.
        self._groups: dict[str, list[int]] = {}
        for name, place in places.items():
            group = name.split(".", 2)[2] if name.startswith("layers.") else name
            self._groups.setdefault(group.removesuffix(".weight"), []).append(place)
        device = local_shard(next(training.model.parameters())).device
        # Sums of squares of a step: of gradients, of updates and of weights.
        self._sums = torch.zeros(3, len(names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        for parameter in self._places if "gradients" in self._details and self._is_logged(step) else ():
            if parameter.grad is not None:
                self._add(0, parameter, local_shard(parameter.grad))

    @torch.no_grad()
    def updated(self, step: int) -> None:
        """Take what Adam has just subtracted, without weight decay, and the weights."""
        for group in self._optimizer.param_groups if "updates" in self._details and self._is_logged(step) else ():
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if state := self._optimizer.state.get(parameter):
                    mean, square = (local_shard(state[name]).float() for name in ("exp_avg", "exp_avg_sq"))
                    root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                    self._add(1, parameter, lr * mean / (1 - beta1 ** state["step"]) / root)
                    self._add(2, parameter, local_shard(parameter))

    def _add(self, kind: int, parameter: nn.Parameter, shard: Tensor) -> None:
        if shard.numel():
            squares = sum_of_squares([shard.detach()])[0] / number_of_copies(parameter)
            self._sums[kind, self._places[parameter]] = squares

    def numbers(self, step: int) -> Mapping[str, Any]:
        """The fields of a logged step, from the sums over all ranks, by one all-reduce."""
        total, self._sums = self._sums, torch.zeros_like(self._sums)
        dist.all_reduce(total)
        sums: list[list[float]] = total.tolist()
        norms = [{group: math.sqrt(sum(kind[i] for i in own)) for group, own in self._groups.items()} for kind in sums]
        found: dict[str, Any] = {}
        if "gradients" in self._details:
            each = [math.sqrt(square) for square in sums[0]]
            several = {group: [each[i] for i in own] for group, own in self._groups.items() if len(own) > 1}
            found |= {"grad_norms": norms[0], "distributions": {"grad_norms": several}}
        if "updates" in self._details:
            found["update_ratios"] = {group: norm / max(norms[2][group], 1e-30) for group, norm in norms[1].items()}
        return found
