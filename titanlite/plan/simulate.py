"""Simulate a GPU and the other ranks, so that the trainer runs on fake CPU tensors.

This module replaces functions of torch and titanlite that need a GPU or other ranks. The module
`titanlite.plan.compiled` replaces the compiler.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import register_sharding
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.model import attention
from titanlite.parallel import activation_checkpoint, forward_backward, parallelize
from titanlite.parallel.activation_checkpoint import is_always_saved
from titanlite.parallel.fsdp import needs_fsdp
from titanlite.plan.override import override

# In a trace, flash attention replaces flex attention, because both need the same memory and work.
FLEX_REPLACEMENT = torch.ops.aten._scaled_dot_product_flash_attention.default


class FusedRMSNorm(torch.autograd.Function):
    """Imitation of the fused RMSNorm kernels of a GPU on fake CPU tensors, to plan GPU memory.

    It allocates and accesses as much memory as the kernels, but does not compute the norm. The
    usual RMSNorm of a CPU would run many operators on fp32 tensors instead.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Imitate the memory use of the GPU kernel, without computing the norm.

        Save the same tensors as the kernel, and return a tensor with the shape of `x`.
        """
        reciprocal_rms = x[..., 0].float()
        ctx.save_for_backward(x, weight, reciprocal_rms)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return placeholders for the gradients of `x` and `weight`. Only their shapes matter."""
        x, weight, _ = ctx.saved_tensors
        grad_x = grad + x
        batch_dims = tuple(range(x.ndim - 1))
        return grad_x, grad_x.sum(batch_dims, dtype=weight.dtype)


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Call the cuDNN operator of scaled dot-product attention, which torch selects on Hopper."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: tuple[int], **_: Any) -> Tensor:
    """Run flash attention as a replacement for flex attention, with the same memory and work.

    Flash attention has no argument for a sliding window, so this function passes the window as
    `scale`, where the FLOP counter reads it. The values of the result do not matter in a trace.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        block_mask: Result of `_replace_mask_by_window`: the sliding window in tokens.
    """
    (window,) = block_mask
    return FLEX_REPLACEMENT(q, k, v, 0.0, True, scale=window)[0]


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Run a replacement for `F.rms_norm` that accesses as much memory as the GPU kernel.

    On a CPU, `F.rms_norm` would run many operators, each with its own memory traffic.
    """
    if torch.compiler.is_compiling() or weight is None:  # the compiler decomposes the operator
        return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]
    return FusedRMSNorm.apply(x, weight)


def _replace_mask_by_window(*args: Any) -> tuple[int]:
    """Return a tuple with the sliding window, in place of a block mask for flex attention.

    The memory of a block mask is negligible, so a trace does not need a real one.

    Args:
        args: Arguments of `flex_mask`. The last one is the sliding window in tokens.
    """
    return (args[-1],)


def _allocate_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the results of the torchao kernel that quantizes blocks of 32 values in a row.

    Args:
        x: Tensor of shape (M, K).

    Returns:
        Values (M, K) and scales (M, K / 32).
    """
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(x.shape[0], x.shape[1] // 32, dtype=torch.float8_e8m0fnu)
    return values, scales


def _allocate_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the results of the torchao kernel that quantizes blocks of 32 values in a column.

    Args:
        x: Tensor of shape (M, K).

    Returns:
        Values (M, K) in column-major order, and scales (K, M / 32).
    """
    values = x.new_empty(x.shape[1], x.shape[0], dtype=torch.float8_e4m3fn).t()
    scales = x.new_empty(x.shape[1], x.shape[0] // 32, dtype=torch.float8_e8m0fnu)
    return values, scales


# A trace counts each of these operators as one kernel. Because tensors are fake in a trace, the
# implementation of an operator is also its fake implementation.
_cast_rows = torch.library.custom_op(
    "titanlite::cast_rows_to_mxfp8", _allocate_rows, mutates_args=()
)
_cast_rows.register_fake(_allocate_rows)
_cast_columns = torch.library.custom_op(
    "titanlite::cast_columns_to_mxfp8", _allocate_columns, mutates_args=()
)
_cast_columns.register_fake(_allocate_columns)


Sharding = tuple[list[Placement], list[Placement]]


@register_sharding(torch.ops.titanlite.cast_rows_to_mxfp8.default)
def _shard_row_cast(_x: Any) -> list[Sharding]:
    """List the shardings that DTensor can use for the operator `cast_rows_to_mxfp8`, as in torchao.

    The input can be replicated, or sharded along either dimension. Both outputs have the same
    sharding as the input.

    Returns:
        For each sharding, the placements of the outputs [values, scales] and of [input].
    """
    placements = (Replicate(), Shard(0), Shard(1))
    return [([placement, placement], [placement]) for placement in placements]


@register_sharding(torch.ops.titanlite.cast_columns_to_mxfp8.default)
def _shard_column_cast(_x: Any) -> list[Sharding]:
    """List the shardings that DTensor can use for the operator `cast_columns_to_mxfp8`.

    The input can be replicated, or sharded along either dimension. The scales are transposed, so
    they are sharded along the other dimension.

    Returns:
        For each sharding, the placements of the outputs [values, scales] and of [input].
    """
    return [
        ([Replicate(), Replicate()], [Replicate()]),
        ([Shard(0), Shard(1)], [Shard(0)]),
        ([Shard(1), Shard(0)], [Shard(1)]),
    ]


@contextmanager
def simulate_mxfp8() -> Iterator[None]:
    """Replace the torchao kernels that quantize to MXFP8, so that a trace needs no Blackwell GPU.

    In MXFP8, each block of 32 values has a common scale. torchao has one kernel for blocks within a
    row and one for blocks within a column. The replacements allocate the results of the kernels but
    compute nothing.
    """
    from torchao.prototype.mx_formats import kernels, mx_tensor

    # Replace each kernel in the module in which torchao looks it up.
    with (
        override(mx_tensor, triton_to_mxfp8_dim0=_quantize_rows),
        override(kernels, mxfp8_quantize_cuda=_quantize_columns),
    ):
        yield


def _quantize_rows(x: Tensor, **_options: Any) -> tuple[Tensor, Tensor]:
    """Replace `triton_to_mxfp8_dim0`, which quantizes blocks of 32 values within each row.

    Returns:
        Values and scales.
    """
    return _cast_rows(x)


def _quantize_columns(x: Tensor, **_options: Any) -> tuple[None, Tensor, None, Tensor]:
    """Replace `mxfp8_quantize_cuda`, which quantizes blocks of 32 values within each column.

    Returns:
        (row_values, column_values, row_scales, column_scales). The original can also quantize rows,
        but torchao does not request it, so the items for rows are None.
    """
    column_values, column_scales = _cast_columns(x)
    return None, column_values, None, column_scales


@contextmanager
def simulate_gpu() -> Iterator[None]:
    """Let CPU tensors take the code path of GPU tensors within this context, to plan GPU memory.

    RMSNorm and attention then call operators that need the same memory as the GPU kernels.
    """
    with (
        # Select the branches for a GPU.
        override(Tensor, is_cuda=property(lambda _: True)),
        override(parallelize, needs_fsdp=lambda model, _type, run: needs_fsdp(model, "cuda", run)),
        override(F, scaled_dot_product_attention=_cudnn_attention, rms_norm=_rms_norm),
        _replace_flex_attention(),
    ):
        yield


@contextmanager
def _replace_flex_attention() -> Iterator[None]:
    """Replace flex attention with flash attention within this context.

    Both need the same memory and work, but flash attention needs no block mask.
    """
    with (
        override(attention, flex_function=lambda _name: _flex_attention),
        override(forward_backward, flex_mask=_replace_mask_by_window),
        override(activation_checkpoint, is_always_saved=_is_always_saved_in_trace),
    ):
        yield


def _is_always_saved_in_trace(op: Any) -> bool:
    """Return whether selective activation checkpointing always saves the output of an operator.

    This replaces `is_always_saved` in a trace. There, calls of `FLEX_REPLACEMENT`, which is flash
    attention, represent flex attention, whose output is not always saved.
    """
    return op is not FLEX_REPLACEMENT and is_always_saved(op)


@contextmanager
def simulate_ranks(world_size: int, rank: int) -> Iterator[None]:
    """Make this process act as one rank of a distributed job within this context.

    Create a fake process group, in which collectives return immediately without other ranks. As in
    training, disable the Python garbage collector. On exit, destroy the group and enable the
    collector.
    """
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        dist.destroy_process_group()
        # The DTensor cache contains meshes with the names of their process groups. Meshes of the
        # next trace compare equal to them, so DTensor would look up process groups by names that no
        # longer exist.
        _clear_sharding_prop_cache()
