"""From what a trace has counted to a forecast: memory with its allowance, and time at the rates of a data sheet.

Invariant: the shares of a peak that kernels reach are constants of this module, each with its reason. None depends on
the job. This is a roofline, right to a third: a short real run says more of time wherever the device is at hand.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from titanlite.config.run import Run
from titanlite.observe.flops import flops_per_token
from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import GIB, MIB, Gpu, machine_memory
from titanlite.plan.counter import FLEX_OPS, Work
from titanlite.plan.trace import RankTrace

# Of a GPU, as estimates: 0.5 GiB for the CUDA context with its kernels, 0.1 GiB for each process group (NCCL). torch's
# allocator reserves 1% more than its streams have at their most, if segments can be extended (benchmarks/planner.md).
GPU_CONTEXT, GPU_GROUP, GPU_LOST = 512 * MIB, 100 * MIB, 0.01
GPU_CUBLAS = 33 * MIB  # the workspaces of cuBLAS on an H100, which torch's allocator hands out
# Of a process on a CPU: what Python, torch and gloo take, with its share of the launcher and of the process that reads,
# and 5% of the tensors lost between blocks of the heap. In the jobs of docs/performance.md it is 370 to 490 MiB. Those
# with a vocabulary of 128,256, compiled, take up to 650 MiB more. Why is not known.
CPU_FIXED, CPU_LOST = 520 * MIB, 0.05

# Large matmuls reach about 70% of the data sheet on an H100 and an A100, because under full load the clock falls until
# the power limit holds. An FP8 matmul draws as much power and has half the time for its memory, so it reaches less.
MATMUL = {"float32": 0.85, "float8": 0.60, "bfloat16": 0.70}
# Flex attention, which context parallelism uses, is a triton kernel of FlashAttention 2's design. Since Hopper the
# tensor cores are faster than that keeps busy: it reaches 35% of the peak (https://arxiv.org/abs/2407.08608), and flex
# attention 90% of that forward and 85% backward (https://pytorch.org/blog/flexattention).
FLEX = 0.31
BANDWIDTH = 0.80  # of the memory's peak; a copy of large tensors reaches about 85%
LINK = 0.75  # of a link's peak; NCCL's rings carry 340 to 370 of the 450 GB/s of an H100
# A ring's collective takes as many of the GPU's processors as its copies need, about a tenth. What computes meanwhile
# has so many less.
OVERLAP_PRICE = 0.1
# Async tensor parallelism hides the traffic that has a matmul next to it: not the gradients of inputs of several
# matmuls, which are added before they are reduced, and not the first piece. That leaves about half.
ASYNC_HIDES = 0.5
# Seconds in which a ring passes its first piece on, by NCCL's own model (src/graph/tuning.cc): to the next device of a
# machine, and to the next machine. `Gpu.latency_us` is how long it takes to start.
HOP, NETWORK_HOP = 3.4e-6, 14e-6
# Seconds in which Python, autograd and the dispatcher launch a kernel. A GPU only waits for them if it is faster.
LAUNCH = 10e-6


def forecast(run: Run, traces: Sequence[RankTrace], gpu: Gpu) -> Forecast:
    """What the traces of a run mean on a device, of which each rank has one (`Gpu.of_rank`)."""
    worst = max(traces, key=lambda trace: trace.peak)
    times = {trace.rank: _parts(run, trace, gpu) for trace in traces}
    if share := _bubble(run):  # each rank waits for the first and the last microbatch of the others
        busy = {rank: sum(parts.values()) - parts["optimizer"] for rank, (parts, _) in times.items()}
        for rank, (parts, _) in times.items():
            others = [seconds for other, seconds in busy.items() if other != rank] or [busy[rank]]
            parts["pipeline bubble"] = share * sum(others) / len(others)
    parts, hidden = max(times.values(), key=lambda each: sum(each[0].values()))
    seconds, training = sum(parts.values()), run.job.training
    speed = run.global_batch_size * training.seq_len / run.world_size / seconds
    return Forecast(
        job=run.job.job.config_file or "a job made in Python",
        world_size=run.world_size,
        gpu=gpu.name,
        rank=worst.rank,
        peaks={str(trace.rank): trace.peak for trace in traces},
        peak=worst.peak,
        moment=worst.moment,
        kinds=dict(worst.kinds),
        host=worst.host,
        allowance=_allowance(run, worst, gpu),
        memory=gpu.memory,
        step_seconds=seconds,
        parts={name: seconds for name, seconds in sorted(parts.items(), key=lambda part: -part[1]) if seconds > 0},
        hidden_seconds=hidden,
        tokens_per_second=speed,
        mfu=speed * flops_per_token(run.arch, training.seq_len) / (gpu.bf16 * 1e12),
    )


def this_cpu() -> Gpu:
    """The cores and the memory of this machine, with the rates of one matmul of each dtype and of one copy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def seconds(words: str, tensor: Tensor) -> float:
        timer = Timer(words, globals={"a": tensor}, num_threads=cores)
        return min(timer.blocked_autorange(min_run_time=0.05).times)

    side, data = torch.randn(768, 768), torch.ones(32 << 20)
    bandwidth = 2 * data.nbytes / seconds("a.clone()", data) / 1e9
    return Gpu(
        name=f"{cores} CPU core{'s' if cores > 1 else ''} (one matmul and one copy, timed now)",
        cpu=True,
        memory_gib=machine_memory() / GIB,
        bf16=2 * 768**3 / seconds("a @ a", side.bfloat16()) / 1e12,
        fp32=2 * 768**3 / seconds("a @ a", side) / 1e12,
        bandwidth=bandwidth,
        link=bandwidth / 4,  # a collective of gloo copies each byte a few times
        network=1.0,
        host=bandwidth,
        latency_us=300.0,
        machine=cores,
    )


def _allowance(run: Run, trace: RankTrace, gpu: Gpu) -> int:
    """Bytes beside those of tensors that a rank takes."""
    if gpu.cpu:
        return CPU_FIXED + int(CPU_LOST * trace.peak)
    return beside_torch(run) + GPU_CUBLAS + trace.reserved - trace.peak + int(GPU_LOST * trace.reserved)


def beside_torch(run: Run) -> int:
    """Bytes of a GPU that torch's allocator does not know of."""
    degree = run.degrees
    groups = sum(size > 1 for size in (degree.pipeline, degree.replicate, degree.shard, degree.context, degree.tensor))
    return GPU_CONTEXT + groups * GPU_GROUP


def _parts(run: Run, trace: RankTrace, gpu: Gpu) -> tuple[defaultdict[str, float], float]:
    """Seconds of each part of a step on one rank, and seconds of communication that other work hides."""
    parts, hidden = defaultdict[str, float](float), 0.0
    hides = () if gpu.cpu else ("fsdp", "replicate")
    tensor_hides = ASYNC_HIDES * run.job.parallelism.enable_async_tensor_parallel
    for phase in ("forward", "backward", "optimizer"):
        busy = launches = hideable = first = 0.0
        for work in (each for each in trace.work if each.phase == phase):
            if work.group is not None:
                seconds = _collective(work, work.group, gpu)
                if work.group[0] in hides and phase != "optimizer":
                    hideable += seconds
                    first += seconds / work.count  # all wait for the first gather and the last reduction
                else:
                    behind = tensor_hides * seconds if work.group[0] == "tensor" else 0.0
                    parts[f"collectives ({work.group[0]})"] += seconds - behind
                    hidden += behind
                continue
            name, seconds = _kernels(work, gpu)
            parts["optimizer" if phase == "optimizer" else name] += seconds
            busy += seconds
            launches += work.count * LAUNCH
        waits = launches if gpu.cpu else max(0.0, launches - busy)
        parts["launching kernels"] += waits
        shown = min(hideable, max(hideable - busy - waits, first))
        parts["collectives (fsdp)"] += shown + OVERLAP_PRICE * (hideable - shown)
        hidden += hideable - shown
    # With CPU offload weights go to the device, twice, gradients to the host, and the update there at half of its rate.
    # The host has weights, gradients and two moments, so the copies read or write three quarters of it.
    parts["copies to and from host memory"] = 0.75 * trace.host / (gpu.host * 1e9 * LINK)
    return parts, hidden


def _kernels(work: Work, gpu: Gpu) -> tuple[str, float]:
    """What the kernels of an entry are, and their seconds."""
    moving = work.bytes / (gpu.bandwidth * 1e9 * BANDWIDTH)
    peak = gpu.fp32 if work.dtype == "float32" else gpu.bf16
    if len(work.shape) == 5:
        flex = work.op.removeprefix("aten.") in FLEX_OPS and gpu.fp8 > 0
        reached = (min(gpu.attention, FLEX) if flex else gpu.attention) * (5 / 6 if "backward" in work.op else 1)
        return "attention", work.flops / (peak * 1e12 * reached)
    if len(work.shape) != 3:
        return "memory-bound kernels", moving
    kind = work.dtype if work.dtype == "float32" else "bfloat16"
    if work.dtype.startswith("float8") and gpu.fp8:
        kind, peak = "float8", gpu.fp8
    return "matmuls", max(work.flops / (peak * 1e12 * MATMUL[kind]), moving)


def _collective(work: Work, group: tuple[str, int, int], gpu: Gpu) -> float:
    """Seconds of all collectives of an entry, by the ring algorithm.

    A ring of n ranks moves (n - 1) / n of the tensor over each link, and twice as much to reduce and gather it. In a
    group that spans machines, those of its ranks that share a machine share what comes in from the others.
    """
    _, ranks, span = group
    if ranks == 1:
        return 0.0
    machines = 1 if gpu.cpu else math.ceil(span / gpu.machine)
    links, networks = (ranks - 1) / ranks, (machines - 1) / ranks
    if work.op == "send":
        links, networks = float(machines == 1), float(machines > 1)
    seconds = work.bytes * max(links / gpu.link, networks / gpu.network) / (LINK * 1e9)
    hops = 0.0 if gpu.cpu or work.op == "send" else (ranks - machines) * HOP + (machines - 1) * NETWORK_HOP
    return (2 if work.op == "all_reduce" else 1) * (seconds + work.count * (gpu.latency_us * 1e-6 + hops))


def _bubble(run: Run) -> float:
    """Idle time of a pipeline rank, as a share of the busy time of the others (https://arxiv.org/abs/2104.04473).

    It is (p - 1) / (v m) with p ranks, v stages on each and m microbatches. Schedules that delay the gradients of
    weights fill two thirds of it with them (https://arxiv.org/abs/2401.10241); the V-shaped one fills it all once there
    are 2 p microbatches.
    """
    ranks, per_rank = run.degrees.pipeline, len(run.stages) // run.degrees.pipeline
    left = {"InterleavedZeroBubble": 1 / 3, "ZBVZeroBubble": 1 / 3 if run.microbatches < 2 * ranks else 0.0}
    share = (ranks - 1) / (per_rank * run.microbatches)
    return share * left.get(run.job.parallelism.pipeline_parallel_schedule, 1.0)
