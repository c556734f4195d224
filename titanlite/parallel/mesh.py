"""The layout of ranks.

Invariant: all code that depends on the layout uses this object. There is no global parallel context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.run import Degrees


@dataclass(frozen=True)
class Mesh:
    """The dimensions of the world.

    Ranks are numbered (pipeline, replicate, shard, context, tensor), so that tensor, the dimension with the most
    traffic, lies within a machine.

    Attributes:
        fsdp: The mesh for `fully_shard`: 1-D (shard), or 2-D (replicate, shard) for HSDP. Weights are sharded over the
            context ranks, too, because these have gradients of the same weights.
        tensor, context, pipeline: 1-D, or None if the degree is 1.
        data_rank: Which part of every global batch this rank reads, of `data_degree` parts.
        data_group: The ranks that read different data and have the same place in every other dimension.
        loss_group: The ranks whose shares of the loss must be summed: all with the same place in `tensor`.
        stage_group: The ranks that hold parts of the same weights: all with the same place in `pipeline`.
        groups: All process groups of the training that this rank is in, each once. Those of the checkpoints are not
            among them, because to write a large checkpoint may take longer than any collective of the training.
    """

    degrees: Degrees
    fsdp: DeviceMesh
    tensor: DeviceMesh | None
    context: DeviceMesh | None
    pipeline: DeviceMesh | None
    data_rank: int
    data_group: dist.ProcessGroup
    loss_group: dist.ProcessGroup
    stage_group: dist.ProcessGroup
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def world_group(self) -> dist.ProcessGroup:
        """All ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def data_degree(self) -> int:
        """Number of parts of a global batch; each is read by other ranks."""
        return self.degrees.data


def build_mesh(degree: Degrees, device_type: str) -> Mesh:
    """Lay out the initialised world. The product of the degrees must be its size."""
    assert degree.world == dist.get_world_size()
    # FSDP and tensor parallelism shard the same parameters, so their dimensions must belong to one mesh.
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    all_sizes = (degree.pipeline, degree.replicate, degree.shard * degree.context, degree.tensor)
    sizes = {name: size for name, size in zip(names, all_sizes, strict=True) if size > 1 or name == "dp_shard"}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    hybrid = ("dp_replicate", "dp_shard") if degree.replicate > 1 else ("dp_shard",)
    # (pipeline, replicate, shard, context, tensor)
    grid = torch.arange(degree.world).view(degree.pipeline, degree.replicate, degree.shard, degree.context, -1)
    data_group, loss_group = _group_along(grid, 1, 2), _group_along(grid, 0, 1, 2, 3)
    stage_group = _group_along(grid, 1, 2, 3, 4)
    groups = [dist.group.WORLD, *mesh.get_all_groups(), data_group, loss_group, stage_group]
    context = None
    if degree.context > 1:
        context = DeviceMesh.from_group(_group_along(grid, 3), device_type, mesh_dim_names=("cp",))
        groups += context.get_all_groups()
    _, replicate, shard, _, _ = (int(i) for i in (grid == dist.get_rank()).nonzero()[0])
    return Mesh(
        degree,
        fsdp=mesh[hybrid] if mesh.ndim > len(hybrid) else mesh,
        tensor=mesh["tp"] if degree.tensor > 1 else None,
        context=context,
        pipeline=mesh["pp"] if degree.pipeline > 1 else None,
        data_rank=replicate * degree.shard + shard,
        data_group=data_group,
        loss_group=loss_group,
        stage_group=stage_group,
        groups=tuple(group for group in dict.fromkeys(groups) if group is not None),
    )


def _group_along(grid: torch.Tensor, *dims: int) -> dist.ProcessGroup:
    """The group of the ranks that differ from this one only in these dimensions of `grid`."""
    others = [dim for dim in range(grid.ndim) if dim not in dims]
    members = grid.permute(*others, *dims).flatten(len(others)).flatten(0, -2)  # (groups, ranks of a group)
    group = dist.group.WORLD if len(members) == 1 else dist.new_subgroups_by_enumeration(members.tolist())[0]
    assert isinstance(group, dist.ProcessGroup)
    return group
