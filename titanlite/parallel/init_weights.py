"""Memory for a sharded model, and its initial weights.

Invariant 1: each rank draws the full tensor from a generator seeded by (seed, name) and keeps its shard, so that the
weights are bitwise the same on any mesh.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.model.llama import Llama


def keep_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of `full`, which every rank has, into `parameter`. There is no communication.

    The last mesh dimension cuts first, because tensor parallelism is applied before FSDP. If both cut the same
    dimension, DTensor calls that a `_StridedShard`. DTensor's own random numbers would differ from these.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    shard = full.to(parameter.dtype)  # rounded before it is cut, as the whole tensor would be
    mesh = parameter.device_mesh
    for dim in reversed(range(mesh.ndim)):
        placement = parameter.placements[dim]
        if not placement.is_replicate():
            cut: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
            length = shard.shape[cut]
            chunk = -(-length // mesh.size(dim))  # as torch.chunk: the last ranks may have less, or nothing
            start = min(length, chunk * mesh.get_local_rank(dim))
            shard = shard.narrow(cut, start, min(chunk, length - start))
    local = DTensor.from_local(
        shard.contiguous(), mesh, parameter.placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    parameter.copy_(local)


def materialize(model: Llama, device: torch.device, seed: int, offload: bool) -> None:
    """Allocate the shards of a model on the meta device, and draw its initial weights.

    The weights are drawn on `device`. The shards lie there, too, or on the CPU with `offload`. The values are the same.
    If `device` is the meta device, the model stays as it is: without memory.
    """
    if device.type == "meta":
        return
    model.to_empty(device="cpu" if offload else device)
    model.init_weights(seed, keep_shard, device)
