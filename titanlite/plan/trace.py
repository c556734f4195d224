"""A step of the trainer on fake tensors, in a world of ranks that does not exist.

Invariant: what runs is the trainer's own code, from `build_mesh` to the optimizer. Blocks are alike, and so are
microbatches, so a few of them run, and the counts are extended: the result is that of all, to the byte.
"""

from __future__ import annotations

import gc
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.config.errors import UserError
from titanlite.config.run import V_SHAPED, Run, stage_rank
from titanlite.data.batch import blank_microbatch
from titanlite.model.llama import Llama
from titanlite.observe.flops import num_params
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import ShardedModel, build_model
from titanlite.plan.counter import COUNTED, HOST, KINDS, UNKNOWN, Counter, Place
from titanlite.train.step import TrainStep

DEVICE = torch.device("cpu")  # of the fake tensors
# Beyond these a trace would take minutes: the loss is a loop over chunks of tokens, and FSDP2 lists the shards of each
# parameter.
MOST_TOKENS, MOST_SHARDS = 2**22, 2**15
FEWEST = 6  # microbatches of a pipeline from which on some are left out

# What is looked at of the bytes of each kind: those on the device, those of the host, and both together.
_VIEWS = np.array([[kind != HOST for kind in COUNTED], [kind == HOST for kind in COUNTED], [True for _ in COUNTED]])
# Method of a pipeline's stage -> what it does, in which phase. The last two hand over what is sent.
_ACTIONS = {
    "forward_one_chunk": Place("forward", "stage"),
    "backward_one_chunk": Place("backward", "stage"),
    "backward_weight_one_chunk": Place("backward", "weights of a stage"),
    "get_fwd_send_ops": Place("forward", "sent"),
    "get_bwd_send_ops": Place("backward", "sent"),
}
_ACTION_NAMES = {place.name for place in _ACTIONS.values()}
_BETWEEN = "between stages"


@dataclass(frozen=True)
class Work:
    """Kernels or collectives that are alike, in one optimizer step of a rank.

    Attributes:
        phase: "forward", "backward" (with what is recomputed), or "optimizer" (with clipping).
        op, dtype, shape: As `Kernel` has them.
        group: Of a collective: the dimension of the world ("fsdp", "tensor", ...), its number of ranks, and the
            distance from its first to its last rank, plus 1: it lies within a machine that has so many. None of others.
        count: How many.
        flops, bytes: Of all of them.
    """

    phase: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    group: tuple[str, int, int] | None
    count: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class RankTrace:
    """One optimizer step of a rank. Nothing in it is an estimate, and nothing depends on how fast a device is.

    Attributes:
        rank: It stands for all ranks with the same pipeline stages.
        stages: The pipeline stages that it runs; (0,) without a pipeline.
        peak: The most bytes on the device at one time.
        moment: The part of the step in which the peak is: "backward of block 31", "optimizer", "loss".
        kinds: Kind of memory -> bytes at the peak. They add up to `peak`.
        host: The most bytes in host memory: weights, gradients and optimizer state with CPU offload.
        together: The most bytes at one time if device and host are one memory; `peak` without CPU offload.
        work: All kernels and collectives.
    """

    rank: int
    stages: tuple[int, ...]
    peak: int
    moment: str
    kinds: Mapping[str, int]
    host: int
    together: int
    work: tuple[Work, ...]


def trace_run(
    run: Run, fp8: bool = False, apply: Callable[..., Iterable[Any]] = map, whole: bool = False
) -> tuple[RankTrace, ...]:
    """The counts of one optimizer step, for each kind of pipeline rank. What is compiled is counted as if it were not.

    Call it in a process that has no world of ranks. It leaves none behind.

    Args:
        run: The job and the number of ranks. Neither data nor the ranks' devices are needed.
        fp8: The device has FP8, so that it is not emulated unless the job says so.
        apply: Does the parts of the work, of which none needs another: `map`, or that method of a pool of processes.
        whole: Run all blocks and all microbatches, on all pipeline ranks. The results are the same.

    Raises:
        UserError: The compiler decides what is recomputed, so that only a compiled step would tell; or a forward pass
            has too many tokens, or a weight too many shards, to be followed.
    """
    training, degree = run.job.training, run.degrees
    if training.local_batch_size * training.seq_len // degree.context > MOST_TOKENS:
        raise UserError(
            f"training.local_batch_size = {training.local_batch_size}, training.seq_len = {training.seq_len}: a plan "
            f"follows at most {MOST_TOKENS:,} tokens in a forward pass of a rank. Take fewer or shorter rows."
        )
    if (shards := degree.shard * degree.context) > MOST_SHARDS:
        raise UserError(
            f"{shards:,} ranks shard each weight: a plan follows at most {MOST_SHARDS:,}. Set "
            "parallelism.data_parallel_replicate_degree, as a run of so many ranks would."
        )
    if run.job.activation_checkpoint.mode == "memory_budget":
        raise UserError(
            'activation_checkpoint.mode = "memory_budget": the compiler decides at the start of a run what is '
            'recomputed, so it cannot be planned. Plan with "selective" instead.'
        )
    run = _with(run, compile={"enable": False}, parallelism={"enable_async_tensor_parallel": False})
    ranks, (spare, unit, front) = _ranks(run, whole), (0, 1, 0) if whole else _spare_blocks(run)
    runs = [_without_blocks(run, lost) for lost in ((spare, spare - unit) if spare else (0,))]
    tasks = [(each, rank, fp8, whole) for rank in ranks for each in runs]
    counted = list(apply(_trace, *zip(*tasks, strict=True)))

    def later(place: Place, blocks: int) -> Place:
        return replace(place, block=place.block + blocks) if place.block >= front else place

    traces = []
    for i, rank in enumerate(ranks):
        one, longer = counted[i * len(runs)], counted[(i + 1) * len(runs) - 1]
        times = spare // unit  # what `longer` has more is there so often in all
        peaks, amounts = one.peaks, one.amounts
        if times:
            longer_peaks = {key: longer.peaks[later(key[0], unit), key[1]] for key in peaks}
            peaks = {key: value + times * (longer_peaks[key] - value) for key, value in peaks.items()}
            amounts = {key: value + times * (longer.amounts[key] - value) for key, value in amounts.items()}
        totals = {key: (moments * _VIEWS).sum(axis=1) for key, moments in peaks.items()}
        peak = max(totals, key=lambda key: totals[key][0])
        place = later(peak[0], spare)
        block = f"{place.phase} of block {run.stages[place.stage].start + place.block}"
        traces.append(
            RankTrace(
                rank,
                one.stages,
                int(totals[peak][0]),
                block if place.name == "block" else place.name,
                dict(zip(KINDS, map(int, peaks[peak][0]), strict=False)),
                max(int(total[1]) for total in totals.values()),
                max(int(total[2]) for total in totals.values()),
                tuple(Work(*key, *map(int, amount)) for key, amount in amounts.items()),
            )
        )
    return tuple(traces)


# ------------------------------------------------------------------------------------------- which ranks, which blocks


def _with(run: Run, **sections: dict[str, Any]) -> Run:
    changed = {name: getattr(run.job, name).model_copy(update=values) for name, values in sections.items()}
    return Run(run.job.model_copy(update=changed), run.world_size)


def _ranks(run: Run, whole: bool) -> list[int]:
    """The ranks to trace: of pipeline ranks that are alike, the first one, because most microbatches wait there."""
    pipeline, schedule = run.degrees.pipeline, run.job.parallelism.pipeline_parallel_schedule
    count, alike = len(run.stages), {}
    for rank in range(pipeline):
        own = [i for i in range(count) if stage_rank(i, count, pipeline, schedule) == rank]
        kind = tuple((len(run.stages[i]), i == 0, i == count - 1) for i in own)
        alike.setdefault(rank if whole or schedule in V_SHAPED else kind, rank * (run.world_size // pipeline))
    return list(alike.values())


def _spare_blocks(run: Run) -> tuple[int, int, int]:
    """How many blocks each stage can lose so that the extension is exact, a number of blocks after which they are
    alike, and how many first blocks a stage keeps.

    None can go if blocks are so small that FSDP puts several into a group, or that a single rank keeps them gathered.
    """
    job, recompute = run.job, run.job.activation_checkpoint
    numbered = recompute.mode == "selective" and recompute.selective_ac_option != "op"
    unit = int(recompute.selective_ac_option) if numbered else 1
    ahead = max(job.parallelism.fsdp_forward_prefetch, job.parallelism.fsdp_backward_prefetch)
    front = -(-(2 + ahead) // unit) * unit  # so many blocks, at both ends, that those between do not feel the ends
    least, shortest = job.parallelism.fsdp_min_num_params, min(map(len, run.stages))
    block = num_params(run.arch) // run.arch.n_layers  # at least as many parameters as a block has
    if block < 2 * least or (run.degrees.shard * run.degrees.context == 1 and 2 * front * block < 32 * least):
        return 0, unit, front
    return max(0, shortest - 2 * front) // unit * unit, unit, front


def _without_blocks(run: Run, lost: int) -> Run:
    """The run with `lost` blocks less in each stage."""
    if not lost:
        return run
    lengths = [len(stage) - lost for stage in run.stages]
    cuts = tuple(f"layers.{cut}" for cut in list(accumulate(lengths))[:-1])
    return _with(run, model={"n_layers": sum(lengths)}, parallelism={"pipeline_parallel_split_points": cuts})


def _left_out(run: Run, whole: bool = False) -> range:
    """The microbatches that are not run. The one before them is their model.

    A pipeline runs all if stages on the same rank hand their values to each other, or if ranks have so many stages that
    torch gathers and frees the weights of some while others run: there a microbatch's memory depends on more than its
    stage. Elsewhere it has one microbatch more before the model, because some of its memory is freed while the model
    runs, as some of the model's is while the next one runs.
    """
    pipeline, schedule = run.degrees.pipeline, run.job.parallelism.pipeline_parallel_schedule
    alike = schedule not in V_SHAPED and len(run.stages) <= 3 * pipeline and run.microbatches >= FEWEST
    if pipeline == 1:
        return range(2, 2 if whole else run.microbatches - 1)
    return range(3, 3 if whole or not alike else run.microbatches - 1)


# ---------------------------------------------------------------------------------------------------------- one step


class Counted(NamedTuple):
    """A step of a rank.

    Attributes:
        stages: The pipeline stages of the rank.
        peaks: (place, how often the step was there before) -> bytes of each kind of COUNTED at the moment with the most
            on the device, on the host, and together: (3, kinds).
        amounts: The first five attributes of `Work` -> count, FLOPs, bytes.
    """

    stages: tuple[int, ...]
    peaks: dict[tuple[Place, int], np.ndarray]
    amounts: dict[tuple[Any, ...], np.ndarray]


def _trace(run: Run, rank: int, fp8: bool, whole: bool) -> Counted:
    """A step of a rank on fake tensors."""
    with fake_world(run.world_size, rank), patch("titanlite.parallel.float8.has_float8_hardware", lambda: fp8):
        mesh = build_mesh(run.degrees, DEVICE.type)
        sharded = build_model(run, mesh, torch.device("meta"), lambda _: None)
        fake = FakeTensorMode()
        _allocate(sharded, fake)
        update = TrainStep(run, mesh, sharded, DEVICE)
        with fake:
            return count_step(run, mesh, sharded, update, whole)


def count_step(run: Run, mesh: Mesh, sharded: ShardedModel, update: TrainStep, whole: bool = False) -> Counted:
    """Do two steps over empty rows, and count the second. The first one allocates what lasts, for which the last
    microbatch is enough. The tensors may be real."""
    counter, count, left_out = Counter(), run.microbatches, _left_out(run, whole)
    pipelined, offload = run.degrees.pipeline > 1, run.job.training.enable_cpu_offload
    weights, state, gradients = (HOST,) * 3 if offload else ("weights", "optimizer state", "gradients")
    training = run.job.training
    shape = training.local_batch_size, training.seq_len, run.job.dataset.document_mask
    with counter.watching():
        rows = [blank_microbatch(*shape, DEVICE) for _ in range(count)]
        counter.mark(update.model.parameters(), weights)  # before FP8 weights have scales, which torchao compares
        with followed(counter, sharded, update, gradients):
            for first in (True, False):
                missing = range(count - 1) if first and (left_out or not pipelined) else left_out
                counter.begin()
                own = rows if pipelined else [row for i, row in enumerate(rows) if i not in missing]
                with _leaving_out(counter, missing) if pipelined else nullcontext():
                    update(own, 1, run.job.optimizer.lr)
                for each in update.optimizer.state.values():
                    counter.mark(each.values(), state)
    amounts: dict[Any, Any] = {}
    groups = _groups(mesh)
    for (number, kernel), times in counter.kernels.items():
        place = counter.places[number]
        # Between the stages of a pipeline its schedule gathers weights, once for all microbatches.
        if left_out and place.microbatch == left_out[0] - 1 and (place.name != _BETWEEN or kernel.op == "send"):
            times *= 1 + len(left_out)
        key = place.phase, kernel.op, kernel.dtype, kernel.shape, groups.get(kernel.group)
        amounts[key] = amounts.get(key, 0) + times * np.array([1, kernel.flops, kernel.bytes])
    return Counted(tuple(sharded.stages), _peaks(counter, left_out if pipelined else range(0)), amounts)


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """A process group whose collectives return at once. It is destroyed at the end. As in training, cycles are not
    collected within it."""
    assert not dist.is_initialized()
    # Before their first step the ranks of a pipeline agree on whether all of them know the shapes that they receive.
    # They do, but nobody answers here.
    agreement = {
        "_warmup_forward_vote": lambda *_, **__: None,
        "_warmup_backward_result": lambda *_, **__: SimpleNamespace(item=lambda: 1),
    }
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    gc.collect()
    gc.disable()
    try:
        with patch.multiple(PipelineStage, create=True, **agreement):
            yield
    finally:
        gc.enable()
        dist.destroy_process_group()
        # DTensor remembers meshes, which compare equal to those of a later world with process groups of other names.
        _clear_sharding_prop_cache()


def _allocate(sharded: ShardedModel, fake: FakeTensorMode) -> None:
    """Replace the parameters, which are on the meta device, by fake ones on the device."""

    def faked(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value  # the mesh of a DTensor
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            inner = {name: faked(getattr(value, name)) for name in names}
            return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
        with fake:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)

    with torch.no_grad():
        for module in sharded.whole.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(faked(parameter.detach())))


def _groups(mesh: Mesh) -> dict[str, tuple[str, int, int]]:
    """Name of a process group -> the dimension that it runs along, its number of ranks, and their span."""
    named: dict[str, dist.ProcessGroup] = {"world": mesh.world_group, "loss": mesh.loss_group, "data": mesh.data_group}
    dims = {"pipeline": mesh.pipeline, "context": mesh.context, "tensor": mesh.tensor}
    named |= {name: dim.get_group() for name, dim in dims.items() if dim is not None}
    names = ("replicate", "fsdp") if mesh.fsdp.ndim == 2 else ("fsdp",)
    named |= {name: mesh.fsdp.get_group(dim) for dim, name in enumerate(names)}
    spans = {name: dist.get_process_group_ranks(group) for name, group in named.items()}
    return {g.group_name: (n, len(spans[n]), max(spans[n]) - min(spans[n]) + 1) for n, g in named.items()}


# --------------------------------------------------------------------------------------------------- where a step is


@contextmanager
def followed(counter: Counter, sharded: ShardedModel, update: TrainStep, reduced: str) -> Iterator[None]:
    """Tell `counter` where the steps within are, and which tensors are gathered weights and gradients.

    The hooks only look: they change no tensor, keep none alive, and are gone at the end.

    Args:
        reduced: The kind of memory of gradients that are reduced.
    """
    with ExitStack() as hooks:
        for number, stage in sharded.stages.items():
            _follow_stage(counter, number, stage, hooks)
        forward_backward, seen = update.forward_backward, set[int]()

        def and_norm(*args: Any) -> Tensor:
            loss = forward_backward(*args)
            counter.go_to(Place("optimizer", "gradient norm"))
            return loss

        def before_update(*_: Any) -> None:
            counter.mark((parameter.grad for parameter in update.model.parameters()), reduced)
            counter.go_to(Place("optimizer", "optimizer"))

        def gathered(module: nn.Module, _inputs: Any) -> None:
            parameters = list(module.parameters(recurse=False))
            for parameter in parameters:
                if parameter.requires_grad and id(parameter) not in seen:
                    mark = parameter.register_post_accumulate_grad_hook(
                        lambda each: counter.mark((each.grad,), "gradients", UNKNOWN)
                    )
                    hooks.callback(mark.remove)
                seen.add(id(parameter))
            counter.mark(parameters, "gathered weights", UNKNOWN)

        for module in (each for stage in sharded.stages.values() for each in stage.modules()):
            if any(True for _ in module.parameters(recurse=False)):
                hooks.callback(module.register_forward_pre_hook(gathered).remove)
        hooks.enter_context(patch.object(update, "forward_backward", and_norm))
        hooks.callback(update.optimizer.register_step_pre_hook(before_update).remove)
        ended = update.optimizer.register_step_post_hook(lambda *_: counter.go_to(Place("optimizer", "end")))
        hooks.callback(ended.remove)
        yield


def _follow_stage(counter: Counter, number: int, stage: Llama, hooks: ExitStack) -> None:
    microbatch, loss = -1, stage.loss

    def begins(*_: Any) -> None:
        nonlocal microbatch
        microbatch = counter.next_microbatch(number)
        counter.go_to(Place("forward", "forward", number, -1, microbatch))

    def backward_from(output: Any, name: str, block: int = -1) -> None:
        if output.requires_grad:
            place = Place("backward", name, number, block, microbatch)
            output.register_hook(lambda _: counter.go_to(place))

    def watch(module: nn.Module | None, name: str, block: int = -1) -> None:
        if module is not None:
            before = module.register_forward_pre_hook(
                lambda *_: counter.go_to(Place("forward", name, number, block, microbatch)), prepend=True
            )
            after = module.register_forward_hook(
                lambda _module, _inputs, output: backward_from(output, name, block), prepend=True
            )
            hooks.callback(before.remove)
            hooks.callback(after.remove)

    def followed_loss(*args: Tensor) -> Tensor:
        assert loss is not None
        counter.go_to(Place("forward", "loss", number, -1, microbatch))
        value = loss(*args)
        counter.go_to(Place("forward", "forward", number, -1, microbatch))
        backward_from(value, "loss")
        return value

    hooks.callback(stage.register_forward_pre_hook(begins, prepend=True).remove)
    watch(stage.tok_embeddings, "embedding")
    for block, module in enumerate(stage.layers.values()):
        watch(module, "block", block)
    watch(stage.norm, "norm")
    hooks.enter_context(patch.object(stage, "loss", followed_loss))


@contextmanager
def _leaving_out(counter: Counter, missing: Sequence[int]) -> Iterator[None]:
    """Let the schedule of a pipeline call all its stages, of which microbatches that are `missing` do nothing. The
    counter is told where in the schedule the step is."""
    kept: list[Tensor] = []  # a loss

    def action(method: str) -> Any:
        own, sort = getattr(PipelineStage, method), _ACTIONS[method]

        def act(stage: PipelineStage, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            place = Place(sort.phase, sort.name, stage.stage_index, -1, microbatch)
            counter.go_to(place)
            result: Any = [] if sort.name == "sent" else None
            if microbatch not in missing:
                result = own(stage, microbatch, *args, **kwargs)
                if method == "forward_one_chunk" and stage.is_last:
                    kept[:] = [result.detach()]
            elif method == "forward_one_chunk":
                counter.next_microbatch(stage.stage_index)
                result = (kept[0] if kept else torch.zeros(())) if stage.is_last else None
            counter.go_to(replace(place, name=_BETWEEN))
            return result

        return act

    with patch.multiple(PipelineStage, create=True, **{name: action(name) for name in _ACTIONS}):
        yield


# -------------------------------------------------------------------------------------------------------- bytes alive


def _peaks(counter: Counter, left_out: Sequence[int]) -> dict[tuple[Place, int], np.ndarray]:
    """What `Counted.peaks` is.

    In a pipeline each microbatch that was left out takes what its model took: between two stages only what was
    allocated in one, because all else runs there once. What the model left to the next microbatch is freed when the
    last one comes, and stands for what the last but one left to it.
    """
    places, (numbers, changes, where) = counter.places, np.array(counter.events, dtype=np.int64).T
    by_kind = np.zeros((len(numbers), len(COUNTED)), dtype=np.int64)
    by_kind[np.arange(len(numbers)), np.array(counter.kinds)[numbers]] = changes
    bounds = np.searchsorted(where, np.arange(len(places) + 1))
    of_stages = _born_in_stages(places, numbers, changes, where)
    alive, visits, peaks = by_kind[: bounds[0]].sum(axis=0), Tally[Place](), {}

    def add(place: Place, part: np.ndarray) -> None:
        nonlocal alive
        moments = alive + by_kind[part].cumsum(axis=0)
        alive = moments[-1] if len(part) else alive
        if len(moments := moments[changes[part] > 0]):
            peaks[place, visits[place]] = moments[(moments @ _VIEWS.T).argmax(axis=0)]
        visits[place] += 1

    spans: dict[Place, list[tuple[Place, np.ndarray]]] = {}  # what is done for a microbatch -> its places and events
    action = places[0]
    for i, place in enumerate(places):
        action = place if place.name in _ACTION_NAMES or place.phase == "optimizer" else action
        spans.setdefault(action, []).append((place, np.arange(bounds[i], bounds[i + 1])))
    for action, span in spans.items():
        between, own = span[-1]
        if action.microbatch in left_out:
            *inside, (_, after) = spans[replace(action, microbatch=left_out[0] - 1)]
            for place, part in inside:
                add(replace(place, microbatch=action.microbatch), part)
            add(between, np.concatenate([after[of_stages[after]], own[~of_stages[own]]]))
            continue
        if left_out and action.microbatch == left_out[-1] + 1:
            late = np.concatenate([spans[replace(action, microbatch=i)][-1][1] for i in left_out])
            span[-1] = between, np.concatenate([late[of_stages[late]], own])
        for place, part in span:
            add(place, part)
    return peaks


def _born_in_stages(places: Sequence[Place], numbers: np.ndarray, changes: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Of each event, whether its storage was allocated by a stage of a pipeline, and not between two of them."""
    inside = [False]
    for place in places:
        inside.append(place.name in _ACTION_NAMES or (inside[-1] and place.name != _BETWEEN))
    born = np.zeros(numbers.max() + 1, dtype=bool)
    found = np.zeros(len(numbers), dtype=bool)
    for i, (number, change, place) in enumerate(zip(numbers, changes, where, strict=True)):
        if change > 0:
            born[number] = inside[place + 1]
        found[i] = born[number]
    return found
