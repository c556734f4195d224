"""Convert traces to a forecast: memory including overheads, and time from a roofline model.

Invariant: The efficiencies of kernels and links are constants of this module, each with its reason,
and do not depend on the job. The forecast time is accurate to within about a third. If you have the
hardware, a short run is more accurate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from titanlite.config.errors import format_count
from titanlite.config.run import Run
from titanlite.observe.flops import flops_per_token
from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import GIB, MIB, Gpu, count_cores, physical_memory
from titanlite.plan.counter import FLEX_OPS, VARLEN_OPS, Group, Work
from titanlite.plan.trace import RankTrace

# Estimates of the GPU memory of the CUDA context with its kernels, and of each process group
# (NCCL).
GPU_CONTEXT_BYTES = 512 * MIB
GPU_GROUP_BYTES = 100 * MIB
# Memory of Python, torch and gloo in a CPU process, including its share of the launcher and of the
# data worker, and the fraction of tensor memory that is lost to heap fragmentation.
# docs/internals/performance.md has jobs with 370 to 490 MiB. Compiled jobs with a vocabulary of
# 128,256 take up to 650 MiB more, for an unknown reason.
CPU_PROCESS_BYTES = 520 * MIB
CPU_FRAGMENTATION = 0.05

# Fractions of the peak FLOP/s that large matmuls reach. On an H100 and an A100, bfloat16 reaches
# about 70%, because the power limit lowers the clock under full load. An FP8 matmul draws as much
# power and has half the time for its memory traffic, so it reaches less.
MATMUL = {"float32": 0.85, "float8": 0.60, "bfloat16": 0.70}
# Flex attention is a Triton kernel with the design of FlashAttention 2, which reaches 35% of the
# peak on Hopper GPUs (https://arxiv.org/abs/2407.08608). Flex attention reaches 90% of the speed of
# FlashAttention 2 in the forward pass and 85% in the backward pass
# (https://pytorch.org/blog/flexattention).
FLEX = 0.31
# The backward pass of attention is less efficient than the forward pass.
ATTENTION_BACKWARD = 5 / 6
BANDWIDTH = 0.80  # of peak memory bandwidth; a copy of large tensors reaches about 85%
LINK = 0.75  # of peak link bandwidth; NCCL rings reach 340 to 370 of the 450 GB/s of an H100
# Slowdown of kernels that overlap with a ring collective, which occupies about a tenth of the
# multiprocessors of the GPU.
OVERLAP_PRICE = 0.1
# Async tensor parallelism hides traffic behind an adjacent matmul. It cannot hide the first chunk,
# nor the gradient of an input of several matmuls, which is summed before it is reduced. So about
# half is hidden.
ASYNC_HIDES = 0.5
# Seconds that a ring takes to pass its first chunk to the next GPU in a node (HOP) or to the next
# node (NETWORK_HOP), from the NCCL tuning model (src/graph/tuning.cc). Starting the collective
# takes `Gpu.latency_us`.
HOP = 3.4e-6
NETWORK_HOP = 14e-6
# Seconds that Python, autograd and the dispatcher take to launch a kernel. A GPU waits only if it
# runs kernels faster than this.
LAUNCH = 10e-6
CPU_NETWORK_GB_PER_SECOND = 1.0
# Estimated number of times that memory is accessed for each byte that gloo sends within a node.
GLOO_ACCESSES = 4
CPU_COLLECTIVE_LATENCY_US = 300.0


def forecast(run: Run, traces: Sequence[RankTrace], gpu: Gpu) -> Forecast:
    """Forecast the peak memory, step time and throughput of a run.

    The rank with the highest peak determines the memory, and the slowest rank determines the time.

    Args:
        run: The validated job and the number of ranks.
        traces: Result of `trace_run`: one trace per kind of pipeline rank.
        gpu: GPU of each rank; see `Gpu.of_rank`.
    """
    step_time = _time_slowest_rank(run, traces, gpu)
    step_seconds = step_time.total()
    step_tokens = run.global_batch_size * run.job.training.seq_len
    tokens_per_second = step_tokens / run.world_size / step_seconds  # of one GPU
    peak_trace = max(traces, key=lambda trace: trace.peak)
    return Forecast(
        job=run.job.job.config_file or "a job made in Python",
        world_size=run.world_size,
        gpu=gpu.name,
        rank=peak_trace.rank,
        peaks={str(trace.rank): trace.peak for trace in traces},
        peak=peak_trace.peak,
        moment=peak_trace.moment,
        kinds=dict(peak_trace.kinds),
        cpu_peak=peak_trace.cpu_peak,
        allowance=_estimate_overhead(run, peak_trace, gpu),
        memory=gpu.memory,
        step_seconds=step_seconds,
        parts=step_time.sort_parts(),
        hidden_seconds=step_time.hidden,
        tokens_per_second=tokens_per_second,
        mfu=_compute_mfu(run, gpu, tokens_per_second, is_causal=True),
        mfu_full_attention=_compute_mfu(run, gpu, tokens_per_second, is_causal=False),
    )


def _compute_mfu(run: Run, gpu: Gpu, tokens_per_second: float, is_causal: bool) -> float:
    """Return the model FLOPs utilization (MFU): useful FLOP/s as a fraction of the GPU peak.

    Args:
        run: The validated job and the number of ranks.
        gpu: GPU of each rank.
        tokens_per_second: Tokens per second of one GPU.
        is_causal: Count only the attention scores that the causal mask leaves visible.
    """
    flops = tokens_per_second * flops_per_token(run.arch, run.job.training.seq_len, is_causal)
    peak_flops = gpu.bf16 * 1e12
    return flops / peak_flops


def measure_cpu() -> Gpu:
    """Measure how fast all CPU cores of this node together multiply matrices and copy memory.

    The result describes the whole node as if it were a GPU, so that runs on CPUs can be planned.
    """
    num_cores = count_cores()
    data = torch.ones(32 << 20)  # exceeds the caches
    moved_gigabytes = 2 * data.nbytes / 1e9  # a copy reads and writes each byte
    gigabytes_per_second = moved_gigabytes / _measure_seconds(data.clone, num_threads=num_cores)

    matrix = torch.randn(768, 768)
    return Gpu(
        name=f"{format_count(num_cores, 'CPU core')} (one matmul and one copy, timed now)",
        cpu=True,
        memory_gib=physical_memory() / GIB,
        bf16=_measure_tflops(matrix.bfloat16(), num_cores),
        fp32=_measure_tflops(matrix, num_cores),
        bandwidth=gigabytes_per_second,
        # To send a byte to another process, gloo reads and writes it several times.
        link=gigabytes_per_second / GLOO_ACCESSES,
        network=CPU_NETWORK_GB_PER_SECOND,
        cpu_link=gigabytes_per_second,  # between "GPU" and CPU memory, which are the same here
        latency_us=CPU_COLLECTIVE_LATENCY_US,
        gpus_per_node=num_cores,
    )


def _measure_tflops(matrix: Tensor, num_threads: int) -> float:
    """Measure the TFLOP/s of the product of a square matrix with itself."""
    tera_flops = 2 * len(matrix) ** 3 / 1e12
    return tera_flops / _measure_seconds(lambda: matrix @ matrix, num_threads)


def _measure_seconds(function: Callable[[], Tensor], num_threads: int) -> float:
    """Return the shortest measured time of a function call, in seconds."""
    timer = Timer("function()", globals={"function": function}, num_threads=num_threads)
    return min(timer.blocked_autorange(min_run_time=0.05).times)


def _estimate_overhead(run: Run, trace: RankTrace, gpu: Gpu) -> int:
    """Estimate the bytes of memory that a rank needs besides its tensors.

    On a GPU, these are the CUDA context, NCCL, and memory that the allocator reserves but does not
    use. On a CPU, they are the memory of the process and fragmentation.
    """
    if gpu.cpu:
        return CPU_PROCESS_BYTES + int(CPU_FRAGMENTATION * trace.peak)
    return bytes_outside_allocator(run) + trace.reserved - trace.peak


def bytes_outside_allocator(run: Run) -> int:
    """Estimate the bytes of GPU memory that the CUDA context and NCCL use.

    The caching allocator of torch does not manage this memory.
    """
    num_groups = sum(degree > 1 for degree in astuple(run.degrees))
    return GPU_CONTEXT_BYTES + num_groups * GPU_GROUP_BYTES


@dataclass
class _StepTime:
    """Estimated time of a training step on one rank, in seconds.

    Attributes:
        parts: Seconds by category, such as "matmuls".
        hidden: Seconds of communication that overlap with kernels, and do not lengthen the step.
    """

    parts: defaultdict[str, float]
    hidden: float = 0.0

    def total(self) -> float:
        """Return the seconds of the whole step."""
        return sum(self.parts.values())

    def sort_parts(self) -> dict[str, float]:
        """Return the parts that take time, longest first."""
        longest_first = sorted(self.parts.items(), key=lambda part: -part[1])
        return {name: seconds for name, seconds in longest_first if seconds > 0}


def _time_slowest_rank(run: Run, traces: Iterable[RankTrace], gpu: Gpu) -> _StepTime:
    """Estimate the time of a training step on the slowest rank, for which all ranks wait."""
    times = [_time_step(run, trace, gpu) for trace in traces]
    _add_bubble(times, _bubble_share(run))
    return max(times, key=_StepTime.total)


def _time_step(run: Run, trace: RankTrace, gpu: Gpu) -> _StepTime:
    """Estimate the time of a training step on one rank.

    This excludes the pipeline bubble, in which a pipeline rank waits for other ranks.
    """
    time = _StepTime(defaultdict(float))
    for phase in ("forward", "backward", "optimizer"):
        work = [work for work in trace.work if work.phase == phase]
        _add_phase(time, phase, work, run, gpu)

    # With CPU offload, weights are copied to the GPU twice, for the forward and the backward pass,
    # and gradients to the CPU once. CPU memory holds weights, gradients and two moments, so the
    # copies transfer three quarters of its size.
    copy_seconds = 0.75 * trace.cpu_peak / (gpu.cpu_link * 1e9 * LINK)
    time.parts["copies to and from CPU memory"] = copy_seconds
    return time


def _add_phase(time: _StepTime, phase: str, work: Iterable[Work], run: Run, gpu: Gpu) -> None:
    """Add the time of the forward pass, the backward pass or the optimizer to a step time.

    FSDP collectives overlap with kernels, and so does half of the async tensor parallel traffic.
    All other collectives lengthen the step.

    Args:
        time: Time of the step, modified in place.
        phase: "forward", "backward" or "optimizer".
        work: Kernels and collectives of the phase.
        run: The validated job and the number of ranks.
        gpu: GPU of each rank.
    """
    compute = 0.0  # seconds of kernels
    launches = 0.0  # seconds in which the CPU launches these kernels
    overlapping = 0.0  # seconds of collectives that can run at the same time as kernels
    exposed = 0.0  # part of them for which kernels wait: first all-gather, last reduce-scatter
    can_overlap = phase != "optimizer" and not gpu.cpu
    is_async = run.job.parallelism.enable_async_tensor_parallel
    for item in work:
        group = item.group
        if group is None:  # the item is a kernel
            category, seconds = _time_kernels(item, gpu)
            if phase == "optimizer":
                category = phase
            time.parts[category] += seconds
            compute += seconds
            launches += item.count * LAUNCH
            continue

        seconds = _time_collectives(item, group, gpu)
        if can_overlap and group.name in ("fsdp", "replicate"):
            overlapping += seconds
            exposed += seconds / item.count
        else:
            hidden_share = ASYNC_HIDES if is_async and group.name == "tensor" else 0.0
            time.parts[f"collectives ({group.name})"] += seconds - hidden_share * seconds
            time.hidden += hidden_share * seconds

    # A GPU waits for launches only if they take longer than the kernels. Overlapping collectives
    # are visible if they take longer than both. For example, with kernels of 10 ms, launches of
    # 11 ms and collectives of 15 ms, the GPU waits 1 ms for launches and 4 ms for collectives.
    waiting = launches if gpu.cpu else max(0.0, launches - compute)
    visible = min(overlapping, max(overlapping - compute - waiting, exposed))
    hidden = overlapping - visible
    time.parts["launching kernels"] += waiting
    time.parts["collectives (fsdp)"] += visible + OVERLAP_PRICE * hidden
    time.hidden += hidden


def _time_kernels(work: Work, gpu: Gpu) -> tuple[str, float]:
    """Estimate the total time of several kernels of the same kind.

    Returns:
        Category, such as "matmuls", and time in seconds.
    """
    is_matmul = len(work.shape) == 3  # (m, k, n)
    is_attention = len(work.shape) == 5  # (batch, heads, queries, keys, head_dim)
    # FLOPs limit attention, bytes limit other kernels, and either can limit a matmul.
    if is_attention:
        return "attention", _attention_seconds(work, gpu)
    memory_seconds = work.bytes / (gpu.bandwidth * 1e9 * BANDWIDTH)
    if is_matmul:
        return "matmuls", max(_matmul_seconds(work, gpu), memory_seconds)
    return "memory-bound kernels", memory_seconds


def _attention_seconds(work: Work, gpu: Gpu) -> float:
    """Estimate the seconds that attention kernels take, from their FLOPs."""
    is_flex_or_varlen = work.op in (*FLEX_OPS, *VARLEN_OPS)
    # `FLEX` is the efficiency on Hopper GPUs. Assume it for every GPU with FP8.
    has_fp8 = gpu.fp8 > 0

    efficiency = gpu.attention
    if is_flex_or_varlen and has_fp8:
        efficiency = min(efficiency, FLEX)
    if "backward" in work.op:
        efficiency *= ATTENTION_BACKWARD
    peak_tflops = gpu.fp32 if work.dtype == "float32" else gpu.bf16
    return work.flops / (peak_tflops * 1e12 * efficiency)


def _matmul_seconds(work: Work, gpu: Gpu) -> float:
    """Estimate the seconds that matmuls take if they are limited only by FLOPs."""
    if work.dtype.startswith("float8") and gpu.fp8:
        flops_per_second = gpu.fp8 * 1e12 * MATMUL["float8"]
    elif work.dtype == "float32":
        flops_per_second = gpu.fp32 * 1e12 * MATMUL["float32"]
    else:
        flops_per_second = gpu.bf16 * 1e12 * MATMUL["bfloat16"]
    return work.flops / flops_per_second


def _time_collectives(work: Work, group: Group, gpu: Gpu) -> float:
    """Estimate the total seconds of several collectives, or of sends between two pipeline ranks.

    Args:
        work: Number of collectives and their total bytes.
        group: Process group of the collectives.
        gpu: Specification of the GPU of each rank, or of one rank's share of a CPU.
    """
    if group.size == 1:
        return 0.0

    # The nodes between the first and the last rank. On a CPU, all ranks share one node.
    num_nodes = 1 if gpu.cpu else math.ceil(group.span / gpu.gpus_per_node)

    if work.op == "send":  # directly to one other rank
        gigabytes_per_second = gpu.link if num_nodes == 1 else gpu.network
        latency_seconds = gpu.latency_us * 1e-6
        return _time_transfers(work, 1 / gigabytes_per_second, latency_seconds)

    # In a ring, each rank sends data to the next rank of the group.
    ring_seconds = _time_ring(work, group.size, num_nodes, gpu)
    if work.op == "all_reduce":  # a reduce-scatter, followed by an all-gather
        return 2 * ring_seconds
    return ring_seconds


def _time_ring(work: Work, num_ranks: int, num_nodes: int, gpu: Gpu) -> float:
    """Estimate the seconds of collectives in which each rank sends to the next one in a ring.

    With R ranks on N nodes, each link within a node carries a fraction (R - 1) / R of the tensor.
    Each node sends a fraction (N - 1) / N over the network. Its R / N ranks share this traffic, so
    each of them sends a fraction (N - 1) / R.
    """
    # Links and network transfer data at the same time, so the slower one determines the time.
    link_share = (num_ranks - 1) / num_ranks
    network_share = (num_nodes - 1) / num_ranks
    seconds_per_gigabyte = max(link_share / gpu.link, network_share / gpu.network)

    latency_seconds = gpu.latency_us * 1e-6
    if not gpu.cpu:
        latency_seconds += (num_ranks - num_nodes) * HOP + (num_nodes - 1) * NETWORK_HOP
    return _time_transfers(work, seconds_per_gigabyte, latency_seconds)


def _time_transfers(work: Work, seconds_per_gigabyte: float, latency_seconds: float) -> float:
    """Estimate the total seconds of several transfers over a link.

    Args:
        work: Number of transfers and their total bytes.
        seconds_per_gigabyte: Seconds at the peak bandwidth. Real transfers reach only a fraction
            of this bandwidth, the constant `LINK`.
        latency_seconds: Seconds to start one transfer.
    """
    return work.bytes * seconds_per_gigabyte / (LINK * 1e9) + work.count * latency_seconds


def _bubble_share(run: Run) -> float:
    """Estimate the pipeline bubble, the time in which a pipeline rank is idle.

    Returns:
        Idle time of a rank, as a fraction of the mean busy time of the other ranks.
    """
    num_ranks = run.degrees.pipeline
    stages_per_rank = len(run.stages) // num_ranks
    # The formula is from https://arxiv.org/abs/2104.04473.
    bubble_share = (num_ranks - 1) / (stages_per_rank * run.microbatches)

    # Zero-bubble schedules delay weight gradients to fill two thirds of the bubble
    # (https://arxiv.org/abs/2401.10241). With enough microbatches, the V-shaped schedule fills all
    # of it.
    schedule = run.job.parallelism.pipeline_parallel_schedule
    if schedule == "ZBVZeroBubble" and run.microbatches >= 2 * num_ranks:
        return 0.0
    if schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        unfilled = 1 / 3
        return bubble_share * unfilled
    return bubble_share


def _add_bubble(times: Sequence[_StepTime], share: float) -> None:
    """Add the pipeline bubble, in which a rank waits for other ranks, to each step time.

    Args:
        times: Step time of each traced rank, modified in place.
        share: Idle time of a rank, relative to the mean busy time of the other ranks.
    """
    busy = [time.total() - time.parts["optimizer"] for time in times]
    for i, time in enumerate(times):
        # A single traced rank represents the others.
        busy_others = busy if len(busy) == 1 else busy[:i] + busy[i + 1 :]
        time.parts["pipeline bubble"] = share * sum(busy_others) / len(busy_others)
