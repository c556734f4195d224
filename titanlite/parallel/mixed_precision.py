"""Mixed precision without FSDP, for a single CPU rank.

Invariant: Losses, gradients and parameter names are the same as with FSDP mixed precision. The only
exceptions are plugin models that call an uncompiled block several times per forward pass. They add
up the gradients of these calls in the dtype of the parameters, not in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from titanlite.model.llama import Llama


def cast_weights(model: Llama, dtype: torch.dtype, compiles_blocks: bool) -> None:
    """Modify a model so that each forward pass computes with weights that are cast to `dtype`.

    The parameters keep their dtype, for example fp32. Autograd casts the gradients back to it.
    During a forward pass, the modules hold the cast tensors instead of their parameters.

    Args:
        model: Model before activation checkpointing and compilation, modified in place.
        dtype: Dtype of the weights in computations, for example bfloat16.
        compiles_blocks: Whether the blocks will be compiled.
    """
    names = [name for name, _ in model.named_parameters()]
    if compiles_blocks:
        # Cast all weights before the first block. If a compiled block contained the casts, the
        # compiler would skip the rounding of some gradients to `dtype`.
        _cast_in_forward(model, names, dtype)
        return

    # Cast in each block, so that activation checkpointing repeats the cast when it recomputes.
    for block in model.layers.values():
        block_names = [name for name, _ in block.named_parameters()]
        _cast_in_forward(block, block_names, dtype)
    other_names = [name for name in names if not name.startswith("layers.")]
    _cast_in_forward(model, other_names, dtype)


def _cast_in_forward(module: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
    """Make each forward pass of a module use `dtype` copies of the parameters in `names`."""
    module.forward = _ForwardWithCast(module.forward, module, names, dtype)


class FunctionModule(nn.Module):
    """Wraps a function in a module, because `functional_call` calls only modules.

    Args:
        function: Function to call.
        module: Module whose parameters the function reads. `functional_call` can replace them under
            the names "module.<name>".
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class _ForwardWithCast:
    """Replacement for a module's `forward` that runs the original method with cast parameters.

    This is an object and not a closure, so that a deep copy of the module also copies it.

    Attributes:
        forward: The original method.
        module: The module.
        names: Names of the parameters to cast.
        dtype: Dtype of the cast parameters.
    """

    forward: Callable[..., Any]
    module: nn.Module
    names: Sequence[str]
    dtype: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weights = {
            f"module.{name}": self.module.get_parameter(name).to(self.dtype) for name in self.names
        }
        # Calling the module itself would call this object again.
        return functional_call(FunctionModule(self.forward, self.module), weights, args, kwargs)
