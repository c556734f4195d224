"""Activation checkpointing: recompute in the backward pass what is cheap, save what is dear.

Invariant: losses and gradients are those of the model without it, and names of parameters stay as they are. Must come
before FSDP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
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
    aten.max.default,  # of a whole tensor, which FP8 scales by
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
_MATMULS = {aten.mm.default, aten._scaled_mm.default}


def _save_attention_and_every_second_matmul() -> tuple[Any, Any]:
    """Contexts of one block's forward pass and of its recomputation, each with a matmul count of its own."""
    matmuls = {False: 0, True: 0}

    def policy(context: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op in _MATMULS:
            matmuls[context.is_recompute] += 1
            save = matmuls[context.is_recompute] % 2 == 1
        else:
            save = op in _ALWAYS_SAVED
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_activation_checkpointing(model: Llama, config: schema.ActivationCheckpoint) -> None:
    """Let the blocks of `model` recompute, in place; memory_budget sets the compiler's own choice instead."""
    if config.mode == "memory_budget":
        functorch_config.activation_memory_budget = config.memory_budget
        # The budget's sizes: the only script objects in our graphs are the meshes of DTensors, which hold no memory.
        option = "unsafe_treat_script_objects_as_zero_size"  # since torch 2.13
        if hasattr(functorch_config, option):
            setattr(functorch_config, option, True)
        return
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # Llama draws nothing
    every = 1
    if config.mode == "selective" and config.selective_ac_option == "op":
        recompute = partial(recompute, context_fn=_save_attention_and_every_second_matmul)
    elif config.mode == "selective":
        every = int(config.selective_ac_option)
    for name, block in model.layers.items():
        if (int(name) + 1) % every == 0:
            block.forward = _recomputing(block.forward, recompute)


def _recomputing(forward: Callable[..., Tensor], recompute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, recomputed in the backward pass. A function of our own, because the compiler skips all of torch's."""
    return lambda *inputs: recompute(forward, *inputs)
