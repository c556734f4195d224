"""Log the norms of gradients and updates for each group of parameters (metrics.details).

Invariant: Each norm is computed over whole parameters, so it is the same on all ranks and in all
layouts. The hook never changes the training state and causes no host sync between log steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.hooks.hook import Hook
from titanlite.model.formats import parameter_shapes
from titanlite.optim.clip import StepSums, count_replicas, local_shard, sum_of_squares

if TYPE_CHECKING:
    from titanlite.train.trainer import Trainer

# Rows of the tensor of sums of squares.
GRADIENTS, UPDATES, WEIGHTS = range(3)
MIN_NORM = 1e-30  # divisor of an update ratio if all weights are 0


class Norms(Hook):
    """Logs gradient norms and the relative norms of weight updates (metrics.details).

    At log steps, norms are computed for groups of parameters. A group consists of the parameters
    that have the same name in all transformer blocks, such as `attention.wq`. Each parameter
    outside the blocks forms a separate group.
    """

    def built(self, trainer: Trainer) -> None:
        """Group the parameters by name and allocate a tensor for their sums of squares."""
        self._trainer = trainer
        self._details = trainer.job.metrics.details

        # Use indices into the whole model, because pipeline stages hold different parameters.
        names = list(parameter_shapes(trainer.run.arch))
        self._groups = _group_by_name(names)
        self._index_of = {
            parameter: names.index(name) for name, parameter in trainer.model.named_parameters()
        }

        # This rank's sums of squares of the gradient, the update and the weights (rows) of each
        # parameter (columns). `numbers` adds them up over all ranks.
        device = local_shard(next(trainer.model.parameters())).device
        self._squares = torch.zeros(3, len(names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        """At log steps, store the sum of squares of each gradient."""
        if "gradients" not in self._details or not self._trainer.meter.is_log_step(step):
            return
        for parameter in self._index_of:
            if parameter.grad is not None:
                self._store(GRADIENTS, parameter, local_shard(parameter.grad))

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Keep a reference to `skip`, which `numbers` reads later.

        Guards may still change its value after this call, so do not read it yet.
        """
        self._was_skipped = skip

    @torch.no_grad()
    def updated(self, step: int) -> None:
        """At log steps, store the sum of squares of each weight and of its update."""
        if "updates" not in self._details or not self._trainer.meter.is_log_step(step):
            return
        optimizer = self._trainer.optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if optimizer.state.get(parameter):
                    self._store(UPDATES, parameter, self._adam_update(parameter, group))
                    self._store(WEIGHTS, parameter, local_shard(parameter))

    def numbers(self, step: int) -> Mapping[str, Any]:
        """Return the norms of each group of parameters in the current step as metrics.

        All ranks must call this together, once per log step, because they add up their parts.

        Returns:
            Depending on metrics.details:

            - "grad_norms": Gradient norm of each group.
            - "distributions": Data for TensorBoard histograms. Its only entry "grad_norms" contains
              the gradient norm in each transformer block, for groups with several parameters.
            - "update_ratios": Norm of the update divided by the norm of the weights, for each
              group. Missing if the step was skipped, because there was no update.
        """
        gradient_squares, update_squares, weight_squares = self._add_up_squares_and_reset()

        metrics: dict[str, Any] = {}
        if "gradients" in self._details:
            metrics["grad_norms"] = self._group_norms(gradient_squares)
            metrics["distributions"] = {"grad_norms": self._block_norms(gradient_squares)}
        if "updates" in self._details and not self._was_skipped:
            metrics["update_ratios"] = self._update_ratios(update_squares, weight_squares)
        return metrics

    def _add_up_squares_and_reset(self) -> list[list[float]]:
        """Return the stored sums of squares, added up over all ranks, and reset them to 0.

        Returns:
            Three lists: the sums for the gradient, the update and the weights of each parameter.
        """
        dist.all_reduce(self._squares)
        squares = self._squares.tolist()
        self._squares.zero_()
        return squares

    def _update_ratios(
        self, update_squares: list[float], weight_squares: list[float]
    ) -> dict[str, float]:
        """Return the norm of the update divided by the norm of the weights, for each group.

        Args:
            update_squares: Sum of squares of the update of each model parameter.
            weight_squares: Sum of squares of each model parameter.
        """
        update_norms = self._group_norms(update_squares)
        weight_norms = self._group_norms(weight_squares)
        return {
            group: update_norm / max(weight_norms[group], MIN_NORM)
            for group, update_norm in update_norms.items()
        }

    def _adam_update(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Recompute the last Adam update of this rank's shard of a parameter, without weight decay.

        With the bias-corrected moments m and v, the update is lr * m / (sqrt(v) + eps), which Adam
        subtracts from the parameter.

        Args:
            parameter: Parameter, possibly sharded.
            group: Parameter group in the optimizer, with "betas", "eps" and "lr".
        """
        state = self._trainer.optimizer.state[parameter]
        step = state["step"]
        beta1, beta2 = group["betas"]
        exp_avg = local_shard(state["exp_avg"]).float()
        exp_avg_sq = local_shard(state["exp_avg_sq"]).float()

        corrected_sq = exp_avg_sq / (1 - beta2**step)
        denominator = corrected_sq.sqrt_().add_(group["eps"])
        return group["lr"] * exp_avg / (1 - beta1**step) / denominator

    def _store(self, row: int, parameter: nn.Parameter, shard: Tensor) -> None:
        """Store the sum of squares of a shard, divided by the number of ranks with the same shard.

        The sum over all ranks then counts each shard once.

        Args:
            row: GRADIENTS, UPDATES or WEIGHTS.
            parameter: Parameter that the shard belongs to.
            shard: This rank's shard of the gradient, update or weight.
        """
        square = sum_of_squares([shard.detach()])[0]
        self._squares[row, self._index_of[parameter]] = square / count_replicas(parameter)

    def _group_norms(self, squares: list[float]) -> dict[str, float]:
        """Return the norm of each group of parameters, by group name.

        Args:
            squares: Sum of squares of the gradient, update or weights of each model parameter.
        """
        norms = {}
        for group, indices in self._groups.items():
            norms[group] = math.sqrt(sum(squares[index] for index in indices))
        return norms

    def _block_norms(self, squares: list[float]) -> dict[str, list[float]]:
        """Return the norm of each parameter in the groups that have one parameter per block.

        For example, the group "attention.wq" contains the matrix `wq` of each transformer block.
        Omit groups with one parameter, such as the embedding.

        Args:
            squares: Sum of squares of each model parameter or of its gradient.

        Returns:
            Mapping from group names to the norms of their parameters, in the order of the blocks.
        """
        norms = {}
        for group, indices in self._groups.items():
            if len(indices) > 1:
                norms[group] = [math.sqrt(squares[index]) for index in indices]
        return norms


def _group_by_name(names: Sequence[str]) -> dict[str, list[int]]:
    """Group the parameters that have the same name in different transformer blocks.

    For example, the names "layers.0.attention.wq.weight", "layers.1.attention.wq.weight" and
    "norm.weight" give {"attention.wq": [0, 1], "norm": [2]}. The values are indices into `names`.
    """
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        group = re.sub(r"^layers\.\d+\.", "", name).removesuffix(".weight")
        groups.setdefault(group, []).append(index)
    return groups
