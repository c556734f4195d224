"""A step of the trainer on fake tensors, in a world of ranks that does not exist.

Invariant: what runs is the trainer's own code, from `build_mesh` to the optimizer. Blocks are alike, so a few of them
are run, and the counts are extended: the result is that of all blocks, to the byte.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.config.errors import UserError
from titanlite.config.pipeline_stages import V_SHAPED, stage_rank
from titanlite.config.run import Run
from titanlite.data.batch import Microbatch
from titanlite.observe.counter import Counter, Place
from titanlite.observe.flops import num_params
from titanlite.observe.kinds import HOST, KINDS
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import ShardedModel, build_model
from titanlite.plan.bounds import MOST_SHARDS, MOST_TOKENS
from titanlite.plan.counts import RankTrace, Traffic, Work
from titanlite.plan.microbatches import FEWEST, is_run, run_microbatches, times
from titanlite.plan.timeline import Timeline, extended, timeline
from titanlite.train.places import followed, mark_optimizer_state
from titanlite.train.step import TrainStep

DEVICE = torch.device("cpu")  # of the fake tensors: any other needs a build of torch for it


# As the built-in `map`: calls a function with the first items of all lists, then with the second ones, and so on.
Apply = Callable[..., Iterable[Any]]


def trace_run(run: Run, apply: Apply = map) -> tuple[RankTrace, ...]:
    """The counts of one optimizer step, for each kind of pipeline rank.

    Call it in a process that has no world of ranks. It leaves none behind.

    Args:
        run: The job and the number of ranks. Neither data nor the ranks' devices are needed.
        apply: Does the parts of the work, of which none needs another: `map`, or that method of a pool of processes.

    Raises:
        UserError: The compiler decides what is recomputed, so that only a compiled step would tell; or a forward pass
            has too many tokens, or a weight too many shards, to be followed.
    """
    job, notes = run.job, []
    _refuse_endless(run)
    if job.activation_checkpoint.mode == "memory_budget":
        raise UserError(
            'activation_checkpoint.mode = "memory_budget": the compiler decides at the start of a run what is '
            'recomputed, so it cannot be planned. Plan with "selective" instead.'
        )
    if job.compile.enable:
        notes.append("Compiled parts are counted as if they were not compiled: they take less memory and time.")
        job = job.model_copy(update={"compile": job.compile.model_copy(update={"enable": False})})
    if job.parallelism.enable_async_tensor_parallel:
        notes.append("The buffers of async tensor parallelism are not counted.")
        parallelism = job.parallelism.model_copy(update={"enable_async_tensor_parallel": False})
        job = job.model_copy(update={"parallelism": parallelism})
    run, fewer = Run(job, run.world_size), _fewer_blocks(run)
    ranks, runs = _ranks(run), fewer.shortened(run)
    counted = list(apply(_trace, runs * len(ranks), [rank for rank in ranks for _ in runs]))
    whole = (_whole(run, rank, fewer, counted[i * len(runs) : (i + 1) * len(runs)]) for i, rank in enumerate(ranks))
    return tuple(replace(each, notes=tuple(notes)) for each in whole)


def _refuse_endless(run: Run) -> None:
    """Raises UserError: the trace would take many minutes."""
    training, degree = run.job.training, run.degrees
    tokens, shards = training.local_batch_size * training.seq_len // degree.context, degree.shard * degree.context
    if tokens > MOST_TOKENS:
        raise UserError(
            f"training.local_batch_size = {training.local_batch_size}, training.seq_len = {training.seq_len}: a plan "
            f"follows at most {MOST_TOKENS:,} tokens in a forward pass of a rank. Take fewer or shorter rows."
        )
    if shards > MOST_SHARDS:
        raise UserError(
            f"{shards:,} ranks shard each weight: a plan follows at most {MOST_SHARDS:,}. Set "
            "parallelism.data_parallel_replicate_degree, as a run of so many ranks would."
        )


def _ranks(run: Run) -> list[int]:
    """The ranks to trace: of pipeline ranks that are alike, the first one, because most microbatches wait there."""
    pipeline, schedule = run.degrees.pipeline, run.job.parallelism.pipeline_parallel_schedule
    count, alike = len(run.stages), {}
    for rank in range(pipeline):
        own = [i for i in range(count) if stage_rank(i, count, pipeline, schedule) == rank]
        kind = tuple((len(run.stages[i]), i == 0, i == count - 1) for i in own)
        alike.setdefault(rank if schedule in V_SHAPED else kind, rank * (run.world_size // pipeline))
    return list(alike.values())


def _whole(run: Run, rank: int, fewer: _FewerBlocks, counted: Sequence[_Counted]) -> RankTrace:
    """A step of all blocks and all microbatches, from those of models that `fewer` has shortened."""
    line = counted[0].line
    if fewer.most:
        long = counted[1].line
        line = extended(line, long, fewer.most // fewer.unit, lambda place: fewer.moved(place, fewer.unit))
    place, kinds = line.peak()
    return _result(run, rank, fewer.moved(place, fewer.most), kinds, line, counted[0])


@dataclass(frozen=True)
class _FewerBlocks:
    """How a model is shortened: each stage by the same number of blocks, between its first and its last ones.

    Attributes:
        most: How many blocks a stage can lose; 0 if the model must be run as it is.
        unit: A number of blocks after which they are alike, that divides `most`.
        front: How many first blocks a stage keeps.
    """

    most: int
    unit: int
    front: int

    def shortened(self, run: Run) -> list[Run]:
        """The runs that tell of all blocks: one, or two that differ in `unit` blocks."""
        return [self._of(run, lost) for lost in ((self.most, self.most - self.unit) if self.most else (0,))]

    def _of(self, run: Run, lost: int) -> Run:
        """The run with `lost` blocks less in each stage."""
        if not lost:
            return run
        lengths = [len(stage) - lost for stage in run.stages]
        cuts = tuple(f"layers.{cut}" for cut in list(accumulate(lengths))[:-1])
        model = run.job.model.model_copy(update={"n_layers": sum(lengths)})
        parallelism = run.job.parallelism.model_copy(update={"pipeline_parallel_split_points": cuts})
        return Run(run.job.model_copy(update={"model": model, "parallelism": parallelism}), run.world_size)

    def moved(self, place: Place, by: int) -> Place:
        """The same place in a model whose stages have `by` blocks more."""
        if place.block < self.front:
            return place
        return Place(place.phase, place.name, place.stage, place.block + by, place.microbatch)


def _fewer_blocks(run: Run) -> _FewerBlocks:
    """How many blocks can be left out so that the extension is exact.

    None if blocks are so small that FSDP puts several into a group, or that a single rank keeps them gathered.
    """
    job, recompute = run.job, run.job.activation_checkpoint
    numbered = recompute.mode == "selective" and recompute.selective_ac_option != "op"
    unit = int(recompute.selective_ac_option) if numbered else 1
    ahead = max(job.parallelism.fsdp_forward_prefetch, job.parallelism.fsdp_backward_prefetch)
    front = -(-(2 + ahead) // unit) * unit  # so many blocks, at both ends, that those between do not feel the ends
    least, shortest = job.parallelism.fsdp_min_num_params, min(map(len, run.stages))
    block = num_params(run.arch) // run.arch.n_layers  # at least as many parameters as a block has
    if block < 2 * least or (run.degrees.shard * run.degrees.context == 1 and 2 * front * block < 32 * least):
        return _FewerBlocks(0, unit, front)
    return _FewerBlocks(max(0, shortest - 2 * front) // unit * unit, unit, front)


class _Counted(NamedTuple):
    """A step of a rank, and what the rank belongs to.

    Attributes:
        groups: Name of a process group -> the dimension that it runs along, its number of ranks, and their span.
        stages: The pipeline stages of the rank.
    """

    line: Timeline
    groups: dict[str, tuple[str, int, int]]
    stages: tuple[int, ...]


def _trace(run: Run, rank: int) -> _Counted:
    """A step of a rank on fake tensors."""
    with fake_world(run.world_size, rank):
        mesh = build_mesh(run.degrees, DEVICE.type)
        sharded = build_model(run, mesh, torch.device("meta"), lambda _: None)
        groups, fake = _groups(mesh), FakeTensorMode()
        _allocate(sharded, fake)
        update = TrainStep(run, mesh, sharded, DEVICE)
        with fake:
            return _Counted(count_step(run, sharded, update), groups, tuple(sharded.stages))


def count_step(run: Run, sharded: ShardedModel, update: TrainStep) -> Timeline:
    """Do two steps over empty rows, and count the second. The first one allocates what lasts, for which the last
    microbatch is enough.

    Of many microbatches few are run. Without a pipeline: the first, the last, and one that stands for those between.
    """
    counter, count, alone = Counter(), run.microbatches, run.degrees.pipeline == 1
    few = _leaves_out_microbatches(run)
    done = min(3, count) if alone else count
    with counter.watching(), _no_garbage_collection():
        rows = _rows(run, count)
        offload = run.job.training.enable_cpu_offload
        counter.mark(
            update.model.parameters(), HOST if offload else "weights"
        )  # before FP8 weights have scales, which torchao compares
        with followed(counter, sharded, update, HOST if offload else "gradients"):
            for first in (True, False):
                counter.begin()
                with _running(counter, run, first):
                    update(rows[-1:] if first and alone else rows[: done - 1] + rows[-1:], 1, run.job.optimizer.lr)
                mark_optimizer_state(counter, update, HOST if offload else "optimizer state")
    if few:
        return timeline(counter, lambda place, op: times(place, op, count), count)
    return timeline(counter, lambda place, _: count - 2 if place.microbatch == 1 and done < count else 1)


def _running(counter: Counter, run: Run, first: bool) -> AbstractContextManager[None]:
    """Which microbatches of a pipeline run in a step. In the first step that is only the last one."""
    count = run.microbatches
    if run.degrees.pipeline == 1:
        return nullcontext()
    if not _leaves_out_microbatches(run):
        return run_microbatches(counter, lambda _: True)
    return run_microbatches(counter, lambda i: i == count - 1 or (not first and is_run(i, count)))


def _leaves_out_microbatches(run: Run) -> bool:
    """Whether a pipeline runs few microbatches.

    It runs all if stages on the same rank hand their values to each other, or if ranks have so many stages that torch
    gathers and frees the weights of some while others run: there a microbatch's memory depends on more than its stage.
    """
    pipeline, schedule = run.degrees.pipeline, run.job.parallelism.pipeline_parallel_schedule
    alike = schedule not in V_SHAPED and len(run.stages) <= 3 * pipeline
    return pipeline > 1 and run.microbatches >= FEWEST and alike


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """A process group whose collectives return at once. It is destroyed at the end."""
    assert not dist.is_initialized()
    from torch.distributed.pipelining import PipelineStage

    # Before their first step the ranks of a pipeline agree on whether all of them know the shapes that they receive.
    # They do, but nobody answers here.
    agreement = {
        "_warmup_forward_vote": lambda *_, **__: None,
        "_warmup_backward_result": lambda *_, **__: SimpleNamespace(item=lambda: 1),
    }
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with patch.multiple(PipelineStage, create=True, **agreement):
            yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers meshes, which compare equal to those of a later world with process groups of other names.
        _clear_sharding_prop_cache()


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


def _result(run: Run, rank: int, place: Place, kinds: np.ndarray, line: Timeline, of: _Counted) -> RankTrace:
    moment = place.name
    if place.name == "block":
        moment = f"{place.phase} of block {run.stages[place.stage].start + place.block}"
    work = tuple(Work(*key, *map(int, amounts)) for key, amounts in line.work.items())
    traffic = tuple(
        Traffic(phase, op, *of.groups[group], *map(int, amounts))
        for (phase, op, group), amounts in line.traffic.items()
    )
    of_kind = dict(zip(KINDS, map(int, kinds), strict=True))
    return RankTrace(rank, of.stages, sum(of_kind.values()), moment, of_kind, *line.host_and_together(), work, traffic)
