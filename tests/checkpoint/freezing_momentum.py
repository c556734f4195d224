"""A plugin optimizer with momentum, which has no state for one frozen parameter."""

import torch

from titanlite import register
from titanlite.config.schema import Section
from titanlite.optim.build import Groups, Recipe


class FreezingMomentumKeys(Section):
    """Gradient descent with momentum."""

    frozen: str = ""
    """Name of a parameter that does not change and has no optimizer state."""


@register("optimizer", "freezing_momentum", FreezingMomentumKeys)
def freezing_momentum(
    groups: Groups, recipe: Recipe, keys: FreezingMomentumKeys
) -> torch.optim.SGD:
    def drop_gradient(*_: object) -> None:
        for parameter, name in recipe.names.items():
            if name == keys.frozen:
                parameter.grad = None

    optimizer = torch.optim.SGD(groups, recipe.config.lr, momentum=0.9)
    optimizer.register_step_pre_hook(drop_gradient)
    return optimizer
