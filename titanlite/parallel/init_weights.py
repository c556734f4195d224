"""Memory for a sharded model, and its initial weights.

Invariant 1: each rank draws the full tensor from a generator seeded by (seed, name) and keeps its shard, so that the
weights are bitwise the same on any mesh.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.model.llama import Llama

GIB = 2**30


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


def check_memory(run: Run, state_bytes: int, device: torch.device) -> None:
    """Compare `state_bytes`, a rank's weights, gradients and moments, with the memory of the device, or of this machine
    if the state is kept on the CPU.

    It is a lower bound, without activations and buffers, so a run that is refused would have failed.

    Raises:
        UserError: The state is larger.
    """
    if device.type == "cuda" and not run.job.training.enable_cpu_offload:
        ranks, where, memory = 1, "this GPU", torch.cuda.get_device_properties(device).total_memory
    else:
        ranks, where = int(os.environ["LOCAL_WORLD_SIZE"]), "this machine"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = state_bytes * ranks
    if needed > memory:
        raise UserError(
            f'model.flavor = "{run.job.model.flavor}": weights, gradients and optimizer state take {needed / GIB:.1f} '
            f"GiB on {where}, which has {memory / GIB:.1f} GiB. `titanlite plan` says what fits."
        )
