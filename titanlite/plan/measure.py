"""Measures the rates of this machine: matmuls, attention, memory, what launching a kernel costs, and collectives by
`titanlite.plan.measure_collectives`.

Invariant: the kernels are those of titanlite's own step. They are timed one by one while small jobs train, so a plan
finds each of them under the name that its trace uses.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.files import write_whole
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.batch import blank_microbatch
from titanlite.observe import gpus
from titanlite.observe.gpus import Gpu, Rates
from titanlite.observe.kernels import Kernel, copied, describe
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.plan.measure_collectives import in_processes, link, timed_collectives, wait
from titanlite.plan.trace import fake_world
from titanlite.runtime.world import process_group
from titanlite.train.step import TrainStep

GIB = 2**30
SECONDS = 0.2  # in which a step is repeated, without and with a clock
TURNS = 3  # of each job, so that what else runs on the machine for a moment does not last for most of them
BLOCKS = 2  # of a job
MOST_SIZES = 8  # of an operator that are kept


class Sample(NamedTuple):
    """A job whose kernels are timed.

    Attributes:
        rows: Rows of a forward pass, of `length` tokens each.
        vocab: Size of the vocabulary.
        keys: Keys of the job beside its sizes. They need kernels that other samples do not have, so it is timed in
            bfloat16 alone.
    """

    dim: int
    heads: int
    ffn_dim: int
    length: int
    rows: int
    vocab: int = 4096
    keys: Mapping[str, Mapping[str, Any]] = {}


_MASKS = {"dataset": {"document_mask": True}}
_FLOAT8 = {"enable": True, "emulate": True, "min_features": 0}
_GATHERED_FP8 = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
_ROUNDED = {"training": {"dtype": "bfloat16"}, "optimizer": {"stochastic_rounding": True}}
ON_CPU = (
    Sample(64, 2, 128, 64, 2),
    Sample(128, 2, 384, 128, 2),
    Sample(256, 4, 640, 256, 4),
    Sample(512, 8, 1408, 256, 2),
    Sample(512, 8, 1408, 1024, 1),
    Sample(1024, 16, 2816, 128, 1),
    Sample(256, 4, 640, 256, 2, keys=_MASKS),
    Sample(512, 8, 1408, 1024, 1, keys=_MASKS),
    Sample(256, 4, 640, 256, 2, keys={"float8": _FLOAT8}),
    Sample(512, 8, 1408, 256, 2, keys={"float8": _FLOAT8 | _GATHERED_FP8}),
    Sample(512, 8, 1408, 128, 1, 16384, _ROUNDED),  # whose integers of 64 bits exceed the caches
)
ON_GPU = (
    Sample(256, 4, 640, 1024, 4),
    Sample(1024, 16, 2816, 2048, 4),
    Sample(2048, 16, 8192, 4096, 2),
    Sample(4096, 32, 14336, 4096, 2),
)

SHARDED = Sample(512, 8, 1408, 256, 2)
"""Is timed with and without tensor parallelism, which works on DTensors."""
SELECTIVE = Sample(512, 8, 1408, 256, 2, keys={"activation_checkpoint": {"mode": "selective"}})
"""Is timed beside `SHARDED`, which recomputes nothing."""


class Timed(NamedTuple):
    """What a process has measured.

    Attributes:
        kernels: Kernel -> its median time.
        launch: Seconds that a kernel takes beside its work.
        wrapper: Seconds that an operator on a tensor subclass takes beside the operators that it runs.
        selective: Seconds that a block with selective recomputation takes beside its kernels.
        bandwidth: GB/s that a copy reads and writes, while the other processes copy, too.
    """

    kernels: dict[Kernel, float]
    launch: float
    wrapper: float
    selective: float
    bandwidth: float


class Step(NamedTuple):
    """A step of a sample job.

    Attributes:
        times: Kernel -> its median time.
        beside: Seconds of the step beside its kernels; of all of it on a GPU, where kernels overlap with launches.
        kernels: Number of kernels.
        wrappers: Number of operators on tensor subclasses.
    """

    times: dict[Kernel, float]
    beside: float
    kernels: float
    wrappers: float


class _Clock(TorchDispatchMode):
    """Times each operator that runs in it. On a GPU it waits for each."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.times: dict[Kernel, list[float]] = defaultdict(list)
        self.wrappers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            self.wrappers += 1
            return NotImplemented  # a DTensor or a weight in FP8, whose own operators come here next
        kwargs = kwargs or {}
        if (result := copied(self, func, args, kwargs)) is not NotImplemented:
            return result
        wait(self._device)
        started = time.perf_counter()
        result = func(*args, **kwargs)
        wait(self._device)
        seconds = time.perf_counter() - started
        call = describe(func, args, kwargs, result)
        if call is not None and isinstance(call.key, Kernel):
            self.times[call.key].append(seconds)
        return result


def measure(out: Path, log: Callable[[str], None], samples: Sequence[Sample] = ()) -> Gpu:
    """Measure this machine in two minutes, and write its rates to `out`.

    Args:
        samples: The jobs whose kernels are timed. Left out: ON_GPU or ON_CPU.

    Raises:
        UserError: nothing can be written there.
    """
    is_gpu = torch.cuda.is_available()
    samples = samples or (ON_GPU if is_gpu else ON_CPU)
    if is_gpu:
        base = _this_gpu()
        log("Timing the kernels of a step on the GPU ...")
        rates = [_rates(1, [_in_process(0, 1, samples)])]
        count = torch.cuda.device_count()
    else:
        base, rates, count = this_cpu(), [], 2
        for ranks in sorted({1, base.machine}):
            log(f"Timing the kernels of a step on {ranks} rank{'s' if ranks > 1 else ''} at a time ...")
            rates.append(_rates(ranks, in_processes(_in_process, ranks, base.machine // ranks, samples)))
    update: dict[str, Any] = {"rates": tuple(rates)}
    if count > 1:
        log(f"Timing collectives of {count} ranks ...")
        timed = timed_collectives(count, [count])
        update |= link(timed)
        if not is_gpu:
            timed += timed_collectives(2 * count, [count, 2 * count])
        update["collective"] = tuple(timed)
    today = datetime.date.today().isoformat()
    update["measured"] = f"measured {today}, torch {torch.__version__}, {platform.machine()}"
    result = base.model_copy(update=update)
    write_whole(out, tomlkit.dumps(result.model_dump(exclude_defaults=True)).encode())
    return result


def this_cpu() -> Gpu:
    """The cores and the memory of this machine, with the rates of one matmul of each dtype and of one copy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    side = 768
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, dtype=dtype) for _ in range(2))
        rates[dtype] = 2 * side**3 / _best(lambda a=a, b=b: a @ b) / 1e12
    data = torch.ones(32 << 20)
    bandwidth = 2 * data.nbytes / _best(data.clone) / 1e9
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Gpu(
        name=f"{cores} CPU core{'s' if cores > 1 else ''}",
        cpu=True,
        memory_gib=memory / GIB,
        bf16=rates[torch.bfloat16],
        fp32=rates[torch.float32],
        bandwidth=bandwidth,
        link=bandwidth / 4,  # a collective of gloo copies each byte a few times
        network=1.0,
        host=bandwidth,
        latency_us=300.0,
        machine=cores,
        measured="one matmul and one copy, timed now",
    )


def _this_gpu() -> Gpu:
    """This machine's GPU by its data sheet, or what can be measured in a second if it is in no table."""
    properties = torch.cuda.get_device_properties(0)
    memory, known = properties.total_memory / GIB, gpus.gpu_of_device(properties.name)
    if known is not None:
        return known.model_copy(update={"memory_gib": memory})
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(4096, 4096, dtype=dtype, device="cuda") for _ in range(2))
        rates[dtype] = 2 * 4096**3 / _best(lambda a=a, b=b: a @ b) / 1e12
    data = torch.ones(64 << 20, device="cuda")
    host = data.nbytes / _best(lambda: data.to("cpu")) / 1e9
    return Gpu(
        name=properties.name,
        memory_gib=memory,
        bf16=rates[torch.bfloat16],
        fp32=rates[torch.float32],
        bandwidth=2 * data.nbytes / _best(data.clone) / 1e9,
        link=host,
        network=12.5,
        host=host,
        machine=torch.cuda.device_count(),
    )


# ------------------------------------------------------------------------------------------------------------ kernels


def _in_process(rank: int, threads: int, samples: Sequence[Sample]) -> Timed:
    """Train the sample jobs in this process, which is a world of its own, and time their kernels."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if not torch.cuda.is_available():
        torch.set_num_threads(threads)
    dtypes = ("bfloat16",) if torch.cuda.is_available() else ("bfloat16", "float32")
    with process_group(_job(samples[0], dtypes[0]).job) as device:
        bandwidth = _bandwidth(device)
        jobs = [_job(sample, dtype) for sample in samples for dtype in (dtypes[:1] if sample.keys else dtypes)]
        *steps, plain, selective = _time_jobs(
            [*jobs, *(_job(each, dtypes[0]) for each in (SHARDED, SELECTIVE))], device
        )
    with fake_world(2, 0):  # the other rank takes no time
        (sharded,) = _time_jobs([_job(SHARDED, dtypes[0], 2)], device)
    wrapper = max(0.0, sharded.beside - plain.beside * sharded.kernels / plain.kernels) / sharded.wrappers
    chosen = max(0.0, selective.beside - plain.beside * selective.kernels / plain.kernels) / BLOCKS
    # On a GPU only the job with the smallest kernels waits for launches.
    launches = [step.beside / step.kernels for step in steps]
    launch = min(launches) if device.type == "cuda" else statistics.median_low(launches)
    kernels = _medians(step.times for step in steps)
    return Timed(kernels, launch, wrapper, chosen, bandwidth)


def _bandwidth(device: torch.device) -> float:
    """GB/s that a copy reads and writes. It is as large as the weights of a block, in memory that is allocated anew."""
    data = torch.ones(4 << 20, device=device)

    def copy() -> float:
        wait(device)
        started = time.perf_counter()
        data.clone()
        wait(device)
        return time.perf_counter() - started

    copy()
    return 2 * data.nbytes / statistics.median(_repeated(copy)) / 1e9


def _job(sample: Sample, dtype: str, ranks: int = 1) -> Run:
    model = {"dim": sample.dim, "n_layers": BLOCKS, "n_heads": sample.heads, "n_kv_heads": sample.heads // 2}
    training = {"seq_len": sample.length, "local_batch_size": sample.rows, "mixed_precision_param": dtype}
    job = {"model": {**model, "ffn_dim": sample.ffn_dim, "vocab_size": sample.vocab}, **sample.keys}
    job = {"activation_checkpoint": {"mode": "none"}, "parallelism": {"tensor_parallel_degree": ranks}, **job}
    return Run(JobConfig.model_validate({**job, "training": {**training, **sample.keys.get("training", {})}}), ranks)


def _time_jobs(runs: Sequence[Run], device: torch.device) -> list[Step]:
    """A step of each run, in turns."""
    steps = [_warm_step(run, device) for run in runs]
    turns = [[_time(step, device) for step in steps] for _ in range(TURNS)]
    return [
        Step(
            _medians(each.times for each in same),
            statistics.median(each.beside for each in same),
            same[0].kernels,
            same[0].wrappers,
        )
        for same in zip(*turns, strict=True)
    ]


def _medians(measured: Iterable[Mapping[Kernel, float]]) -> dict[Kernel, float]:
    """The median time of each kernel. A plan is compared with a usual step, not with the fastest one."""
    times: dict[Kernel, list[float]] = defaultdict(list)
    for each in measured:
        for kernel, seconds in each.items():
            times[kernel].append(seconds)
    return {kernel: statistics.median(seconds) for kernel, seconds in times.items()}


def _warm_step(run: Run, device: torch.device) -> Callable[[], float]:
    """A function that does a step of `run` and returns its seconds."""
    mesh = build_mesh(run.degrees, device.type)
    update = TrainStep(run, mesh, build_model(run, mesh, device, lambda _: None), device)
    training = run.job.training
    rows = [blank_microbatch(training.local_batch_size, training.seq_len, run.job.dataset.document_mask, device)]
    tokens = training.local_batch_size * training.seq_len

    def step() -> float:
        started = time.perf_counter()
        update(rows, tokens, 1e-4)
        wait(device)
        return time.perf_counter() - started

    step()
    step()
    return step


def _time(step: Callable[[], float], device: torch.device) -> Step:
    """What a step and its kernels take."""
    whole = statistics.median(_repeated(step))
    with _Clock(device) as clock:
        repeats = len(_repeated(step))
    times = {kernel: statistics.median(seconds) for kernel, seconds in clock.times.items()}
    count = sum(len(seconds) for seconds in clock.times.values()) / repeats
    busy = sum(times[kernel] * len(seconds) for kernel, seconds in clock.times.items()) / repeats
    beside = whole if device.type == "cuda" else max(0.0, whole - busy)
    return Step(times, beside, count, clock.wrappers / repeats)


def _repeated(step: Callable[[], float]) -> list[float]:
    """What `step` returns, until SECONDS are over."""
    end = time.perf_counter() + SECONDS
    results = [step()]
    while time.perf_counter() < end:
        results.append(step())
    return results


def _rates(ranks: int, timed: list[Timed]) -> Rates:
    """The means of what so many ranks have measured side by side."""
    first = timed[0].kernels

    def mean(kernel: Kernel) -> float:
        return sum(each.kernels.get(kernel, first[kernel]) for each in timed) / len(timed)

    matmuls = [
        gpus.Matmul(dtype=kernel.dtype, shape=kernel.shape, seconds=mean(kernel))
        for kernel in first
        if len(kernel.shape) == 3
    ]
    attention = [
        gpus.Attention(
            phase="backward" if "backward" in kernel.op else "forward",
            dtype=kernel.dtype,
            shape=kernel.shape,
            flops=kernel.flops,
            seconds=mean(kernel),
        )
        for kernel in first
        if len(kernel.shape) == 5
    ]
    sizes: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kernel in first:
        if not kernel.shape and kernel.bytes:
            sizes[kernel.op, kernel.dtype][kernel.bytes].append(mean(kernel))
    moving = [
        gpus.Kernel(op=op, dtype=dtype, bytes=size, seconds=statistics.mean(known[size]))
        for (op, dtype), known in sorted(sizes.items())
        for size in _spread(sorted(known))
    ]
    return Rates(
        ranks=ranks,
        launch_us=sum(each.launch for each in timed) / len(timed) * 1e6,
        wrapper_us=sum(each.wrapper for each in timed) / len(timed) * 1e6,
        selective_us=sum(each.selective for each in timed) / len(timed) * 1e6,
        bandwidth=sum(each.bandwidth for each in timed) / len(timed),
        matmul=tuple(matmuls),
        attention=tuple(attention),
        kernel=tuple(moving),
    )


def _spread(sizes: list[int]) -> list[int]:
    """At most MOST_SIZES of them, the first and the last among them."""
    if len(sizes) <= MOST_SIZES:
        return sizes
    return [sizes[round(i * (len(sizes) - 1) / (MOST_SIZES - 1))] for i in range(MOST_SIZES)]


def _best(call: Callable[[], Any], seconds: float = 0.15) -> float:
    """The shortest time of `call`, over so many seconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    call()
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        best = min(best, time.perf_counter() - started)
    return best
