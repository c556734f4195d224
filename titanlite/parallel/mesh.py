"""The device mesh and the process groups of a parallel layout.

All code that depends on the layout receives a `Mesh`. There is no global parallel context.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.config.run import Degrees

# Dimensions of the grid of ranks, in the order of the fields of `Degrees`.
PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR = range(5)


@dataclass(frozen=True)
class Mesh:
    """The device meshes and process groups of a parallel layout, as seen by one rank.

    Ranks are numbered in the order (pipeline, replicate, shard, context, tensor), with tensor
    varying fastest. Tensor parallelism communicates most, so its ranks are neighbors within a node.

    Attributes:
        degrees: Number of ranks along each dimension.
        fsdp: Mesh for `fully_shard`: (shard,), or (replicate, shard) for HSDP. The shard dimension
            includes the context parallel ranks, which compute gradients of the same weights.
        tensor: 1-D mesh of the tensor parallel ranks, or None if the degree is 1.
        context: 1-D mesh of the context parallel ranks, or None if the degree is 1.
        pipeline: 1-D mesh of the pipeline ranks, or None if the degree is 1.
        data_rank: Index of the part of each global batch that this rank reads, from 0 to
            `degrees.data` - 1.
        data_group: Ranks that read different data and have the same coordinates in all other
            dimensions.
        loss_group: Ranks whose parts of the loss add up to the whole loss: all ranks with the same
            tensor coordinate.
        stage_group: Ranks that hold parts of the same weights: all ranks with the same pipeline
            coordinate.
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

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All process groups of this rank that training uses, without duplicates.

        Groups for checkpoints are not included, because saving may exceed the timeout of training.
        """
        groups = [get_world_group(), self.data_group, self.loss_group, self.stage_group]
        for mesh in (self.pipeline, self.fsdp, self.tensor, self.context):
            if mesh is not None:
                groups += mesh.get_all_groups()
        return list(dict.fromkeys(groups))


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """Create the device meshes and process groups of a parallel layout; see `Mesh`.

    Call this function once on every rank, after the default process group is initialized.

    Args:
        degrees: Number of ranks along each dimension. Their product must be the world size.
        device_type: "cuda" or "cpu".
    """
    assert degrees.world == dist.get_world_size()
    rank_grid = torch.arange(degrees.world).view(astuple(degrees))  # dimensions as in `Degrees`
    shard_mesh = _build_shard_mesh(degrees, device_type)
    # Ranks with different data
    data_group = _create_group(rank_grid, REPLICATE, SHARD)
    # Ranks with different parts of the loss. Tensor parallel ranks compute the same loss.
    loss_group = _create_group(rank_grid, PIPELINE, REPLICATE, SHARD, CONTEXT)
    # Ranks with the same pipeline stage
    stage_group = _create_group(rank_grid, REPLICATE, SHARD, CONTEXT, TENSOR)
    context_mesh = _build_context_mesh(rank_grid, device_type) if degrees.context > 1 else None

    # HSDP replicates parameters along one dimension and shards them along the other.
    fsdp_dims = ("dp_replicate", "dp_shard") if degrees.replicate > 1 else ("dp_shard",)
    return Mesh(
        degrees,
        fsdp=shard_mesh[fsdp_dims],
        tensor=shard_mesh["tp"] if degrees.tensor > 1 else None,
        context=context_mesh,
        pipeline=shard_mesh["pp"] if degrees.pipeline > 1 else None,
        data_rank=dist.get_rank(data_group),
        data_group=data_group,
        loss_group=loss_group,
        stage_group=stage_group,
    )


def _build_shard_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """Create the mesh with the dimensions "pp", "dp_replicate", "dp_shard" and "tp".

    FSDP and tensor parallelism shard the same parameters, so they need dimensions of one mesh.
    FSDP also shards over the context parallel ranks, so there is no context dimension. Dimensions
    of size 1 are left out, except "dp_shard".
    """
    sizes = {
        "pp": degrees.pipeline,
        "dp_replicate": degrees.replicate,
        "dp_shard": degrees.shard * degrees.context,
        "tp": degrees.tensor,
    }
    used = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))


def _build_context_mesh(rank_grid: torch.Tensor, device_type: str) -> DeviceMesh:
    """Create the 1-D mesh of the context parallel ranks.

    A separate mesh is needed, because the FSDP mesh has a single dimension for shard and context.
    """
    group = _create_group(rank_grid, CONTEXT)
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("cp",))


def _create_group(rank_grid: torch.Tensor, *dims: int) -> dist.ProcessGroup:
    """Create the process group of all ranks that differ from this rank only along `dims`.

    For example, the grid [[0, 1], [2, 3]] has the groups [[0, 2], [1, 3]] along dimension 0. All
    ranks must call this function together, with the same arguments.

    Args:
        rank_grid: Rank numbers, one dimension per parallel dimension.
        dims: Indices of the dimensions of `rank_grid` along which ranks of a group differ.
    """
    # Move `dims` to the end, so that each row of the reshaped grid holds the ranks of a group.
    fixed_dims = [dim for dim in range(rank_grid.ndim) if dim not in dims]
    group_size = math.prod(rank_grid.shape[dim] for dim in dims)
    ranks_by_group = rank_grid.permute(*fixed_dims, *dims).reshape(-1, group_size)
    if len(ranks_by_group) == 1:
        return get_world_group()  # torch has already created the group of all ranks

    group, _ = dist.new_subgroups_by_enumeration(ranks_by_group.tolist())
    assert isinstance(group, dist.ProcessGroup)
    return group


def get_world_group() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
