"""Gradient norm and clipping over a sharded model.

Invariant: the norm is that of the full gradient of the whole model. It differs from that in float64 by less than 1e-6,
for any size and layout. It and the loss are the same on every rank and stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.optim.loss import compiled_once

# Number of elements whose squares a CPU sums in fp32. It adds one after the other (in 8 or 16 lanes), so the error
# grows with the number: 7e-5 for 4 million elements. For this number the error is at most 6e-7.
ROW = 256


class StepSums(NamedTuple):
    """What the ranks know after the all-reduce of a step, on the device of the gradients.

    Attributes:
        grad_norm: Scalar fp32: the norm before clipping. It is inf or NaN if an element is.
        loss: Scalar float64: the sum of the ranks' shares.
        squares: float64, one for each gradient: that of this rank's shard, in the order of the parameters.
    """

    grad_norm: Tensor
    loss: Tensor
    squares: Tensor


def clip_grad_norm_(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, compiled: bool = False, loss: Tensor | None = None
) -> StepSums:
    """Scale all gradients in place so that their total L2 norm is at most `max_norm`. 0: no scaling.

    One all-reduce over the world is enough for every layout, pipelines included. Each rank adds the squares of its
    shards, divided by the number of ranks that have the same shard.

    Args:
        loss: This rank's share of the loss, of which the shares of all ranks are the parts.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    # On a GPU a compiler makes a kernel for each number that it adds to the others.
    add_up = compiled_once(sum_of_squares) if compiled and not shards[0].is_cuda else sum_of_squares
    scale = compiled_once(_scale) if compiled else _scale
    squares = add_up(shards)
    total = torch.zeros(2, dtype=torch.float64, device=squares.device)
    copies = [number_of_copies(gradient) for gradient in gradients]
    for number in sorted(set(copies)):
        own = [square for square, its in zip(squares.unbind(), copies, strict=True) if its == number]
        total[0] += torch.stack(own).sum() / number
    if loss is not None:
        if loss.is_cuda and not total.is_cuda:  # offloaded gradients were waited for, so the loss is there, too
            loss, arrived = loss.to(total.device, non_blocking=True), torch.cuda.Event()
            arrived.record()
            arrived.synchronize()
        total[1] = loss
    if dist.is_initialized():
        dist.all_reduce(total)
    norm = total[0].sqrt().float()
    if max_norm > 0:
        scale(shards, norm, max_norm)
    return StepSums(norm, total[1], squares)


def sum_of_squares(shards: list[Tensor]) -> Tensor:
    """The sum of squares of each shard, in float64."""
    if shards[0].is_cuda:  # a GPU sums as a tree of threads, each of which adds a few dozen elements
        return torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float32)).double().square()  # pyright: ignore
    # Norms in fp32 of parts that are large enough that summing them in float64 costs nothing; of all shards at once,
    # because each operator costs a small model as much as its work.
    parts, sizes = list[Tensor](), list[int]()
    for flat in (shard.flatten() for shard in shards):
        whole_rows = len(flat) // ROW * ROW
        parts += [flat[:whole_rows].view(-1, ROW), flat[whole_rows:].view(1, -1)]
        sizes.append(whole_rows // ROW + 1)
    norms = torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts])
    return torch.stack([squares.sum() for squares in norms.double().square().split(sizes)])


def _scale(shards: list[Tensor], norm: Tensor, max_norm: float) -> None:
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore


def number_of_copies(gradient: Tensor) -> int:
    """The number of ranks that have the same elements of this gradient. Without a mesh, all ranks have them."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    assert not any(placement.is_partial() for placement in gradient.placements)
    dims = enumerate(gradient.placements)
    return math.prod(gradient.device_mesh.size(dim) for dim, placement in dims if placement.is_replicate())
