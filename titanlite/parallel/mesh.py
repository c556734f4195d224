"""The layout of ranks.

Invariant: everything that depends on the layout asks this object; there is no global parallel context.
May import torch and config.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config import schema


@dataclass(frozen=True)
class Mesh:
    """The dimensions of the world.

    Attributes:
        fsdp: 1-D (shard), or 2-D (replicate, shard) for HSDP: what `fully_shard` takes.
        data_rank: Which part of every global batch this rank reads, of `data_degree` parts.
        data_group: The ranks that read different data and sum their losses.
    """

    fsdp: DeviceMesh
    data_rank: int
    data_degree: int
    data_group: dist.ProcessGroup


def build_mesh(config: schema.Parallelism, device_type: str) -> Mesh:
    """Lay out the initialised world. The degrees were validated against its size before it started."""
    world_size, replicate = dist.get_world_size(), config.data_parallel_replicate_degree
    assert world_size % replicate == 0
    shard = world_size // replicate
    if replicate == 1:
        fsdp = init_device_mesh(device_type, (shard,), mesh_dim_names=("dp_shard",))
    else:
        fsdp = init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    assert dist.group.WORLD is not None
    return Mesh(fsdp, dist.get_rank(), world_size, dist.group.WORLD)
