"""Activation checkpointing: recompute activations in the backward pass to save memory.

Invariant: Losses, gradients and parameter names are the same with and without activation
checkpointing. Apply it before FSDP.
"""

from __future__ import annotations

import itertools
import sys
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
from titanlite.parallel.memory_savers import find_unneeded_matmul

aten = torch.ops.aten
ALWAYS_SAVED = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    aten.max.default,  # the amax of a tensor, for its FP8 scale
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
MATMULS = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}


def _always_saved() -> set[Any]:
    """Return the operators whose results selective activation checkpointing always saves.

    The operator of variable-length attention is included only if its module has been imported. The
    import takes seconds, so only runs that use this kind of attention import it.
    """
    if "torch.nn.attention.varlen" not in sys.modules:
        return ALWAYS_SAVED
    return ALWAYS_SAVED | {torch.ops.torch_attn._varlen_attn.default}


def apply_activation_checkpointing(
    model: Llama,
    config: schema.ActivationCheckpoint,
    in_graph: bool = False,
    skips_unneeded_matmul: bool = True,
) -> None:
    """Wrap the forward pass of blocks so that the backward pass recomputes their activations.

    Args:
        model: Model before FSDP, modified in place.
        config: Section [activation_checkpoint] of the job.
        in_graph: Whether each block is compiled together with its recomputation, as one graph.
        skips_unneeded_matmul: Whether mode "op" never saves the output of a block's last matmul,
            which the backward pass does not need. No effect on blocks with FP8 layers.
    """
    if config.mode == "none":
        return
    if config.mode == "memory_budget":
        _set_memory_budget(config.memory_budget)
        return

    preserves_rng_state = draws_random_numbers(type(model))
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=preserves_rng_state)
    if config.mode == "full":
        _recompute_whole_blocks(model, recompute, in_graph, interval=1)
    elif config.selective_ac_option == "op":
        _recompute_some_operations(model, recompute, skips_unneeded_matmul)
    else:  # a number, such as "2" for every second block
        _recompute_whole_blocks(model, recompute, in_graph, int(config.selective_ac_option))


def _recompute_whole_blocks(
    model: Llama, recompute: Callable[..., Tensor], in_graph: bool, interval: int
) -> None:
    """Recompute all operations of every `interval`-th block in the backward pass.

    Args:
        model: Model before FSDP, modified in place.
        recompute: Checkpoint function. It receives a forward function and its arguments.
        in_graph: Whether each block is compiled together with its recomputation, as one graph.
        interval: 1 selects all blocks, 2 every second block.
    """
    if in_graph:
        # By default, the compiler would save inputs of collectives and of SwiGLU.
        saved_operators: list[Any] = []
        save_nothing = partial(create_selective_checkpoint_contexts, saved_operators)
        recompute = partial(recompute, context_fn=save_nothing)
    for index, block in model.layers.items():
        if (int(index) + 1) % interval == 0:
            block.forward = _recompute_in_backward(block.forward, recompute)


def _recompute_some_operations(
    model: Llama, recompute: Callable[..., Tensor], skips_unneeded_matmul: bool
) -> None:
    """Recompute about half of the matmuls of each block, and most other operations.

    The forward pass of a block saves the outputs of matmuls 1, 3, 5 and so on, and of operators
    such as attention. The backward pass recomputes all other outputs.

    Args:
        model: Model before FSDP, modified in place.
        recompute: Checkpoint function. It receives a forward function and its arguments.
        skips_unneeded_matmul: Whether the output of a block's last matmul is never saved, because
            the backward pass does not need it. No effect on blocks with FP8 layers.
    """
    for block in model.layers.values():
        skipped_matmul = find_unneeded_matmul(block) if skips_unneeded_matmul else None
        create_contexts = partial(_create_op_contexts, skipped_matmul)
        recompute_some = partial(recompute, context_fn=create_contexts)
        block.forward = _recompute_in_backward(block.forward, recompute_some)


def _set_memory_budget(budget: float) -> None:
    """Let the compiler decide which activations to recompute, within a memory budget.

    Args:
        budget: Fraction of the activation memory that the compiler may keep.
    """
    functorch_config.activation_memory_budget = budget
    # The only script objects in our graphs are the meshes of DTensors, which take no memory.
    if torch.__version__ >= "2.13":  # earlier versions do not have the setting
        functorch_config.unsafe_treat_script_objects_as_zero_size = True


def draws_random_numbers(model: type[Llama]) -> bool:
    """Return whether the forward pass of a model class may draw random numbers, as dropout does.

    The result is the attribute `draws_random_numbers` of the class itself. A class that only
    inherits the attribute may have added dropout, so the result is True for such a class.
    """
    # Look only at the class itself, because a subclass may add dropout.
    return vars(model).get("draws_random_numbers", True)


def _create_op_contexts(skipped_matmul: int | None) -> tuple[Any, Any]:
    """Create the contexts of selective activation checkpointing for one block.

    The contexts save the outputs of every second matmul and of a few other operators, such as
    attention. It hardly matters which half of the matmuls is saved, because most matmuls have the
    same input width.

    Args:
        skipped_matmul: Index, from 1, of a matmul whose output is not saved, because the backward
            pass does not need it. None to exclude no matmul.

    Returns:
        Contexts for the forward pass and for the recomputation, for the argument `context_fn` of
        `torch.utils.checkpoint.checkpoint`.
    """
    # torch calls the policy for each operation in the forward pass, and again in the recomputation.
    # Both passes must make the same decisions, so each of them counts its matmuls.
    forward_count = itertools.count(1)
    recompute_count = itertools.count(1)
    always_saved = _always_saved()

    def policy(
        context: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any
    ) -> CheckpointPolicy:
        """Return whether to save the output of `op` or to recompute it in the backward pass."""
        if op in MATMULS:
            index = next(recompute_count if context.is_recompute else forward_count)
            should_save = index % 2 == 1 and index != skipped_matmul
        else:
            should_save = op in always_saved
        return CheckpointPolicy.MUST_SAVE if should_save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _recompute_in_backward(
    forward: Callable[..., Tensor], recompute: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Wrap a forward function so that its activations are recomputed in the backward pass.

    Args:
        forward: Forward function of a block.
        recompute: Checkpoint function. It receives `forward` and the arguments of `forward`.
    """
    # Not a `partial`: the compiler skips functions that are defined in torch.
    return lambda *inputs: recompute(forward, *inputs)
