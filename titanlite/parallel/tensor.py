"""Tensor parallelism: the ranks of a group share every matmul (https://arxiv.org/abs/1909.08053). Between matmuls the
residual stream is sharded along the sequence (https://arxiv.org/abs/2205.05198). The loss is sharded along the
vocabulary.

Invariant: the model computes the same as on one rank. No rank ever has all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
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
from titanlite.config.registry import resolved
from titanlite.model.llama import Llama
from titanlite.parallel.float8 import float8_plan


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, gather_float8: bool) -> None:
    """Shard the weights of `model` in place. Its loss must take DTensors: see `vocab_parallel`.

    Between matmuls a rank has (B, T / degree, C), so that the work of norms and residuals is shared, too, and
    activations take less memory. An all-gather and a reduce-scatter replace the all-reduce of plain tensor parallelism.
    """
    for block in model.layers.values():
        for plan in resolved(model.arch.tensor_parallel)(model.arch):
            parallelize_module(block, mesh, float8_plan(plan, block) if gather_float8 else plan)
    if model.tok_embeddings is not None:
        rows: Any = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(model.tok_embeddings, mesh, rows)
        model.tok_embeddings.register_forward_hook(lambda _module, _tokens, x: _Wait.apply(x))
    if model.norm is None:
        return
    parallelize_module(model.norm, mesh, SequenceParallel())
    if model.output is not None:  # a tied one is sharded with the embedding
        model.output.weight = nn.Parameter(distribute_tensor(model.output.weight, mesh, [Shard(0)]))


def block_plan(arch: Architecture) -> list[dict[str, ParallelStyle]]:
    """How each block is shared: module -> style, in plans that are applied one after the other.

    A block takes and gives a plain tensor (B, T / degree, C), the part of this rank.
    """
    attention_input = PrepareModuleInput(
        input_layouts=(Shard(1), None, None, None, None), desired_input_layouts=(Replicate(), None, None, None, None)
    )
    of_stream = SequenceParallel(use_local_output=arch.norm_placement == "after")
    plan: dict[str, ParallelStyle] = {
        "attention_norm": of_stream,
        "attention": attention_input,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": of_stream,
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    norms = ("attention.q_norm", "attention.k_norm") if arch.qk_norm != "none" else ()
    if arch.qk_norm == "head":  # each rank has whole heads
        plan |= dict.fromkeys(norms, SequenceParallel(sequence_dim=2, use_local_output=True))
    elif norms:  # a norm of all heads is computed for a part of the sequence, between two all-to-alls
        plan |= dict.fromkeys(("attention.wq", "attention.wk"), ColwiseParallel(use_local_output=False))
        plan |= dict.fromkeys(norms, SequenceParallel())
    to_heads = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Shard(2))
    return [plan, dict.fromkeys(norms, to_heads)] if arch.qk_norm == "projection" else [plan]


class _Wait(torch.autograd.Function):
    """The same tensor, after its collective has ended.

    The output of a parallel style is an AsyncCollectiveTensor. If it is the input of a compiled block, torch 2.13
    traces the tensor inside of it. That one does not require a gradient, so the embedding would get none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return collectives.wait_tensor(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0]


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let the compiler cut matmuls and their traffic into pieces that overlap, through symmetric memory.

    Raises:
        UserError: the ranks do not run on GPUs.
    """
    if mesh.device_type != "cuda":
        raise UserError("parallelism.enable_async_tensor_parallel = true: needs GPUs. Set it to false without one.")
    import torch._inductor.config as inductor_config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor_config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def vocab_parallel(loss: Callable[..., Tensor], mesh: DeviceMesh) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`loss` over a vocabulary that is sharded over the ranks of `mesh`. The shards may differ in size.

    Args:
        loss: `optim.loss.linear_cross_entropy_sum`, which takes the `first_class` of a rank and the `group`.
    """

    def local_loss(hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        assert isinstance(hidden, DTensor)
        assert isinstance(weight, DTensor)
        first_class = -(-weight.shape[0] // mesh.size()) * mesh.get_local_rank()  # as torch.chunk cuts
        # The gradient of the hidden states is the sum over all ranks' rows of the matrix.
        whole = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])  # (B, T, C)
        return loss(whole, weight.to_local(), labels, scale, first_class=first_class, group=mesh.get_group())

    return local_loss
