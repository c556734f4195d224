"""Gradient norm and gradient clipping for a sharded model.

Invariant: The norm covers the full gradient of the whole model, and differs from a float64
computation by less than 1e-6 for any model size and layout. The norm and the loss are identical on
every rank. They are computed without a host sync, except with CPU offload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.model.attention import compile_once

# A CPU accumulates an fp32 sum serially (in 8 or 16 lanes), so its error grows with the number of
# elements: 7e-5 for 4 million. Sums of 256 squares have an error of at most 6e-7.
CPU_SUM_LENGTH = 256


class StepSums(NamedTuple):
    """Gradient norm, loss and requests of one optimizer step, as tensors on the gradients' device.

    All but `squares` are summed over all ranks.

    Attributes:
        grad_norm: Gradient norm before clipping, fp32 scalar. Inf or NaN if any gradient element
            is.
        loss: Loss of the global batch, float64 scalar.
        num_requests: Number of ranks that request a joint action, such as a save, float64 scalar.
        squares: Sum of squares of this rank's shard of each gradient, float64, shape (number of
            gradients,).
    """

    grad_norm: Tensor
    loss: Tensor
    num_requests: Tensor
    squares: Tensor


def reduce_step_sums(
    gradients: Sequence[Tensor], loss: Tensor, has_request: bool = False, compiled: bool = False
) -> StepSums:
    """Compute the gradient norm, the loss and the number of requests in a single all-reduce.

    Args:
        gradients: Gradients of this rank, at least one.
        loss: This rank's part of the loss, a scalar. The parts of all ranks must add up to the
            loss. If n ranks compute the same part, each passes 1 / n of it.
        has_request: Whether this rank has a request for the other ranks; see `RequestExchange`.
        compiled: Whether to compile the sum of squares on a CPU.
    """
    # Sum the squares of each gradient on this rank.
    shards = [local_shard(gradient) for gradient in gradients]
    squares = sum_of_squares(shards, compiled)  # (number of gradients,)

    # Collect three numbers of this rank in one tensor, so that a single all-reduce adds them up.
    sums = torch.zeros(3, dtype=torch.float64, device=squares.device)
    squared_norm, total_loss, num_requests = sums[0], sums[1], sums[2]  # views
    squared_norm.copy_(_sum_squares_counting_replicas_once(squares, gradients))
    total_loss.copy_(_copy_loss_to_device(loss, like=sums))
    if has_request:
        num_requests.fill_(1.0)  # `sums[2] = 1.0` would cause a host sync

    # Add up the numbers of all ranks, which also updates the views.
    if dist.is_initialized():
        dist.all_reduce(sums)
    return StepSums(squared_norm.sqrt().float(), total_loss, num_requests, squares)


def _sum_squares_counting_replicas_once(squares: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return this rank's part of the squared gradient norm, a float64 scalar.

    The parts of all ranks add up to the squared norm. If n ranks hold the same shard, each of them
    contributes 1 / n of its squares.

    Args:
        squares: Sum of squares of the shard of each gradient, shape (number of gradients,).
        gradients: Gradients of this rank, whose layouts determine how many ranks hold each shard.
    """
    # Group the squares, because dividing each one would take a kernel launch per gradient.
    squares_by_replicas: dict[int, list[Tensor]] = {}
    for gradient, square in zip(gradients, squares, strict=True):
        num_replicas = count_replicas(gradient)
        squares_by_replicas.setdefault(num_replicas, []).append(square)

    total = torch.zeros((), dtype=torch.float64, device=squares.device)
    for num_replicas, replicated_squares in sorted(squares_by_replicas.items()):
        total += torch.stack(replicated_squares).sum() / num_replicas
    return total


def scale_gradients_(
    gradients: Sequence[Tensor], max_norm: float, grad_norm: Tensor, compiled: bool
) -> None:
    """Scale the gradients in place so that their total norm is at most `max_norm`.

    The scaling factor is computed on the device, so there is no host sync.

    Args:
        gradients: Gradients of this rank.
        max_norm: Largest total norm.
        grad_norm: Total norm of the gradients of all ranks, a scalar tensor.
        compiled: Whether to compile the scaling.
    """
    shards = [local_shard(gradient) for gradient in gradients]
    scale = compile_once(_scale_to_norm_) if compiled else _scale_to_norm_
    scale(shards, max_norm, grad_norm)


def sum_of_squares(shards: list[Tensor], compiled: bool = False) -> Tensor:
    """Return the sum of squares of each gradient shard in float64, shape (number of shards,).

    Args:
        shards: Gradient shards on one device, as plain tensors.
        compiled: Whether to compile the sum on a CPU. On a GPU, a single eager kernel computes all
            norms.
    """
    if not shards[0].is_cuda:
        sum_on_cpu = compile_once(_sum_of_squares_on_cpu) if compiled else _sum_of_squares_on_cpu
        return sum_on_cpu(shards)

    # fp32 is precise enough, because each GPU thread adds only a few dozen elements.
    norms = torch._foreach_norm(shards, 2, dtype=torch.float32)  # pyright: ignore
    return torch.stack(norms).double().square()


def _sum_of_squares_on_cpu(shards: list[Tensor]) -> Tensor:
    """Return the sum of squares of each shard, float64, shape (number of shards,).

    A long fp32 sum is inaccurate on a CPU, so sum rows of 256 elements in fp32, and add up the row
    sums in float64. Convert the row sums of all shards together, which saves operator calls.
    """
    matrices: list[Tensor] = []
    rows_per_shard: list[int] = []
    for shard in shards:
        full_rows, last_row = _cut_into_rows(shard)
        matrices += [full_rows, last_row]
        rows_per_shard.append(len(full_rows) + 1)
    norms = [torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32) for matrix in matrices]
    squares = torch.cat(norms).double().square()
    return torch.stack([shard_squares.sum() for shard_squares in squares.split(rows_per_shard)])


def _cut_into_rows(shard: Tensor) -> tuple[Tensor, Tensor]:
    """Split a shard into a matrix with rows of `CPU_SUM_LENGTH` elements, and a shorter last row.

    For example, 600 elements become 2 full rows and a row with the remaining 88.
    """
    flat = shard.flatten()
    num_full_rows = len(flat) // CPU_SUM_LENGTH
    remainder_start = num_full_rows * CPU_SUM_LENGTH
    full_rows = flat[:remainder_start].view(-1, CPU_SUM_LENGTH)
    return full_rows, flat[remainder_start:].view(1, -1)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard as a plain tensor, without DTensor or FP8 all-gather wrappers.

    The result shares the memory of `tensor`.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if is_fp8_wrapper(tensor):
        wrapper: Any = tensor
        names, _ = wrapper.__tensor_flatten__()
        weight_name = names[0]  # a second name belongs to the scale
        return getattr(wrapper, weight_name)
    return tensor


def is_fp8_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is a torchao wrapper around a weight that is all-gathered in FP8.

    A DTensor would also match, so pass its local shard instead.
    """
    return hasattr(tensor, "__tensor_flatten__")  # all wrapper classes define it


def count_replicas(tensor: Tensor) -> int:
    """Count the ranks that hold the same elements of a gradient.

    A plain tensor counts as replicated on all ranks.
    """
    if not isinstance(tensor, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1

    assert not any(placement.is_partial() for placement in tensor.placements)
    num_replicas = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            num_replicas *= size
    return num_replicas


def _copy_loss_to_device(loss: Tensor, like: Tensor) -> Tensor:
    """Return the loss on the device of `like`, a tensor on the device of the gradients.

    Only CPU offload needs a copy, from the GPU to the CPU, and a host sync.
    """
    is_offloaded = loss.is_cuda and not like.is_cuda
    if not is_offloaded:
        return loss
    # The gradients have already arrived on the CPU, so the loss is complete and this wait is short.
    copied = loss.to(like.device, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    arrived.synchronize()
    return copied


def _scale_to_norm_(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place to a norm of at most `max_norm`, without a host sync.

    In eager mode, `torch.nn.utils.clip_grads_with_norm_` scales all gradients with one operator. It
    takes parameters, but reads only their `grad`. In a compiled graph, plain operators apply the
    same factor, because the compiler can fuse them.

    Args:
        gradients: Gradients as plain tensors.
        max_norm: Largest norm after scaling.
        norm: Norm of the gradients of all ranks before scaling, a scalar.
    """
    if torch.compiler.is_compiling():
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as `clip_grads_with_norm_` computes it
        for gradient in gradients:
            gradient.mul_(factor)
    else:
        parameters = [_create_parameter_with_grad(gradient) for gradient in gradients]
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)


def _create_parameter_with_grad(gradient: Tensor) -> Tensor:
    """Return a dummy parameter with the given `grad`, for `clip_grads_with_norm_`.

    The value of the parameter is not used, so it shares the memory of the gradient.
    """
    parameter = gradient.detach()
    parameter.grad = gradient
    return parameter
