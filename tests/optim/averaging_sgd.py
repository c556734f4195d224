"""A plugin optimizer that evaluates the mean of all past weights, like schedule-free methods."""

from collections.abc import Callable
from typing import Any

import torch

from titanlite import register
from titanlite.optim.build import Groups, Recipe


class AveragingSGD(torch.optim.Optimizer):
    """Gradient descent that swaps the weights in the model with those in `state["other"]`."""

    is_training = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore
        assert self.is_training
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["other"] = parameter.clone()
                    state["steps"] = torch.zeros(())
                parameter.sub_(parameter.grad * group["lr"])
                state["steps"] += 1
                weight = 1 / state["steps"].item() if group["lr"] else 0.0
                state["other"].lerp_(parameter, weight)

    @torch.no_grad()
    def _swap(self, is_training: bool) -> None:
        if self.is_training != is_training:
            for parameter, state in self.state.items():
                weights = parameter.clone()
                parameter.copy_(state["other"])
                state["other"].copy_(weights)
        self.is_training = is_training

    def eval(self) -> None:
        self._swap(False)

    def train(self) -> None:
        self._swap(True)


@register("optimizer", "averaging_sgd")
def averaging_sgd(groups: Groups, recipe: Recipe) -> AveragingSGD:
    return AveragingSGD(groups, {"lr": recipe.config.lr})
