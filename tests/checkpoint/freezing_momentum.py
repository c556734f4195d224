"""A plugin optimizer with momentum, which has no state for one frozen parameter."""

from collections.abc import Callable
from typing import Any

import torch

from titanlite import register
from titanlite.config.schema import Section
from titanlite.optim.build import Groups, Recipe


class FreezingMomentumKeys(Section):
    """Gradient descent with momentum."""

    frozen: str = ""
    """Name of a parameter that does not change and has no optimizer state."""


class FreezingMomentum(torch.optim.Optimizer):
    """Gradient descent with momentum for all parameters except for `frozen`."""

    frozen: torch.nn.Parameter | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter is not self.frozen:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 0.1)
                    parameter.sub_(momentum * group["lr"])


@register("optimizer", "freezing_momentum", FreezingMomentumKeys)
def freezing_momentum(
    groups: Groups, recipe: Recipe, keys: FreezingMomentumKeys
) -> FreezingMomentum:
    optimizer = FreezingMomentum(groups, {"lr": recipe.config.lr})
    for parameter, name in recipe.names.items():
        if name == keys.frozen:
            optimizer.frozen = parameter
    return optimizer
