"""The process groups of a layout: the mesh knows all of them, and a time-out reaches each."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import PrefixStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from titanlite.config.degrees import Degrees
from titanlite.parallel.mesh import build_mesh
from titanlite.runtime.hang_report import set_timeout

LAYOUTS = {
    "shard": {"shard": 4},
    "replicate and shard": {"replicate": 2, "shard": 2},
    "tensor and shard": {"shard": 2, "tensor": 2},
    "context and shard": {"shard": 2, "context": 2},
    "context": {"context": 4},
    "pipeline and shard": {"pipeline": 2, "shard": 2},
    "pipeline and tensor": {"pipeline": 2, "tensor": 2},
}
ONE = {"pipeline": 1, "replicate": 1, "shard": 1, "context": 1, "tensor": 1}


def groups_of_each_layout() -> dict[str, tuple[list[str], list[str]]]:
    """Layout -> names of the groups that the mesh lists, and of those that torch has, on this rank."""
    names, rank, store = {}, dist.get_rank(), distributed_c10d._get_default_store()
    for layout, degrees in LAYOUTS.items():
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=PrefixStore(layout, store), rank=rank, world_size=4)
        mesh = build_mesh(Degrees(**ONE | degrees), "cpu")
        names[layout] = tuple([group.group_name for group in groups] for groups in (mesh.groups, torchs_own()))
    return names


def torchs_own() -> list[dist.ProcessGroup]:
    return list(distributed_c10d._world.pg_map)


@pytest.mark.slow
def test_the_mesh_knows_every_process_group_that_was_made_for_it() -> None:
    for of_rank in run_ranks(4, groups_of_each_layout):
        for layout, (listed, existing) in of_rank.items():
            assert sorted(listed) == sorted(existing), layout


def waits_in_vain() -> list[str]:
    """Rank 0's errors where the other ranks join no collective of a group."""
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    mesh = build_mesh(Degrees(**ONE | {"replicate": 2, "shard": 2}), "cpu")
    set_timeout(mesh.groups, 1)
    errors = []
    if rank == 0:
        for group in mesh.groups:
            with pytest.raises(RuntimeError) as error:
                dist.all_reduce(torch.zeros(()), group=group)
            errors.append(str(error.value))
        store.set("done", "")
    else:
        store.wait(["done"], timedelta(seconds=100))
    # A group that has failed once stays so. The ranks leave by new ones.
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=PrefixStore("after", store), rank=rank, world_size=4)
    return errors


@pytest.mark.slow
def test_a_time_out_reaches_every_group_of_the_training() -> None:
    errors = run_ranks(4, waits_in_vain)[0]
    assert len(errors) > 2  # the world, and a group along each of two dimensions
    assert all("1000ms" in error for error in errors), errors
