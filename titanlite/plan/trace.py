"""A step of the trainer on fake tensors, in a world of ranks that does not exist.

Invariant: what runs is the trainer's own code, from `build_mesh` to the optimizer. Blocks are alike, and so are
microbatches, so a few of them run, and the counts are extended to those of all.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
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

from titanlite.config.run import V_SHAPED, Run, stage_rank
from titanlite.data.batch import blank_microbatch
from titanlite.hooks.ema import Ema
from titanlite.hooks.hook import Hook
from titanlite.model.llama import Llama
from titanlite.observe.flops import num_params
from titanlite.observe.gpus import Gpu
from titanlite.optim.adamw import local_shard
from titanlite.optim.clip import StepSums
from titanlite.optim.loss import VOCAB_BLOCK
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import ShardedModel, build_model
from titanlite.parallel.recompute import _ALWAYS_SAVED
from titanlite.plan.compiled import compiling
from titanlite.plan.counter import COUNTED, HOST, KINDS, UNKNOWN, Counter, Place, Work
from titanlite.train.step import TrainStep

DEVICE = torch.device("cpu")  # of the fake tensors: torch without CUDA cannot follow those of a GPU backward
FEWEST = 6  # microbatches of a pipeline from which on some are left out
# Methods of a pipeline's stage, and their phases. The last two hand over what is sent.
_ACTIONS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
    "get_fwd_send_ops": "forward",
    "get_bwd_send_ops": "backward",
}


@dataclass(frozen=True)
class RankTrace:
    """One optimizer step of a rank. Nothing in it is an estimate, and nothing depends on how fast a device is.

    Attributes:
        rank: It stands for all ranks with the same pipeline stages.
        peak: The most bytes on the device at one time.
        moment: The part of the step in which the peak is: "backward of a block", "optimizer", "loss".
        kinds: Kind of memory -> bytes at the peak. They add up to `peak`.
        host: The most bytes in host memory: weights, gradients and optimizer state with CPU offload.
        work: All kernels and collectives.
        reserved: The most bytes of each CUDA stream at one time, added up: torch's allocator gives to no stream what
            another one has freed. FSDP2 gathers and reduces in streams of its own.
    """

    rank: int
    peak: int
    moment: str
    kinds: Mapping[str, int]
    host: int
    work: tuple[Work, ...]
    reserved: int


def trace_run(
    run: Run, gpu: Gpu | None = None, apply: Callable[..., Iterable[Any]] = map, whole: bool = False
) -> tuple[RankTrace, ...]:
    """The counts of one optimizer step, for each kind of pipeline rank.

    Call it in a process that has no world of ranks. It leaves none behind.

    Args:
        run: The job and the number of ranks. Neither data nor the ranks' devices are needed.
        gpu: What each rank has. None: a CPU. It need not be there.
        apply: Does the parts of the work, of which none needs another: `map`, or that method of a pool of processes.
        whole: Run all blocks and all microbatches, on all pipeline ranks. The results are the same.
    """
    run = with_keys(run, {"parallelism.enable_async_tensor_parallel": False})
    spare = 0 if whole else _spare_blocks(run)
    runs = [_without_blocks(run, lost) for lost in ((spare, spare - 1) if spare else (0,))]
    ranks = _ranks(run, whole)
    tasks = [(each, rank, gpu, whole) for rank in ranks for each in runs]
    counted = list(apply(_trace, *zip(*tasks, strict=True)))
    traces = []
    for rank, short, longer in zip(ranks, counted[:: len(runs)], counted[len(runs) - 1 :: len(runs)], strict=True):
        peaks, pools, amounts = (
            {key: value + spare * (more[key] - value) for key, value in few.items()}
            for few, more in zip(short, longer, strict=True)
        )
        place = max(peaks, key=lambda place: peaks[place][:-1].sum())
        moment = f"{place.phase} of a block" if place.name == "block" else place.name
        *device, host = map(int, peaks[place])
        work = tuple(Work(*key, *map(int, amount)) for key, amount in amounts.items())
        streams = defaultdict[int, int](int)
        for (stream, _), size in pools.items():
            streams[stream] = max(streams[stream], size)
        kinds, reserved = dict[str, int](zip(KINDS, device, strict=True)), sum(streams.values())
        traces.append(RankTrace(rank, sum(device), moment, kinds, host, work, reserved))
    return tuple(traces)


def with_keys(run: Run, settings: Mapping[str, Any]) -> Run:
    """The run with other values of some keys ("section.key"). Whether they break a rule is not asked."""
    job = run.job
    for key, value in settings.items():
        section, name = key.split(".")
        job = job.model_copy(update={section: getattr(job, section).model_copy(update={name: value})})
    return Run(job, run.world_size)


# ------------------------------------------------------------------------------------------- which ranks, which blocks


def _ranks(run: Run, whole: bool) -> list[int]:
    """The ranks to trace: of pipeline ranks that are alike, the first one, because most microbatches wait there."""
    pipeline, schedule = run.degrees.pipeline, run.job.parallelism.pipeline_parallel_schedule
    count, alike = len(run.stages), {}
    for rank in range(pipeline):
        own = [i for i in range(count) if stage_rank(i, count, pipeline, schedule) == rank]
        kind = tuple((len(run.stages[i]), i == 0, i == count - 1) for i in own)
        alike.setdefault(rank if whole or schedule in V_SHAPED else kind, rank * (run.world_size // pipeline))
    return list(alike.values())


def _spare_blocks(run: Run) -> int:
    """How many blocks each stage can lose so that the extension is exact.

    None can go if they are not alike, because each second or third one is recomputed or because Muon gives their
    matrices to ranks, if blocks are so small that FSDP puts several into a group, or if a single rank keeps them
    gathered.
    """
    layout, recompute = run.job.parallelism, run.job.activation_checkpoint
    if run.job.optimizer.name == "Muon":
        return 0
    if recompute.mode == "selective" and recompute.selective_ac_option != "op":
        return 0
    # So many blocks that those between do not feel the ends.
    ends = 2 * (2 + max(layout.fsdp_forward_prefetch, layout.fsdp_backward_prefetch))
    least, block = layout.fsdp_min_num_params, num_params(run.arch) // run.arch.n_layers  # no block has more parameters
    if block < 2 * least or (run.degrees.shard * run.degrees.context == 1 and ends * block < 32 * least):
        return 0
    return max(0, min(map(len, run.stages)) - ends)


def _without_blocks(run: Run, lost: int) -> Run:
    """The run with `lost` blocks less in each stage."""
    if not lost:
        return run
    cuts = list(accumulate(len(stage) - lost for stage in run.stages))
    points = tuple(f"layers.{cut}" for cut in cuts[:-1])
    return with_keys(run, {"model.n_layers": cuts[-1], "parallelism.pipeline_parallel_split_points": points})


def _missing(run: Run, whole: bool) -> range:
    """The microbatches that are not run. The one before them stands for them.

    A pipeline runs all if stages on the same rank hand their values to each other, or if ranks have so many stages that
    torch gathers and frees the weights of some while others run: there a microbatch's memory depends on more than its
    stage. Elsewhere it has one microbatch more before the model, because some of its memory is freed while the model
    runs, as some of the model's is while the next one runs.
    """
    pipeline, schedule = run.degrees.pipeline, run.job.parallelism.pipeline_parallel_schedule
    first = 2 if pipeline == 1 else 3
    alike = schedule not in V_SHAPED and len(run.stages) <= 3 * pipeline and run.microbatches >= FEWEST
    return range(first, first if whole or (pipeline > 1 and not alike) else run.microbatches - 1)


# ---------------------------------------------------------------------------------------------------------- one step


class Counted(NamedTuple):
    """A step of a rank.

    Attributes:
        peaks: Place -> bytes of each kind of COUNTED when the device has the most there; of HOST the most at any time.
        pools: (stream, place) -> the most bytes of the device there that were allocated in this stream.
        amounts: The first five attributes of `Work` -> count, FLOPs, bytes.
    """

    peaks: dict[Place, np.ndarray]
    pools: dict[tuple[int, Place], int]
    amounts: dict[tuple[Any, ...], np.ndarray]


def _trace(run: Run, rank: int, gpu: Gpu | None, whole: bool) -> Counted:
    """A step of a rank on fake tensors."""
    on_gpu, fp8 = gpu is not None and not gpu.cpu, lambda: gpu is not None and gpu.fp8 > 0
    # A fake tensor does not tell the host whether to skip, which some optimizers ask.
    steps = patch("titanlite.optim.build.is_set", lambda _: False)
    with (
        fake_world(run.world_size, rank),
        as_on_gpu() if on_gpu else nullcontext(),
        compiling(),
        patch("titanlite.parallel.float8.has_float8_hardware", fp8),
        steps,
    ):
        mesh = build_mesh(run.degrees, DEVICE.type)
        sharded = build_model(run, mesh, torch.device("meta"), lambda _: None)
        fake = FakeTensorMode(allow_non_fake_inputs=True)  # the weights on the meta device
        with fake:
            sharded.whole.to_empty(device=DEVICE)
        update = TrainStep(run, mesh, sharded, DEVICE)
        with fake:
            return count_step(run, mesh, sharded, update, whole)


def count_step(run: Run, mesh: Mesh, sharded: ShardedModel, update: TrainStep, whole: bool = False) -> Counted:
    """Do two steps over empty rows, and count the second. The first one allocates what lasts, for which the last
    microbatch is enough. The tensors may be real."""
    counter, count, missing = Counter(_groups(mesh)), run.microbatches, _missing(run, whole)
    pipelined, training = run.degrees.pipeline > 1, run.job.training
    shape = training.local_batch_size, training.seq_len, run.job.dataset.document_mask
    with counter.watching():
        rows = [blank_microbatch(*shape, DEVICE) for _ in range(count)]
        watch = _Watch(counter, sharded, update, training.enable_cpu_offload)
        averages = [Ema(run.job.ema.decay)] if run.job.ema.decay else []
        for average in averages:
            average.follow(update.model)
            counter.mark(average.tensors().values(), HOST if training.enable_cpu_offload else "optimizer state")
        for skipped in (range(0) if pipelined and not missing else range(count - 1), missing):
            own = [row for i, row in enumerate(rows) if pipelined or i not in skipped]
            counter.begin()
            with _skipping(counter, skipped) if pipelined else nullcontext():
                update(own, 1, run.job.optimizer.lr, [watch, *averages])
    # Without a pipeline the second microbatch stands for those that are missing. What it takes it gives back.
    repeated = range(*counter.begins[1:3]) if missing and not pipelined else range(0)
    amounts = defaultdict[Any, Any](int)
    alive, peaks = dict.fromkeys(list[str](COUNTED), 0), dict[Place, Any]()
    most, host, pools = defaultdict[Place, int](int), 0, defaultdict[tuple[int, Place], int](int)
    streams = defaultdict[int, int](int)
    for i, (place, what, change) in enumerate(counter.log):
        if isinstance(what, Work):
            amounts[what[:5]] += (1 + len(missing) * (i in repeated)) * np.array(what[5:])
            continue
        alive[counter.kinds[what]] += change
        if counter.kinds[what] != HOST:
            stream = counter.streams[what]
            streams[stream] += change
            pools[stream, place] = max(pools[stream, place], streams[stream])
        if change > 0 and (size := sum(alive.values()) - alive[HOST]) > most[place]:
            most[place], peaks[place] = size, np.array(list(alive.values()))
        host = max(host, alive[HOST])
    for kinds in peaks.values():
        kinds[-1] = host
    if training.enable_cpu_offload:  # a reduced gradient is on the device, in FSDP2's stream, until it has been copied
        pools[-1, Place("backward", "end")] = max(local_shard(each).nbytes for each in update.model.parameters())
    return Counted(peaks, pools, amounts)


class _FusedNorm(torch.autograd.Function):
    """What a GPU's kernels of RMSNorm keep, read and write. Those of a CPU are many, on tensors in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x[..., 0].float())  # the last one stands for 1 / rms
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        of_x = grad + x
        return of_x, of_x.sum(tuple(range(x.ndim - 1)), dtype=weight.dtype)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let the trainer take tensors for those of a GPU, with the kernels that it uses there.

    Attention is cuDNN's. Flash attention stands for flex attention, which keeps and returns the same, with small masks,
    and which selective recomputation does not see.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]

    def flex_attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if torch.compiler.is_compiling() or weight is None:  # the compiler has its own
            return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]
        return _FusedNorm.apply(x, weight)

    seen = _ALWAYS_SAVED - {torch.ops.aten._scaled_dot_product_flash_attention.default}
    masks = dict.fromkeys(("document_mask", "context_mask"), lambda *_: ())
    with (
        patch.object(Tensor, "is_cuda", property(lambda _: True), create=True),
        patch.multiple("torch.nn.functional", scaled_dot_product_attention=attention, rms_norm=rms_norm),
        patch.multiple("titanlite.parallel.forward_backward", **masks),
        patch("titanlite.model.attention.flex_function", lambda _: flex_attention),
        patch("titanlite.parallel.recompute._ALWAYS_SAVED", seen),
        patch.dict(VOCAB_BLOCK, cpu=VOCAB_BLOCK["cuda"]),
    ):
        yield


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


def _groups(mesh: Mesh) -> dict[str, tuple[str, int, int]]:
    """Name of a process group -> the dimension that it runs along, its number of ranks, and their span."""
    named: dict[str, dist.ProcessGroup] = {"stage": mesh.stage_group, "loss": mesh.loss_group}
    named |= {"world": mesh.world_group, "data": mesh.data_group}
    dims = {"pipeline": mesh.pipeline, "context": mesh.context, "tensor": mesh.tensor}
    named |= {name: dim.get_group() for name, dim in dims.items() if dim is not None}
    names = ("replicate", "fsdp") if mesh.fsdp.ndim == 2 else ("fsdp",)
    named |= {name: mesh.fsdp.get_group(dim) for dim, name in enumerate(names)}
    spans = {name: dist.get_process_group_ranks(group) for name, group in named.items()}
    return {g.group_name: (n, len(spans[n]), max(spans[n]) - min(spans[n]) + 1) for n, g in named.items()}


# --------------------------------------------------------------------------------------------------- where a step is


class _Watch(Hook):
    """Tells a counter where a step is, and what kinds of memory weights, gradients and optimizer state are.

    It only looks: it changes no tensor and keeps none alive.
    """

    def __init__(self, counter: Counter, sharded: ShardedModel, update: TrainStep, offload: bool) -> None:
        self._counter, self._update = counter, update
        kinds = ("weights", "optimizer state", "gradients")
        weights, self._state, self._gradients = (HOST,) * 3 if offload else kinds
        counter.mark(update.model.parameters(), weights)  # before FP8 weights have scales, which torchao compares
        for number, stage in sharded.stages.items():
            _follow(counter, number, stage)

    def gradients(self, step: int) -> None:
        self._counter.mark((parameter.grad for parameter in self._update.model.parameters()), self._gradients)
        self._counter.place = Place("optimizer", "gradient norm")

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        self._counter.place = Place("optimizer", "optimizer")

    def updated(self, step: int) -> None:
        for each in self._update.optimizer.state.values():
            self._counter.mark(each.values(), self._state)
        self._counter.place = Place("optimizer", "end")


def _follow(counter: Counter, number: int, stage: Llama) -> None:
    """Follow the parts of a pipeline stage, forward and backward."""
    loss, forward, seen = stage.loss, Place("forward", "forward", number), set[int]()

    def at(place: Place) -> Callable[..., None]:
        return lambda *_: setattr(counter, "place", place)

    def begins(*_: Any) -> None:
        counter.place = forward
        counter.begins.append(len(counter.log))

    def gathered(module: nn.Module, _: Any) -> None:
        own = list(module.parameters())
        counter.mark(own, "gathered weights", UNKNOWN)
        for parameter in (each for each in own if each.requires_grad and id(each) not in seen):
            parameter.register_post_accumulate_grad_hook(lambda each: counter.mark((each.grad,), "gradients", UNKNOWN))
        seen.update(map(id, own))

    def backward_from(place: Place, *values: Any) -> None:
        if values[-1].requires_grad:
            values[-1].register_hook(at(place._replace(phase="backward")))

    def followed_loss(*args: Tensor) -> Tensor:
        assert loss is not None
        counter.place = forward._replace(name="loss")
        value = loss(*args)
        backward_from(counter.place, value)
        counter.place = forward
        return value

    parts = [("embedding", stage.tok_embeddings), ("norm", stage.norm), ("output", stage.output)]
    parts += [("block", block) for block in stage.layers.values()]
    for name, module in parts:
        if module is None:
            continue
        module.register_forward_pre_hook(gathered)
        if name != "output":  # it is the loss
            place = forward._replace(name=name)
            module.register_forward_pre_hook(at(place), prepend=True)
            module.register_forward_hook(partial(backward_from, place), prepend=True)
    stage.register_forward_pre_hook(begins, prepend=True)
    stage.loss = followed_loss


@contextmanager
def _skipping(counter: Counter, missing: Sequence[int]) -> Iterator[None]:
    """Let the schedule of a pipeline call all its stages, which compute nothing for microbatches that are `missing`:
    what was counted of the one before is counted again."""
    losses = [torch.zeros(())]  # of the last microbatch that was computed

    def action(method: str) -> Any:
        own = getattr(PipelineStage, method)

        def act(stage: PipelineStage, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            name, has_loss = (method, stage.stage_index), method == "forward_one_chunk" and stage.is_last
            counter.action(name, Place(_ACTIONS[method], "stage", stage.stage_index), microbatch in missing)
            if microbatch in missing:
                return losses[-1] if has_loss else [] if method.startswith("get") else None
            result = own(stage, microbatch, *args, **kwargs)
            if has_loss:
                losses[:] = [result.detach()]
            return result

        return act

    with patch.multiple(PipelineStage, create=True, **{name: action(name) for name in _ACTIONS}):
        yield
