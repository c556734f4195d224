"""A step of the trainer on fake tensors, in a world of ranks that does not exist.

Invariant: what runs is the trainer's own code, from `build_mesh` to the optimizer. Blocks are alike, so a few of them
are run, and the counts are extended: the result is that of all blocks, to the byte.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.config.run import Run
from titanlite.data.batch import Microbatch
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import ShardedModel, build_model
from titanlite.plan.counter import Counter, Place
from titanlite.plan.counts import KINDS, RankTrace, Traffic, Work
from titanlite.plan.places import follow
from titanlite.plan.timeline import Timeline, extended, timeline
from titanlite.train.update import Update

DEVICE = torch.device("cpu")  # of the fake tensors: any other needs a build of torch for it


def trace_run(run: Run) -> tuple[RankTrace, ...]:
    """The counts of one optimizer step, for each kind of rank.

    Call it in a process that has no world of ranks. It leaves none behind.

    Args:
        run: The job and the number of ranks. Neither data nor the ranks' devices are needed.
    """
    short, long = _fewer_blocks(run)
    rank = 0
    groups: dict[str, tuple[str, int, int]] = {}
    line = _trace(short, rank, run.microbatches, groups)
    if short.arch.n_layers < run.arch.n_layers:
        longer = _trace(long, rank, run.microbatches, {})
        unit, front = long.arch.n_layers - short.arch.n_layers, short.arch.n_layers // 2
        steps = (run.arch.n_layers - short.arch.n_layers) // unit
        line = extended(line, longer, steps, lambda place: _moved(place, front, unit))
        place, kinds = line.peak()
        place = _moved(place, front, run.arch.n_layers - short.arch.n_layers)
    else:
        place, kinds = line.peak()
    return (_result(rank, (0,), place, kinds, line, groups),)


def _moved(place: Place, front: int, by: int) -> Place:
    """The same place in a model with `by` blocks more, which were inserted before block `front`."""
    phase, name, stage, block, microbatch = place
    return Place(phase, name, stage, block + by, microbatch) if block >= front else place


def _fewer_blocks(run: Run) -> tuple[Run, Run]:
    """The same job with few blocks, and with a few more: the fewest for which an extension is exact.

    Both are `run` itself if it has few blocks, or if the blocks are so small that FSDP puts several into a group.
    """
    job, layers = run.job, run.arch.n_layers
    recompute = job.activation_checkpoint
    numbered = recompute.mode == "selective" and recompute.selective_ac_option != "op"
    unit = int(recompute.selective_ac_option) if numbered else 1
    ahead = max(job.parallelism.fsdp_forward_prefetch, job.parallelism.fsdp_backward_prefetch)
    least = 2 * -(-(2 + ahead) // unit) * unit  # in each half, so many that the middle ones do not feel the ends
    few = least + layers % unit
    if few + 2 * unit > layers:
        return run, run
    return _with_blocks(run, few), _with_blocks(run, few + unit)


def _with_blocks(run: Run, blocks: int) -> Run:
    model = run.job.model.model_copy(update={"n_layers": blocks})
    return Run(run.job.model_copy(update={"model": model}), run.world_size)


def _trace(run: Run, rank: int, microbatches: int, groups: dict[str, tuple[str, int, int]]) -> Timeline:
    """A step of a rank on fake tensors. Its process groups are added to `groups`."""
    with _fake_world(run.world_size, rank):
        mesh = build_mesh(run.degrees, DEVICE.type)
        groups.update(_groups(mesh))
        sharded = build_model(run, mesh, torch.device("meta"), lambda _: None)
        fake = FakeTensorMode()
        _allocate(sharded, fake)
        update = Update(run, mesh, sharded, DEVICE)
        with fake:
            return count_step(run, sharded, update, microbatches)


def count_step(run: Run, sharded: ShardedModel, update: Update, microbatches: int) -> Timeline:
    """Do two steps over empty rows, and count the second. The first one allocates the optimizer's state.

    Of many microbatches three are run: the first, the last, and one that stands for those between.
    """
    counter, done = Counter(), min(3, microbatches)
    with counter.watching(), _no_garbage_collection():
        rows = _rows(run, microbatches)
        follow(counter, sharded, update)
        counter.mark(update.model.parameters(), "weights")
        for _ in range(2):
            counter.begin()
            update(rows[: done - 1] + rows[-1:], 1, run.job.optimizer.lr)
            for state in update.optimizer.state.values():
                counter.mark(state.values(), "optimizer state")
    return timeline(counter, lambda place: microbatches - 2 if place.microbatch == 1 < done - 1 else 1)


@contextmanager
def _fake_world(world_size: int, rank: int) -> Iterator[None]:
    """A process group whose collectives return at once. It is destroyed at the end."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """As in training: cycles are not collected within a step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _allocate(sharded: ShardedModel, fake: FakeTensorMode) -> None:
    """Replace the parameters, which are on the meta device, by fake ones on the device."""
    with torch.no_grad():
        for module in sharded.whole.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(_faked(parameter.detach(), fake)))


def _faked(value: Any, fake: FakeTensorMode) -> Any:
    """A fake tensor like `value`; what a tensor subclass wraps is replaced."""
    if not isinstance(value, Tensor):
        return value  # the mesh of a DTensor
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        inner = {name: _faked(getattr(value, name), fake) for name in names}
        return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
    with fake:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)


def _rows(run: Run, microbatches: int) -> list[Microbatch]:
    """The rows of one step of a rank, as the loader delivers them."""
    training = run.job.training
    shape = training.local_batch_size, training.seq_len

    def rows(dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    masked = run.job.dataset.document_mask
    return [
        Microbatch(
            rows(torch.int64),
            rows(torch.int64),
            rows(torch.int32) if masked else None,
            rows(torch.int64) if masked else None,
        )
        for _ in range(microbatches)
    ]


def _groups(mesh: Mesh) -> dict[str, tuple[str, int, int]]:
    """Name of a process group -> the dimension that it runs along, its number of ranks, and their span."""
    named: dict[str, dist.ProcessGroup] = {"world": mesh.world_group, "loss": mesh.loss_group, "data": mesh.data_group}
    dims = {"pipeline": mesh.pipeline, "context": mesh.context, "tensor": mesh.tensor}
    named |= {name: dim.get_group() for name, dim in dims.items() if dim is not None}
    names = ("replicate", "fsdp") if mesh.fsdp.ndim == 2 else ("fsdp",)
    named |= {name: mesh.fsdp.get_group(dim) for dim, name in enumerate(names)}
    found = {}
    for name, group in named.items():
        ranks = dist.get_process_group_ranks(group)
        found[group.group_name] = name, len(ranks), max(ranks) - min(ranks) + 1
    return found


def _result(
    rank: int,
    stages: tuple[int, ...],
    place: Place,
    kinds: Any,
    line: Timeline,
    groups: dict[str, tuple[str, int, int]],
) -> RankTrace:
    moment = {"block": f"{place.phase} of block {place.block}"}.get(place.name, place.name)
    work = tuple(Work(*key, *map(int, amounts)) for key, amounts in line.work.items())
    traffic = tuple(
        Traffic(phase, op, *groups[group], *map(int, amounts)) for (phase, op, group), amounts in line.traffic.items()
    )
    of_kind = dict(zip(KINDS, map(int, kinds), strict=True))
    return RankTrace(rank, stages, sum(of_kind.values()), moment, of_kind, 0, work, traffic)
