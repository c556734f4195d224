"""Activation checkpointing: recompute activations in the backward pass to save memory.

Invariant: Losses, gradients and parameter names are the same with and without activation
checkpointing. The exception is a compiled model with dropout, which may draw different random
numbers; see docs/reference/compatibility.md. Apply activation checkpointing before FSDP.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from titanlite.config import schema
from titanlite.model.llama import Llama
from titanlite.parallel.memory_savers import find_unneeded_matmul

# Words in the names of operators that are not recomputed: attention, whose operator depends on the
# device and the attention backend, and reduce-scatter, which would communicate again.
ALWAYS_SAVED_WORDS = ("attention", "attn", "reduce_scatter")
AMAX = torch.ops.aten.max.default  # the largest element of a tensor, for its FP8 scale
MATMULS = {"aten::mm", "aten::addmm", "aten::_scaled_mm"}

CreateContexts = Callable[[], tuple[Any, Any]]
"""Argument `context_fn` of `torch.utils.checkpoint.checkpoint`.

The function returns contexts for the forward pass and for the recomputation. They determine which
operators are recomputed.
"""


def apply_activation_checkpointing(
    model: Llama,
    config: schema.ActivationCheckpoint,
    is_compiled: bool = False,
    uses_savers: bool = True,
) -> None:
    """Wrap the forward pass of blocks so that the backward pass recomputes their activations.

    The four modes are "none", "memory_budget" (the compiler decides what to recompute), "full" (all
    operations of all blocks), and "selective" (some operations, or all operations of some blocks).

    Args:
        model: Model before FSDP, modified in place.
        config: Section [activation_checkpoint] of the job.
        is_compiled: Whether each block will be compiled together with its recomputation.
        uses_savers: Whether to skip saving the last matmul output of a block if the backward pass
            never reads it; see `find_unneeded_matmul`.
    """
    if config.mode == "none":
        return
    if config.mode == "memory_budget":
        _set_memory_budget(config.memory_budget)
        return

    if config.mode == "full":
        _recompute_whole_blocks(model, is_compiled, interval=1)
    elif config.selective_ac_option == "op":
        _recompute_some_operations(model, uses_savers)
    else:  # a number, such as "2" for every second block
        _recompute_whole_blocks(model, is_compiled, int(config.selective_ac_option))


def _recompute_whole_blocks(model: Llama, is_compiled: bool, interval: int) -> None:
    """Recompute all operations of every `interval`-th block in the backward pass.

    Args:
        model: Model before FSDP, modified in place.
        is_compiled: Whether each block will be compiled together with its recomputation.
        interval: 1 selects all blocks, 2 selects every second block.
    """
    create_contexts: CreateContexts = noop_context_fn  # the default in eager mode
    if is_compiled:
        # By default, the compiler would save inputs of collectives and of SwiGLU. Save nothing.
        create_contexts = partial(create_selective_checkpoint_contexts, [])
    for index, block in model.layers.items():
        if (int(index) + 1) % interval == 0:
            _checkpoint_block(model, block, create_contexts)


def _recompute_some_operations(model: Llama, uses_savers: bool) -> None:
    """Recompute about half of the matmuls of each block, and most other operations.

    The forward pass of a block saves the outputs of matmuls 1, 3, 5 and so on, and of operators
    such as attention. The backward pass recomputes all other outputs.

    Args:
        model: Model before FSDP, modified in place.
        uses_savers: Whether to skip saving the last matmul output of a block if the backward pass
            never reads it; see `find_unneeded_matmul`.
    """
    for block in model.layers.values():
        skipped_matmul = find_unneeded_matmul(block) if uses_savers else None
        _checkpoint_block(model, block, partial(_create_op_contexts, skipped_matmul))


def _set_memory_budget(budget: float) -> None:
    """Let the compiler decide which activations to recompute, within a memory budget.

    Args:
        budget: Fraction of the activation memory that the compiler may keep.
    """
    # Imported here, because the module is private and no other mode needs it.
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = budget
    # The only script objects in our graphs are the meshes of DTensors, which take no memory.
    if torch.__version__ >= "2.13":  # earlier versions do not have the setting
        functorch_config.unsafe_treat_script_objects_as_zero_size = True


def draws_random_numbers(model: type[Llama]) -> bool:
    """Return whether the forward pass of a model class may draw random numbers, as dropout does.

    The class attribute `draws_random_numbers` declares this. If a class does not define the
    attribute itself, return True even if it inherits False, because a subclass may have added
    dropout.
    """
    return vars(model).get("draws_random_numbers", True)


def _create_op_contexts(skipped_matmul: int | None) -> tuple[Any, Any]:
    """Create the contexts of selective activation checkpointing for one block.

    The contexts save the outputs of every second matmul (1, 3, 5 and so on), and of a few other
    operators, such as attention. This is a compromise: compared with saving all matmul outputs, it
    needs about half of the memory, and the backward pass recomputes about half of the matmuls.

    Args:
        skipped_matmul: Number of the matmul whose output is never saved, because the backward pass
            does not need it. None if there is no such matmul.

    Returns:
        Contexts for the forward pass and for the recomputation, for the argument `context_fn` of
        `torch.utils.checkpoint.checkpoint`.
    """
    # torch calls the policy for each operation in the forward pass, and again in the recomputation.
    # Both passes must make the same decisions, so both number their matmuls from 1.
    forward_numbers = itertools.count(1)
    recompute_numbers = itertools.count(1)

    def policy(
        context: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any
    ) -> CheckpointPolicy:
        """Return whether to save the output of `op` or to recompute it in the backward pass."""
        if op.name() in MATMULS:
            # Number this matmul within its pass, and save its output if the number is odd, unless
            # the backward pass does not need it.
            matmul_number = next(recompute_numbers if context.is_recompute else forward_numbers)
            is_odd = matmul_number % 2 == 1
            should_save = is_odd and matmul_number != skipped_matmul
        else:
            should_save = is_always_saved(op)

        return CheckpointPolicy.MUST_SAVE if should_save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@cache
def is_always_saved(op: Any) -> bool:
    """Return whether selective activation checkpointing always saves the output of an operator."""
    return op is AMAX or any(word in op.name() for word in ALWAYS_SAVED_WORDS)


def _checkpoint_block(model: Llama, block: nn.Module, create_contexts: CreateContexts) -> None:
    """Make a block recompute its activations in the backward pass, by replacing its `forward`.

    Args:
        model: Model that contains the block.
        block: Block, modified in place.
        create_contexts: Function that selects the operators to recompute.
    """
    forward = block.forward
    preserve_rng_state = draws_random_numbers(type(model))

    # The compiler traces this function, but would not trace a `partial` of `checkpoint`.
    def forward_with_checkpoint(*inputs: Any) -> Any:
        return checkpoint(
            forward,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            context_fn=create_contexts,
        )

    block.forward = forward_with_checkpoint
