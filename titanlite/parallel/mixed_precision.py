"""Mixed precision without FSDP, for a single CPU rank.

Invariant: Losses, gradients and parameter names are the same as with the mixed precision of FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from titanlite.model.llama import Llama


def cast_weights(model: Llama, dtype: torch.dtype, compiles_blocks: bool) -> None:
    """Let a model compute with weights that are cast to `dtype` in each forward pass, in place.

    The parameters keep their dtype, for example fp32. Autograd casts the gradients back to it.

    Args:
        model: Model before activation checkpointing and compilation.
        dtype: Dtype of the weights in computations, for example bfloat16.
        compiles_blocks: Whether the blocks will be compiled.
    """
    names = [name for name, _ in model.named_parameters()]
    if compiles_blocks:
        # Cast before the compiled code, which would otherwise not round gradients to `dtype`.
        _cast_in_forward(model, names, dtype)
        return

    # Cast in each block, so that activation checkpointing repeats the cast when it recomputes.
    for block in model.layers.values():
        _cast_in_forward(block, [name for name, _ in block.named_parameters()], dtype)
    _cast_in_forward(model, [name for name in names if not name.startswith("layers.")], dtype)


def _cast_in_forward(module: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
    """Let the forward pass of a module cast the parameters in `names` to `dtype`."""
    function = OwnedFunction(module.forward, module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = {f"owner.{name}": module.get_parameter(name).to(dtype) for name in names}
        return functional_call(function, weights, args, kwargs)

    module.forward = forward


class OwnedFunction(nn.Module):
    """Wraps a function in a module, so that `functional_call` can replace parameters of `owner`.

    Args:
        function: Function to call.
        owner: Module whose parameters the function reads.
    """

    def __init__(self, function: Callable[..., Any], owner: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.owner = owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)
