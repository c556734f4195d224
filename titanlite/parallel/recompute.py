"""Activation checkpointing: cheap results are recomputed in the backward pass, expensive ones are saved.

Invariant: losses, gradients and the names of parameters are the same as without it. It must be applied before FSDP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.config import schema
from titanlite.model.llama import Llama

aten = torch.ops.aten
_ALWAYS_SAVED = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    aten.max.default,  # the maximum of a whole tensor, for its FP8 scale
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
_MATMULS = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}


def _save_attention_and_every_second_matmul(last: int) -> tuple[Any, Any]:
    """The contexts of a block's forward pass and of its recomputation. Each counts the matmuls itself.

    Nothing needs the result of the `last` one again, so it is not saved. Of all others a byte that is saved spares as
    many operations, because their weights have as many rows: no other half of them is better.
    """
    matmuls = {False: 0, True: 0}

    def policy(context: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op in _MATMULS:
            matmuls[context.is_recompute] += 1
            number = matmuls[context.is_recompute]
            save = number % 2 == 1 and number != last
        else:
            save = op in _ALWAYS_SAVED
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_activation_checkpointing(model: Llama, config: schema.ActivationCheckpoint, in_graph: bool = False) -> None:
    """Let the blocks of `model` recompute, in place. The mode memory_budget lets the compiler choose instead.

    Args:
        in_graph: Blocks are compiled together with their recomputation. The compiler would save what they receive from
            other ranks, and an input of SwiGLU, unless it finds that a policy does not.
    """
    if config.mode == "memory_budget":
        functorch_config.activation_memory_budget = config.memory_budget
        # The budget counts memory. The only script objects in our graphs are the meshes of DTensors, which have none.
        if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):  # since torch 2.13
            functorch_config.unsafe_treat_script_objects_as_zero_size = True
        return
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # Llama uses no random numbers
    option = config.selective_ac_option if config.mode == "selective" else "1"
    if in_graph:
        recompute = partial(recompute, context_fn=partial(create_selective_checkpoint_contexts, []))
    every = 1 if option == "op" else int(option)
    for name, block in model.layers.items():
        if option == "op":
            kinds = [type(module) for module in block.modules() if isinstance(module, nn.Linear)]
            last = len(kinds) if set(kinds) == {nn.Linear} else 0  # an FP8 layer would compute it again, in eager mode
            recompute = partial(recompute, context_fn=partial(_save_attention_and_every_second_matmul, last))
        if (int(name) + 1) % every == 0:
            block.forward = _recomputing(block.forward, recompute)


def _recomputing(forward: Callable[..., Tensor], recompute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, recomputed in the backward pass. It is a new function, because the compiler skips torch's own."""
    return lambda *inputs: recompute(forward, *inputs)
