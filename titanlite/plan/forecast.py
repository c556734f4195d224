"""From a run and a device to a forecast: traces, the allowance beside tensors, and time.

Invariant: a forecast of a run depends on the run and the device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from titanlite.config.run import Run
from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import Gpu
from titanlite.observe.kinds import HOST
from titanlite.plan.counts import RankTrace
from titanlite.plan.time import step_time

Tracer = Callable[[Run], Sequence[RankTrace]]

MIB = 2**20
# Of a GPU: 0.5 GiB for the CUDA context and the kernels that are loaded, 0.5 for cuBLAS and for the sums of gradients
# that wait for a collective. NCCL has buffers of about 0.1 GiB for each process group. 3% of the tensors are lost
# between blocks of the allocator, which has expandable segments.
GPU_FIXED, GPU_GROUP, GPU_LOST = 1024 * MIB, 100 * MIB, 0.03
# Of a process on a CPU: what Python and torch take (docs/performance.md: 356 MiB with the smallest model, of which
# tensors are a few), and 5% of the tensors lost between blocks of the heap. Another 130 MiB are the process that reads.
CPU_FIXED, CPU_LOST = 480 * MIB, 0.05


def allowance(run: Run, peak: int, gpu: Gpu) -> int:
    """Bytes beside those of tensors that a rank takes."""
    if gpu.cpu:
        return CPU_FIXED + int(CPU_LOST * peak)
    degree = run.degrees
    groups = sum(size > 1 for size in (degree.pipeline, degree.replicate, degree.shard, degree.context, degree.tensor))
    return GPU_FIXED + groups * GPU_GROUP + int(GPU_LOST * peak)


def memory_of_rank(run: Run, gpu: Gpu) -> int:
    """Bytes that a rank may take. The ranks of a CPU run share one machine."""
    return gpu.memory // run.world_size if gpu.cpu else gpu.memory


def traces_of(run: Run, gpu: Gpu, trace: Tracer) -> Sequence[RankTrace]:
    """The traces of a run as it is on a device.

    The compiler is left out, because it needs real tensors; `plan.time` knows what it fuses. A trace emulates FP8, so
    on a device that has it the kernels are those of a step in bfloat16, whose matmuls in FP8 also cast their inputs.
    """
    eager = _with(run, "compile", {"enable": False})
    traces = trace(eager)
    float8 = run.job.float8
    if not float8.enable or float8.emulate or not gpu.fp8:
        return traces
    from titanlite.plan.fp8 import in_fp8  # it imports torch

    plain = trace(_with(eager, "float8", {"enable": False}))
    return [replace(own, work=tuple(in_fp8(run, other.work))) for own, other in zip(traces, plain, strict=True)]


def _with(run: Run, section: str, values: dict[str, object]) -> Run:
    changed = getattr(run.job, section).model_copy(update=values)
    return Run(run.job.model_copy(update={section: changed}), run.world_size)


def _in_one_memory(trace: RankTrace) -> RankTrace:
    """The trace of a rank whose device is the host."""
    beside = {HOST: trace.together - trace.peak} if trace.together > trace.peak else {}
    return replace(trace, peak=trace.together, kinds={**trace.kinds, **beside}, host=0)


def forecast(run: Run, traces: Sequence[RankTrace], gpu: Gpu, assumed: bool = False) -> Forecast:
    """What the traces of a run mean on a device."""
    if gpu.cpu:
        traces = [_in_one_memory(trace) for trace in traces]
    worst = max(traces, key=lambda trace: trace.peak)
    time = step_time(run, traces, gpu)
    return Forecast(
        job=run.job.job.config_file or "a job made in Python",
        world_size=run.world_size,
        gpu=gpu.name,
        assumed=assumed,
        rank=worst.rank,
        stages=worst.stages,
        peaks={str(trace.rank): trace.peak for trace in traces},
        peak=worst.peak,
        moment=worst.moment,
        kinds=dict(worst.kinds),
        host=worst.host,
        shared=gpu.cpu,
        allowance=allowance(run, worst.peak, gpu),
        memory=memory_of_rank(run, gpu),
        step_seconds=time.seconds,
        parts=time.parts,
        hidden_seconds=time.hidden,
        dominant=time.dominant,
        tokens_per_second=time.tokens_per_second,
        mfu=time.mfu,
        days=time.days,
        basis=time.basis,
    )
