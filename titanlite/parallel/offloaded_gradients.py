"""Gradient accumulation on the CPU, for CPU offload with a reduction after each microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import nn
from torch.distributed.tensor import DTensor


class OffloadedGradients:
    """Accumulates the gradients of several microbatches on the CPU.

    FSDP2 copies gradients to the CPU without blocking only if `parameter.grad` is None. This class
    therefore takes the gradients of each microbatch from the parameters and adds them up.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Create an accumulator without any gradients.

        Args:
            parameters: Sharded parameters on the CPU.
        """
        self._parameters = list(parameters)
        self._sums: dict[nn.Parameter, DTensor] = {}

    def move_gradients_to_sums(self) -> None:
        """Move the gradients of the latest microbatch, if any, from the parameters to the sums."""
        for parameter in self._parameters:
            gradient = cast(DTensor | None, parameter.grad)
            parameter.grad = None
            if gradient is None:
                continue
            if parameter in self._sums:
                self._sums[parameter].to_local().add_(gradient.to_local())
            else:
                self._sums[parameter] = gradient

    def move_sums_to_parameters(self) -> None:
        """Add the gradients of the last microbatch, then make each sum the `grad` of its parameter.

        Call this after the last microbatch of a step, before gradient clipping.
        """
        self.move_gradients_to_sums()
        for parameter, gradient in self._sums.items():
            parameter.grad = gradient
        self._sums.clear()
