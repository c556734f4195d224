"""How long a step takes: what a trace has counted, at the rates of a device.

Invariant: the shares of a peak that kernels reach are constants of this module, each with its reason. None depends on
the job. Where a device was measured, its measurements are used instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from titanlite.config.run import Run
from titanlite.observe.flops import flops_per_token
from titanlite.observe.gpus import WRAPPER, Collective, Gpu, Kernel, Rates
from titanlite.plan.counts import RankTrace, Traffic, Work

# Large matmuls reach about 70% of the data sheet on an H100 and an A100, because under full load the clock falls until
# the power limit holds. An FP8 matmul draws as much power and has half the time for its memory, so it reaches less.
MATMUL = {"bfloat16": 0.70, "float16": 0.70, "float32": 0.85, "float8": 0.60}
# Fused attention computes its softmax on units other than the tensor cores, so it reaches less. Published figures of
# FlashAttention 2 on an A100 and of cuDNN on an H100, heads of 128, the backward pass counted as five matmuls.
ATTENTION = {"forward": 0.60, "backward": 0.50}
BANDWIDTH = 0.80  # of the memory's peak; a copy of large tensors reaches about 85%
LINK = 0.75  # of a link's peak; NCCL's rings carry 340 to 370 of the 450 GB/s of an H100
# A ring's collective takes as many of the GPU's processors as its copies need, about a tenth. What computes meanwhile
# has so many less.
OVERLAP_PRICE = 0.1
# The compiler fuses chains of element-wise operators, so that only what enters and leaves a chain is in memory. Counted
# by hand on a block of Llama 8b, in hidden states that are read or written: 60 before, 23 after.
FUSED_BYTES = 0.4
FUSED_KERNELS = 0.25
# Microseconds in which Python, autograd and the dispatcher launch a kernel. The device only waits for them if it is
# faster.
LAUNCH_US = 10.0
# Microseconds in which Python finds what an operator on a DTensor or on a tensor in FP8 has to run. It is two to three
# launches on a CPU.
WRAPPER_US = 25.0
# Microseconds in which Python chooses, operator by operator, what a block keeps, and finds it again when it recomputes.
SELECTIVE_US = 1500.0
# A kernel that moves fewer bytes takes most of its time to start.
STARTING_BYTES = 2**16
# What the compiler does not fuse: copies into and out of FSDP's buffers, look-ups, and the optimizer's own kernel.
_UNFUSED = (
    "fsdp.",
    "aten._foreach",
    "aten._fused",
    "aten.split_with_sizes",
    "aten.embedding",
    "aten._chunk_cat",
    "float8.cast",
)


@dataclass(frozen=True)
class StepTime:
    """How long one optimizer step of the slowest rank takes, in seconds.

    Attributes:
        rank: The slowest rank.
        parts: What takes the time -> seconds. They add up to `seconds`.
        hidden: Seconds of communication that other work hides.
        tokens_per_second: Tokens of all ranks in a second, divided by the number of ranks.
        mfu: Share of the peak bfloat16 FLOP/s, as metrics.jsonl has it.
        days: For all training.steps of the job.
        basis: Where the rates come from.
    """

    rank: int
    parts: dict[str, float]
    hidden: float
    tokens_per_second: float
    mfu: float
    days: float
    basis: str
    seconds: float = field(default=0.0)

    @property
    def dominant(self) -> str:
        """The part that takes the most time."""
        return max(self.parts, key=lambda part: self.parts[part])


def step_time(run: Run, traces: Sequence[RankTrace], gpu: Gpu) -> StepTime:
    """The time of a step, which is that of its slowest rank."""
    clock = Clock(run, gpu)
    times = {trace.rank: clock.rank_parts(trace) for trace in traces}
    if run.degrees.pipeline > 1 and (share := bubble(run)):
        _add_bubbles(times, share)
    rank = max(times, key=lambda number: sum(times[number][0].values()))
    parts, hidden = times[rank]
    seconds = sum(parts.values())
    tokens = run.global_batch_size * run.job.training.seq_len / run.world_size
    peak = gpu.bf16 * 1e12 / (min(run.world_size, gpu.machine) if gpu.cpu else 1)
    return StepTime(
        rank,
        dict(sorted(parts.items(), key=lambda part: -part[1])),
        hidden,
        tokens / seconds,
        tokens / seconds * flops_per_token(run.arch, run.job.training.seq_len) / peak,
        seconds * run.job.training.steps / 86400,
        gpu.measured or f"data sheet of {gpu.name}",
        seconds,
    )


class Clock:
    """Times the kernels and collectives of a run on a device."""

    def __init__(self, run: Run, gpu: Gpu) -> None:
        self._run, self._gpu = run, gpu
        self._fused = run.compiles("model")
        self._here = here = run.world_size if gpu.cpu else 1  # all ranks of a CPU run are on one machine
        self._rates = min(gpu.rates, key=lambda rates: abs(rates.ranks - here), default=None)
        # A CPU's rates are those of the machine. Ranks share them, and more ranks than cores wait for each other.
        self._share = 1 / min(here, gpu.machine) if gpu.cpu else 1.0
        self._crowd = max(1.0, here / gpu.machine) if gpu.cpu else 1.0
        self._launch = (self._rates.launch_us if self._rates else LAUNCH_US) * 1e-6
        self._wrapper = (self._rates.wrapper_us if self._rates else WRAPPER_US) * 1e-6
        self._selective = (self._rates.selective_us if self._rates else SELECTIVE_US) * 1e-6

    def rank_parts(self, trace: RankTrace) -> tuple[dict[str, float], float]:
        """Seconds of each part of a step on one rank, and seconds of communication that other work hides."""
        parts: dict[str, float] = {}
        hidden = 0.0
        for phase in ("forward", "backward", "optimizer"):
            work = [each for each in trace.work if each.phase == phase]
            own = {"matmuls": 0.0, "attention": 0.0, "memory-bound kernels": 0.0}
            for each in work:
                own[self._kind(each)] += self._seconds(each) * self._crowd
            launches = sum(map(self._launching, work))
            if phase != "optimizer":
                launches += self._choosing(trace) / 2
            launches *= self._crowd
            busy = sum(own.values())
            # A CPU computes what it launches; a GPU only waits for launches that take longer than its kernels.
            waits = launches if self._gpu.cpu else max(0.0, launches - busy)
            if phase == "optimizer":
                own = {"optimizer": busy}
            shown, covered = self._exposed(trace.traffic, phase, busy + waits)
            hidden += covered
            for name, seconds in {**own, "launching kernels": waits, **shown}.items():
                parts[name] = parts.get(name, 0.0) + seconds
        if (offload := self._offload(trace)) > 0:
            parts["copies to and from host memory"] = offload
        return {name: seconds for name, seconds in parts.items() if seconds > 0}, hidden

    # ------------------------------------------------------------------------------------------------------ kernels

    def _kind(self, work: Work) -> str:
        if len(work.shape) == 3:
            return "matmuls"
        return "attention" if len(work.shape) == 5 else "memory-bound kernels"

    def _seconds(self, work: Work) -> float:
        """Of all kernels of an entry."""
        if len(work.shape) == 3:
            return self._matmul(work)
        if len(work.shape) == 5:
            return self._attention(work)
        return self._memory_bound(work)

    def _matmul(self, work: Work) -> float:
        rates = [each for each in self._measured().matmul if each.dtype == work.dtype] if self._rates else []
        if rates:
            return work.flops / _near_rate(
                work.shape, [(each.shape, 2 * math.prod(each.shape) / each.seconds) for each in rates]
            )
        peak = {"float32": self._gpu.fp32, "float64": self._gpu.fp32 / 2}.get(work.dtype, self._gpu.bf16)
        kind = work.dtype
        if work.dtype.startswith("float8"):
            # Without FP8 the matmul is emulated in bfloat16.
            kind, peak = ("float8", self._gpu.fp8) if self._gpu.fp8 else ("bfloat16", self._gpu.bf16)
        compute = work.flops / (peak * 1e12 * MATMUL.get(kind, MATMUL["bfloat16"]) * self._share)
        return max(compute, self._moving(work.bytes))

    def _attention(self, work: Work) -> float:
        measured = self._measured().attention if self._rates else ()
        kind = "backward" if "backward" in work.op else "forward"  # a backward pass may repeat the forward kernel
        known = [each for each in measured if (each.dtype, each.phase) == (work.dtype, kind)]
        if known:
            share = work.flops / work.count / math.prod(work.shape)  # twice as large where a mask decides
            alike = [each for each in known if each.flops / math.prod(each.shape) == share] or known
            return work.flops / _near_rate(work.shape, [(each.shape, each.flops / each.seconds) for each in alike])
        peak = self._gpu.fp32 if work.dtype == "float32" else self._gpu.bf16
        return work.flops / (peak * 1e12 * ATTENTION[kind] * self._share)

    def _memory_bound(self, work: Work) -> float:
        fused = FUSED_BYTES if self._is_fused(work) else 1.0
        if self._rates and work.count:
            known = [each for each in self._rates.kernel if (each.op, each.dtype) == (work.op, work.dtype)]
            if known:
                return work.count * fused * self._near_kernel(work.bytes / work.count, known)
        return self._moving(work.bytes * fused)

    def _near_kernel(self, size: float, known: Sequence[Kernel]) -> float:
        """Seconds of a kernel that moves `size` bytes. If the largest measured one took its time to start, it tells
        nothing of larger ones: there further bytes take what the memory takes."""
        largest = max(known, key=lambda each: each.bytes)
        if size > largest.bytes and largest.bytes < STARTING_BYTES:
            return largest.seconds + self._moving(size - largest.bytes)
        return _near_seconds(size, known)

    def _moving(self, size: float) -> float:
        if self._rates:
            return size / (self._rates.bandwidth * 1e9)
        return size / (self._gpu.bandwidth * 1e9 * BANDWIDTH * self._share)

    def _is_compiled(self, work: Work) -> bool:
        return self._run.compiles("optimizer") if work.phase == "optimizer" else self._fused

    def _is_fused(self, work: Work) -> bool:
        return self._is_compiled(work) and not work.shape and not work.op.startswith(_UNFUSED)

    def _launching(self, work: Work) -> float:
        """Seconds in which Python launches all kernels of an entry."""
        if work.op == WRAPPER:
            return 0.0 if self._is_compiled(work) else work.count * self._wrapper
        return work.count * self._launch * (FUSED_KERNELS if self._is_fused(work) else 1.0)

    def _choosing(self, trace: RankTrace) -> float:
        """Seconds in which Python chooses what the blocks of a rank keep, and finds it again."""
        recompute = self._run.job.activation_checkpoint
        if self._fused or (recompute.mode, recompute.selective_ac_option) != ("selective", "op"):
            return 0.0
        blocks = sum(len(self._run.stages[stage]) for stage in trace.stages)
        return blocks * self._run.microbatches * self._selective

    def _measured(self) -> Rates:
        assert self._rates is not None
        return self._rates

    # -------------------------------------------------------------------------------------------------- collectives

    def _exposed(self, traffic: Iterable[Traffic], phase: str, busy: float) -> tuple[dict[str, float], float]:
        """Seconds that collectives of a phase add to it, by group, and seconds that its `busy` time hides."""
        shown: dict[str, float] = {}
        hideable = first = 0.0
        for each in traffic:
            if each.phase != phase or each.ranks == 1:
                continue
            seconds = self.collective(each)
            overlaps = each.group in ("fsdp", "replicate") and phase != "optimizer" and not self._gpu.cpu
            if each.group == "tensor" and self._run.job.parallelism.enable_async_tensor_parallel:
                overlaps = True
            if overlaps:
                hideable += seconds
                first += seconds / each.count  # nothing computes before the first gather or after the last reduction
            else:
                name = f"collectives ({each.group})"
                shown[name] = shown.get(name, 0.0) + seconds
        if hideable:
            exposed = min(hideable, max(hideable - busy, first))
            shown["collectives (fsdp)"] = shown.get("collectives (fsdp)", 0.0) + exposed
            shown["collectives (fsdp)"] += OVERLAP_PRICE * (hideable - exposed)
            return shown, hideable - exposed
        return shown, 0.0

    def collective(self, traffic: Traffic) -> float:
        """Seconds of all collectives of an entry, by the ring algorithm.

        A ring of n ranks moves (n - 1) / n of the tensor over each link, and twice as much to reduce and gather it. In
        a group that spans machines, those of its ranks that share a machine share what comes in from the others.
        """
        gpu, ranks = self._gpu, traffic.ranks
        measured = [each for each in gpu.collective if (each.op, each.ranks) == (traffic.op, ranks)]
        if measured and traffic.count:
            together = min((each.together for each in measured), key=lambda number: abs(number - self._here))
            measured = [each for each in measured if each.together == together]
            more = max(1.0, self._here / max(together, gpu.machine)) if gpu.cpu else 1.0
            return more * traffic.count * _near_seconds(traffic.bytes / traffic.count, measured)
        machines = 1 if gpu.cpu else math.ceil(traffic.span / gpu.machine)
        together = math.ceil(ranks / machines)
        times = 2 if traffic.op == "all_reduce" else 1
        if traffic.op in ("send", "broadcast"):
            links, networks = 1.0, 1.0 if machines > 1 else 0.0
            links -= networks
        elif traffic.op == "all_to_all":
            links, networks = (together - 1) / ranks / ranks, (ranks - together) / ranks / ranks
        else:
            links, networks = (ranks - 1) / ranks, (machines - 1) / machines / together
        efficiency = 1.0 if gpu.rates else LINK
        slowest = max(links / gpu.link, networks / gpu.network)
        hops = (together - 1) * 1e-6 + (machines - 1) * 5e-6
        each = gpu.latency_us * 1e-6 + hops if not gpu.cpu else gpu.latency_us * 1e-6 * max(1, ranks - 1)
        return self._crowd * times * (traffic.bytes * slowest / (efficiency * 1e9) + traffic.count * each)

    def _offload(self, trace: RankTrace) -> float:
        """Of weights to the device, twice, of gradients to the host, and of the update there, at half of its rate."""
        if not self._run.job.training.enable_cpu_offload or self._gpu.cpu:
            return 0.0
        # The host has weights, gradients and two moments, so the copies read or write three quarters of it.
        return 0.75 * trace.host / (self._gpu.host * 1e9 * LINK)


def _add_bubbles(times: Mapping[int, tuple[dict[str, float], float]], share: float) -> None:
    """Let each pipeline rank wait for the first and the last microbatch of the others, which hold other layers."""
    busy = {rank: sum(parts.values()) - parts.get("optimizer", 0.0) for rank, (parts, _) in times.items()}
    for rank, (parts, _) in times.items():
        others = [seconds for other, seconds in busy.items() if other != rank] or [busy[rank]]
        parts["pipeline bubble"] = share * sum(others) / len(others)


def bubble(run: Run) -> float:
    """Idle time of a pipeline rank, as a share of the busy time of the others (https://arxiv.org/abs/2104.04473).

    It is (p - 1) / (v m) with p ranks, v stages on each and m microbatches. Schedules that delay the gradients of
    weights fill two thirds of it with them (https://arxiv.org/abs/2401.10241); the V-shaped one fills it all once there
    are 2 p microbatches.
    """
    ranks, per_rank = run.degrees.pipeline, len(run.stages) // run.degrees.pipeline
    share = (ranks - 1) / (per_rank * run.microbatches)
    schedule = run.job.parallelism.pipeline_parallel_schedule
    if schedule == "InterleavedZeroBubble":
        return share / 3
    if schedule == "ZBVZeroBubble":
        return share / 3 if run.microbatches < 2 * ranks else 0.0
    return (ranks - 1) / run.microbatches if schedule == "LoopedBFS" and per_rank == 1 else share


def _near_rate(shape: Sequence[int], measured: Iterable[tuple[Sequence[int], float]]) -> float:
    """FLOP/s at a shape, from those at measured shapes: a mean of the logarithms, weighted by the inverse square
    distance.

    The distance is that of the logarithms of the sides. So a shape that was measured gets its own rate.
    """
    total = weights = 0.0
    for other, rate in measured:
        distance = sum(math.log(a / b) ** 2 for a, b in zip(shape, other, strict=True))
        weight = 1 / (distance + 1e-6) ** 2
        total += weight * math.log(rate)
        weights += weight
    return math.exp(total / weights)


def _near_seconds(size: float, measured: Sequence[Kernel | Collective]) -> float:
    """Seconds of a kernel or of a collective that moves `size` bytes: between two measured sizes on a line, above
    them in proportion, and below them as long as for the smallest, because it takes so long to start."""
    points = sorted((each.bytes, each.seconds) for each in measured)
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    if size <= points[0][0]:
        return points[0][1]
    for (low, fast), (high, slow) in pairwise(points):
        if low <= size <= high:
            return fast + (slow - fast) * (size - low) / (high - low)
    raise AssertionError("unreachable: the points are sorted")
