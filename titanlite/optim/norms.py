"""Norms by parameter, when the job asks for them (metrics.details): of gradients, of updates, of weights.

Invariant: they are those of whole parameters, the same on every rank and for any layout. Nothing is changed, and
nothing is read from the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.flavors import Architecture
from titanlite.model.llama import Llama
from titanlite.optim.adamw import local_shard
from titanlite.optim.clip import number_of_copies, sum_of_squares


class ParameterNorms:
    """Sums of squares of one step, for each parameter of the whole model.

    Call `add_gradients` before they are clipped, `add_updates` after the optimizer, and then `total`.

    Args:
        model: this rank's part of the model.
        gradients, updates: which of them are asked for.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, arch: Architecture, gradients: bool, updates: bool
    ) -> None:
        self._optimizer, self._gradients, self._updates = optimizer, gradients, updates
        with torch.device("meta"):  # a pipeline has other parameters on other ranks
            names = [name for name, _ in Llama(arch).named_parameters()]
        places = {name: place for place, name in enumerate(names)}
        self._places = {parameter: places[name] for name, parameter in model.named_parameters()}
        # Parameters with the same place in a block, such as attention.wq, and each of the others.
        self._groups: dict[str, list[int]] = {}
        for name, place in places.items():
            group = name.split(".", 2)[2] if name.startswith("layers.") else name
            self._groups.setdefault(group.removesuffix(".weight"), []).append(place)
        device = local_shard(next(model.parameters())).device
        # Of gradients, updates and weights.
        self._sums = torch.zeros(3, len(names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Take the gradients, if they are asked for."""
        for parameter in self._places if self._gradients else ():
            if parameter.grad is not None:
                self._add(0, parameter, local_shard(parameter.grad))

    @torch.no_grad()
    def add_updates(self) -> None:
        """Take what Adam has just subtracted, if it is asked for, without weight decay, and the weights."""
        for group in self._optimizer.param_groups if self._updates else ():
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if state := self._optimizer.state.get(parameter):
                    mean, square = (local_shard(state[name]).float() for name in ("exp_avg", "exp_avg_sq"))
                    step = state["step"]
                    root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
                    self._add(1, parameter, lr * mean / (1 - beta1**step) / root)
                    self._add(2, parameter, local_shard(parameter))

    def _add(self, kind: int, parameter: nn.Parameter, shard: Tensor) -> None:
        if shard.numel():
            squares = sum_of_squares([shard.detach()], [number_of_copies(parameter)])
            self._sums[kind, self._places[parameter]] = squares

    def total(self) -> Tensor:
        """The sums over all ranks, (3, parameters) in float64, by one all-reduce. The next step begins with zeros."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        dist.all_reduce(sums)
        return sums

    def describe(self, sums: Any) -> dict[str, Any]:
        """The fields of a logged step.

        Args:
            sums: what `total` returned, as lists of numbers.
        """
        norms = [{group: math.sqrt(sum(kind[i] for i in own)) for group, own in self._groups.items()} for kind in sums]
        found: dict[str, Any] = {}
        if self._gradients:
            each = [math.sqrt(square) for square in sums[0]]
            several = {group: [each[i] for i in own] for group, own in self._groups.items() if len(own) > 1}
            found |= {"grad_norms": norms[0], "distributions": {"grad_norms": several}}
        if self._updates:
            found["update_ratios"] = {group: norm / max(norms[2][group], 1e-30) for group, norm in norms[1].items()}
        return found
