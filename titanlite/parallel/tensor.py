"""Tensor parallelism: every matmul shared by the ranks of a group (https://arxiv.org/abs/1909.08053), the residual
stream sharded along the sequence between them (https://arxiv.org/abs/2205.05198), the loss along the vocabulary.

Invariant: the model computes what it computes on one rank; no rank ever holds all logits. May import torch, model
and config.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.model.llama import Llama

IGNORE_INDEX = -100  # label of a position that has no loss, as in torch


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Shard the weights of `model` in place. Its logits become this rank's part of the vocabulary: (B, T, V_local).

    Between matmuls a rank holds (B, T / degree, C), so that norms and residuals are shared, too, and activations
    take less memory. The all-reduce of plain tensor parallelism becomes an all-gather and a reduce-scatter.
    """
    attention_input = PrepareModuleInput(
        input_layouts=(Shard(1), None, None, None, None), desired_input_layouts=(Replicate(), None, None, None, None)
    )
    block_plan = {
        "attention_norm": SequenceParallel(),
        "attention": attention_input,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    for block in model.layers.values():
        parallelize_module(block, mesh, block_plan)
    if model.tok_embeddings is not None:
        _apply(model.tok_embeddings, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)))
    if model.norm is None:
        return
    _apply(model.norm, mesh, SequenceParallel())
    if model.output is not None:
        _apply(model.output, mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)))
    else:  # the tied embedding is a DTensor without a style of its own: what it meets must be one, too
        gather = PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
        )
        _apply(model.norm, mesh, gather)
        _apply(model, mesh, PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Shard(-1)))


def _apply(module: nn.Module, mesh: DeviceMesh, style: Any) -> None:
    parallelize_module(module, mesh, style)


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let the compiler cut matmuls and their traffic into pieces that overlap, through symmetric memory (GPU)."""
    import torch._inductor.config as inductor_config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor_config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def vocab_parallel_cross_entropy_sum(logits: Tensor, labels: Tensor, mesh: DeviceMesh, vocab_size: int) -> Tensor:
    """Cross entropy, summed over the valid labels, in fp32, the same on all ranks of `mesh`.

    Args:
        logits: (B, T, V_local), this rank's part as `torch.chunk` cuts it: V need not divide by the degree.
        labels: (B, T), of the whole vocabulary.
    """
    start = min(vocab_size, -(-vocab_size // mesh.size()) * mesh.get_local_rank())
    return _VocabParallelCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), start, mesh.get_group())  # pyright: ignore[reportReturnType]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """log(sum(exp(logits))) - logit of the label; maximum, sum and label's logit are reduced over the group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
        x = logits.float()  # (N, V_local)
        peak = _reduced(x.amax(-1), "max", group)  # (N,)
        x = x - peak[:, None]
        index = labels - start
        mine = (index >= 0) & (index < x.shape[1])
        index = index.clamp(0, x.shape[1] - 1)
        target = torch.where(mine, x.gather(1, index[:, None]).squeeze(1), 0.0)
        softmax = x.exp_()
        total, target = _reduced(torch.stack((softmax.sum(-1), target)), "sum", group)
        softmax = softmax.div_(total[:, None])
        valid = labels != IGNORE_INDEX
        ctx.save_for_backward(softmax, index, mine, valid)
        ctx.dtype = logits.dtype
        return torch.where(valid, total.log() - target, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        softmax, index, mine, valid = ctx.saved_tensors
        grad = softmax.scatter_add(1, index[:, None], -mine.float()[:, None])
        grad = grad * (valid.float() * grads[0])[:, None]
        return grad.to(ctx.dtype), None, None, None


def _reduced(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x, operation, group))
