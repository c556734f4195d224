"""Gradient norm and clipping over a sharded model.

Invariant: the norm is that of the full gradient of the whole model, the same on every rank, and stays on the device.
May import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def clip_grad_norm_(parameters: Iterable[torch.nn.Parameter], max_norm: float, compiled: bool = False) -> Tensor:
    """Scale all gradients in place so that their total L2 norm is at most `max_norm` (0: leave them alone).

    One all-reduce over the world serves every layout: each rank adds the squares of the shards that it holds, divided
    by the number of ranks that hold the same shard. Pipeline stages need nothing else.

    Returns: the norm before clipping, a scalar fp32 tensor on the gradients' device.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    sum_of_squares, scale = _compiled() if compiled else (_sum_of_squares, _scale)
    squares = sum_of_squares(shards, [math.sqrt(_copies(gradient)) for gradient in gradients])
    if dist.is_initialized():
        dist.all_reduce(squares)
    norm = squares.sqrt()
    if max_norm > 0:
        scale(shards, norm, max_norm)
    return norm


def _sum_of_squares(shards: list[Tensor], divisors: list[float]) -> Tensor:
    norms = torch._foreach_norm(shards, 2, dtype=torch.float32)  # pyright: ignore
    return torch.stack(torch._foreach_div(norms, divisors)).square().sum()  # pyright: ignore


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
