"""Gradient accumulation on the CPU, for CPU offload with a reduction after each microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import nn
from torch.distributed.tensor import DTensor


class OffloadedGradients:
    """Accumulates the gradients of several microbatches on the CPU.

    FSDP2 copies gradients to the CPU without blocking only if `parameter.grad` is empty. This class
    therefore takes the gradients of each microbatch from the parameters and adds them up.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prepare to accumulate gradients, with no sums yet.

        Args:
            parameters: Sharded parameters on the CPU.
        """
        self._parameters = list(parameters)
        self._sums: list[DTensor | None] = [None] * len(self._parameters)

    def add_latest(self) -> None:
        """Add the gradients of the latest microbatch to the sums and clear `parameter.grad`."""
        for i, parameter in enumerate(self._parameters):
            gradient = cast(DTensor | None, parameter.grad)
            total = self._sums[i]
            parameter.grad = None
            if total is None:
                self._sums[i] = gradient
            elif gradient is not None:
                total.to_local().add_(gradient.to_local())

    def move_sums_to_parameters(self) -> None:
        """Add the gradients of the last microbatch, then make each sum the `grad` of its parameter.

        Call this after the last of several microbatches of a step, before gradient clipping.
        """
        self.add_latest()
        for i, parameter in enumerate(self._parameters):
            parameter.grad = self._sums[i]
            self._sums[i] = None
