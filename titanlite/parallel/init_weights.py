"""Initial weights of a sharded model.

Invariant 1: each rank draws the full tensor from the generator of (seed, name) and keeps its shard, so the weights
are bitwise the same on any mesh. May import torch and model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.model.llama import Llama


def keep_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of `full`, which every rank holds, into `parameter`; no communication.

    The last mesh dimension cuts first: tensor parallelism comes before FSDP, which shards what that left. (DTensor
    writes it as `_StridedShard` where both cut the same dimension, and its own random numbers would differ.)
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    shard = full.to(parameter.dtype)  # rounded to the parameter's dtype before it is cut, as the whole tensor would be
    mesh = parameter.device_mesh
    for dim in reversed(range(mesh.ndim)):
        placement = parameter.placements[dim]
        if not placement.is_replicate():
            cut: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
            length = shard.shape[cut]
            chunk = -(-length // mesh.size(dim))  # as torch.chunk: the last ranks may hold less, or nothing
            start = min(length, chunk * mesh.get_local_rank(dim))
            shard = shard.narrow(cut, start, min(chunk, length - start))
    local = DTensor.from_local(
        shard.contiguous(), mesh, parameter.placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    parameter.copy_(local)


def materialize(model: Llama, device: torch.device, seed: int, offload: bool) -> None:
    """Allocate a meta-device model's shards on `device`, or offloaded to the CPU, and draw its initial weights on
    `device`: they are the same either way."""
    model.to_empty(device="cpu" if offload else device)
    model.init_weights(seed, keep_shard, device)
