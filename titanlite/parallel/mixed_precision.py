"""Mixed precision without FSDP, for a single CPU rank.

Invariant: Losses, gradients and parameter names are the same as with the mixed precision of FSDP.
The exception is a plugin model that calls a block several times in a forward pass: the gradients of
the calls are added up in the dtype of the parameters instead of the compute dtype.
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
    """Let a model compute with weights that are cast to `dtype` in each forward pass, in place.

    The parameters keep their dtype, for example fp32. Autograd casts the gradients back to it.
    During a forward pass, the modules hold the cast tensors instead of their parameters.

    Args:
        model: Model before activation checkpointing and compilation.
        dtype: Dtype of the weights in computations, for example bfloat16.
        compiles_blocks: Whether the blocks will be compiled.
    """
    names = [name for name, _ in model.named_parameters()]
    if compiles_blocks:
        # Cast before the compiled code, which would otherwise not round gradients to `dtype`.
        model.forward = _CastingForward(model.forward, model, names, dtype)
        return

    # Cast in each block, so that activation checkpointing repeats the cast when it recomputes.
    for block in model.layers.values():
        block_names = [name for name, _ in block.named_parameters()]
        block.forward = _CastingForward(block.forward, block, block_names, dtype)
    other_names = [name for name in names if not name.startswith("layers.")]
    model.forward = _CastingForward(model.forward, model, other_names, dtype)


@dataclass(frozen=True)
class _CastingForward:
    """Replaces `forward` of a module, and calls it with cast parameters.

    Unlike a closure, a deep copy of the module also copies this object.

    Attributes:
        forward: Original method of the module.
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
            f"owner.{name}": self.module.get_parameter(name).to(self.dtype) for name in self.names
        }
        return functional_call(OwnedFunction(self.forward, self.module), weights, args, kwargs)


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
