"""Tensor parallelism: the ranks of a group share every matmul (https://arxiv.org/abs/1909.08053).

Between matmuls, the residual stream is sharded along the sequence
(https://arxiv.org/abs/2205.05198). The fused loss is sharded along the vocabulary, so no rank ever
holds all logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.config.errors import UserError
from titanlite.config.flavors import Architecture
from titanlite.config.registry import resolve
from titanlite.model.llama import Llama
from titanlite.parallel.float8 import float8_plan


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, gather_float8: bool) -> None:
    """Shard the weights of a model over the tensor parallel ranks, in place.

    Between matmuls each rank holds activations of shape (B, T / degree, C), which divides the work
    of norms and residual connections and saves memory.

    Args:
        model: Model or pipeline stage on the meta device.
        mesh: 1-D mesh of the tensor parallel ranks.
        gather_float8: All-gather the inputs of FP8 layers, and their gradients, as FP8 values.
    """
    # A plan maps submodules to parallel styles, which shard weights and add communication. A
    # submodule can have two styles, in different plans.
    create_plans = resolve(model.arch.tensor_parallel)
    for block in model.layers.values():
        for plan in create_plans(model.arch):
            plan_in_use = float8_plan(plan, block) if gather_float8 else plan
            parallelize_module(block, mesh, plan_in_use)

    if model.tok_embeddings is not None:
        _shard_embedding(model.tok_embeddings, mesh)

    if model.norm is not None:
        parallelize_module(model.norm, mesh, SequenceParallel())

    if model.output is not None:
        # Shard only the weight, because the loss reads it and communicates by itself.
        vocab_shard = distribute_tensor(model.output.weight, mesh, [Shard(0)])
        model.output.weight = nn.Parameter(vocab_shard)


def _shard_embedding(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Shard an embedding along the vocabulary, and its output along the sequence, in place.

    Each rank looks up the tokens in its part of the vocabulary, and a reduce-scatter sums up the
    results.
    """
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(embedding, mesh, style)
    # A compiled block cannot read the result of a collective that is still in progress.
    embedding.register_forward_hook(lambda _module, _args, output: _WaitForCollective.apply(output))


def block_plan(arch: Architecture) -> list[dict[str, ParallelStyle]]:
    """Return the tensor parallel plans of a transformer block, in the order to apply them.

    The first matmuls of attention and feed-forward are split by columns, and their last matmuls by
    rows. Between blocks, each rank holds its part of the sequence as a plain tensor, shape
    (B, T / degree, C).

    Returns:
        Plans for `parallelize_module`, which map names of submodules, such as "attention.wq", to
        parallel styles.
    """
    # A norm before a sublayer returns a DTensor, which the sublayer all-gathers. A norm after it
    # returns this rank's part, which is added to the residual stream.
    norm_style = SequenceParallel(use_local_output=arch.norm_placement == "after")
    plan: dict[str, ParallelStyle] = {
        "attention_norm": norm_style,
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None, None, None),
            desired_input_layouts=(Replicate(), None, None, None, None),
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": norm_style,
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }

    if arch.qk_norm == "head":
        # Each rank holds whole heads, so it can normalize them by itself.
        plan["attention.q_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["attention.k_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if arch.qk_norm != "projection":
        return [plan]

    # A norm over all heads needs whole tokens. An all-to-all before the norm switches from sharding
    # along the heads (dim 2) to the sequence (dim 1), and one after the norm switches back.
    plan["attention.wq"] = ColwiseParallel(use_local_output=False)
    plan["attention.wk"] = ColwiseParallel(use_local_output=False)
    plan["attention.q_norm"] = SequenceParallel()
    plan["attention.k_norm"] = SequenceParallel()
    to_heads = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Shard(2))
    plan_after_norms: dict[str, ParallelStyle] = {
        "attention.q_norm": to_heads,
        "attention.k_norm": to_heads,
    }
    return [plan, plan_after_norms]


class _WaitForCollective(torch.autograd.Function):
    """Wait for a tensor parallel collective and return its result as a plain tensor.

    Apply this to the output of the sharded embedding, an AsyncCollectiveTensor. Otherwise, if torch
    2.13 compiles the next block, it traces an inner tensor that requires no gradient, and the
    embedding gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return collectives.wait_tensor(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0]


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let the compiler overlap matmuls with tensor parallel communication.

    The overlap uses symmetric memory, which requires GPUs.

    Args:
        mesh: 1-D mesh of the tensor parallel ranks.

    Raises:
        UserError: If the ranks do not run on GPUs.
    """
    if mesh.device_type != "cuda":
        raise UserError(
            "parallelism.enable_async_tensor_parallel = true requires GPUs. Set it to false."
        )
    import torch._inductor.config as inductor_config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor_config._micro_pipeline_tp = True  # torch has no public option for this
    enable_symm_mem_for_group(mesh.get_group().group_name)
