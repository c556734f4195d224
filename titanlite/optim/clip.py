"""Gradient norm and clipping over a sharded model.

Invariant: the norm is that of the full gradient of the whole model, within 1e-6 of float64 for any size and layout,
the same on every rank, and stays on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# Elements that a CPU squares and adds up in fp32. It adds one after the other (in 8 or 16 lanes), so that the error
# grows with their number: 7e-5 for 4 million. The sums of so few are right to 6e-7 whatever they are.
ROW = 256


def clip_grad_norm_(parameters: Iterable[torch.nn.Parameter], max_norm: float, compiled: bool = False) -> Tensor:
    """Scale all gradients in place so that their total L2 norm is at most `max_norm` (0: leave them alone).

    One all-reduce over the world serves every layout: each rank adds the squares of the shards that it holds, divided
    by the number of ranks that hold the same shard. Pipeline stages need nothing else.

    Returns: the norm before clipping, a scalar fp32 tensor on the gradients' device; inf or NaN if an element is.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    sum_of_squares, scale = _compiled() if compiled else (_sum_of_squares, _scale)
    squares = sum_of_squares(shards, [_copies(gradient) for gradient in gradients])
    if dist.is_initialized():
        dist.all_reduce(squares)
    norm = squares.sqrt().float()
    if max_norm > 0:
        scale(shards, norm, max_norm)
    return norm


def _sum_of_squares(shards: list[Tensor], copies: list[int]) -> Tensor:
    """float64, each shard's part divided by its number of copies."""
    total = torch.zeros((), dtype=torch.float64, device=shards[0].device)
    for number in sorted(set(copies)):
        norms = _norms([shard for shard, its in zip(shards, copies, strict=True) if its == number])
        total += norms.double().square().sum() / number
    return total


def _norms(shards: list[Tensor]) -> Tensor:
    """Norms in fp32 of parts that make up the shards: so many that the rest is done in float64 at no cost."""
    if shards[0].is_cuda:  # where a tree of threads adds up, a few dozen elements in each
        return torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float32))  # pyright: ignore
    parts = []
    for flat in (shard.flatten() for shard in shards):
        whole_rows = len(flat) // ROW * ROW
        parts += [flat[:whole_rows].view(-1, ROW), flat[whole_rows:].view(1, -1)]
    return torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts])


def _scale(shards: list[Tensor], norm: Tensor, max_norm: float) -> None:
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore


@cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., None]]:
    return torch.compile(_sum_of_squares), torch.compile(_scale)


def _copies(gradient: Tensor) -> int:
    """On how many ranks of the world each element of this gradient lies. Without a mesh: the same on all ranks."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    assert not any(placement.is_partial() for placement in gradient.placements)
    dims = enumerate(gradient.placements)
    return math.prod(gradient.device_mesh.size(dim) for dim, placement in dims if placement.is_replicate())
