"""Compare the planned step times of `titanlite plan` with published torchtitan measurements.

    python benchmarks/published.py [--only TEXT]
    python benchmarks/published.py --search [--only TEXT] [--most N]

The measurements are from the folder benchmarks/ in the torchtitan repository. The plans use the
titanlite trainer with the same model, layout, batch and recomputation. Where torchtitan runs other
operations that take time, the plan contains these instead; see `torchtitan` and `ring`. With
--search, the first choice of `titanlite plan --search` is compared with the torchtitan recipe, both
planned on the H100 of the data sheet. Prints the tables of docs/internals/planner.md.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from runs import table
from torch import Tensor

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.load_run import load_run
from titanlite.observe.gpus import find_gpu
from titanlite.plan.advice import MAX_TRACED_JOBS, format_options, search
from titanlite.plan.counter import FLEX_OPS, Group, Work
from titanlite.plan.override import override
from titanlite.plan.roofline import forecast
from titanlite.plan.simulate import FusedRMSNorm
from titanlite.plan.trace import RankTrace, trace_run, with_keys
from titanlite.plan.workers import workers

# "96GB HBM2e with 2.4 TB/sec", "500W power limit". The power of a chip grows with its clock times
# the square of the voltage, which rises with the clock, so the clock falls with the cube root of
# the power. The data sheets say the same: an H100 SXM with 700 W and an H100 NVL with 400 W have as
# many cores, and 989 and 835 TFLOP/s.
_CLOCK = (500 / 700) ** (1 / 3)
_RATES = {name: getattr(find_gpu("H100"), name) * _CLOCK for name in ("bf16", "fp8", "fp32")}
# The torch attention was its own build of FlashAttention 2 then. Forward it reached 287 to 304
# TFLOP/s on an H100, 30% of the data sheet (https://github.com/pytorch/benchmark/pull/2296, heads
# of 128, 1,024 to 16,384 tokens).
_FLASH2 = {"attention": 0.30}
H100 = find_gpu("H100").model_copy(
    update={"memory_gib": 94.5, "bandwidth": 2400.0, **_RATES, **_FLASH2}
)
H200 = find_gpu("H200").model_copy(update=_FLASH2)

FP8 = {
    "enable": True,
    "enable_fsdp_float8_all_gather": True,
    "precompute_float8_dynamic_scale_for_fsdp": True,
}
FP8_OF_TP, ROWWISE = {"enable": True}, {"enable": True, "recipe_name": "rowwise"}
Sections = Mapping[str, Mapping[str, Any]]


class Row(NamedTuple):
    """A published figure.

    Attributes:
        published: Tokens/s of each GPU.
    """

    table: str
    name: str
    published: float
    ranks: int
    job: Sections

    @property
    def run(self) -> Run:
        return Run(JobConfig.model_validate(self.job), self.ranks)


def _job(
    flavor: str, rows: int, compiled: bool = True, fp8: Any = None, length: int = 8192, **more: Any
) -> Sections:
    recompute = {"mode": "full" if more.pop("full", False) else "selective"}
    microbatches = {"global_batch_size": more.pop("batch", -1)}
    layout = {
        {
            "tp": "tensor_parallel_degree",
            "cp": "context_parallel_degree",
            "pp": "pipeline_parallel_degree",
        }.get(k, k): v
        for k, v in more.items()
    }
    return {
        "model": {"flavor": flavor},
        "training": {"seq_len": length, "local_batch_size": rows, **microbatches},
        "activation_checkpoint": recompute,
        "compile": {"enable": compiled},
        "float8": fp8 or {},
        "parallelism": layout,
    }


@contextmanager
def torchtitan() -> Iterator[None]:
    """Replace kernels of a trace by the kernels that torchtitan used.

    Norms that were not compiled took several kernels in fp32, because torch had no fused norm.
    """

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight

    with override(FusedRMSNorm, apply=norm):
        yield


_OURS = ("all_gather", "reduce_scatter")  # of K and V, and of their gradients


def ring(run: Run, trace: RankTrace) -> RankTrace:
    """The trace with the torchtitan context parallelism,
    `torch.distributed.tensor.experimental.context_parallel`, in place of ours, which gathers K and
    V and calls attention once.

    There are as many steps as ranks. Each is a call of flash attention on half of the scores
    between the rows of two ranks, so the FLOPs are the same. K and V are repeated to all heads
    before, and gathered once in each pass. A step merges its output into a sum in fp32; backward it
    adds to dQ, dK and dV in fp32, and dK and dV go on to the next rank. It is compiled, so
    element-wise work is fused, and no traffic hides, because a functional collective that is traced
    is waited for at once.

    Bytes are those of Q (q, bfloat16). Forward: repeat and join K and V (6 q); for each further
    step read a sum and an output, write the sum (5 q). Backward for each step: read and write dK
    and dV with the step's (10 q), and dQ (5 q);
    once: join K and V, cast dK and dV, add up what was repeated (12 q).
    """
    ranks, works = run.degrees.context, list[Work]()
    if ranks == 1:
        return trace
    group = Group("context", ranks, (ranks - 1) * run.degrees.tensor + 1)
    flash = [work for work in trace.work if work.op.removeprefix("aten.") in FLEX_OPS]
    for work in flash:
        backward, (batch, heads, rows, _, dim) = "backward" in work.op, work.shape
        size = 2 * batch * heads * rows * dim * work.count
        fused = work.op.replace(
            "flash", "cudnn"
        )  # flash attention stands for flex attention in a plan
        moved = size * (15 * ranks + 12 if backward else 5 * (ranks - 1) + 6)
        works.append(work._replace(op=fused))
        works.append(Work(work.phase, "all_gather", "", (), group, work.count, 0, 2 * size * ranks))
        works.append(Work(work.phase, "merge", "", (), None, ranks * work.count, 0, moved))
        if backward:
            works.append(
                Work("backward", "send", "", (), group, ranks * work.count, 0, 4 * size * ranks)
            )
    works += [
        work
        for work in trace.work
        if work not in flash and not (work.op in _OURS and work.group == group)
    ]
    return replace(trace, work=tuple(works))


def rows() -> Iterator[Row]:
    """All rows. A pipeline has as many microbatches as ranks, which was the torchtitan default."""
    for ranks, figures in ((8, (5762, 6667, 8532)), (128, (5605, 6514, 8380))):
        where = f"8b, FSDP {ranks}"
        yield Row("2024-12", where, figures[0], ranks, _job("8b", 2, False))
        yield Row("2024-12", f"{where}, compiled", figures[1], ranks, _job("8b", 2))
        yield Row("2024-12", f"{where}, compiled, FP8", figures[2], ranks, _job("8b", 2, fp8=FP8))
    for cp, figure in ((1, 3890), (2, 2540), (4, 1071), (8, 548)):
        job = _job("8b", 1, fp8=FP8, length=32768 * cp, full=True, cp=cp)
        yield Row("2024-12", f"8b, FP8, CP {cp}, {32768 * cp:,} tokens a row", figure, 8, job)
    for name, figure, asynchronous in (("TP 8", 829, False), ("async TP 8", 876, True)):
        job = _job("70b", 16, fp8=FP8, full=True, tp=8, enable_async_tensor_parallel=asynchronous)
        yield Row("2024-12", f"70b, FP8, {name}", figure, 256, job)
    large: dict[str, Any] = {
        "fp8": FP8,
        "full": True,
        "tp": 8,
        "pp": 8,
        "enable_async_tensor_parallel": True,
    }
    for schedule, figure in (("1F1B", 100), ("Interleaved1F1B", 128)):
        job = _job("405b", 4, batch=256, pipeline_parallel_schedule=schedule, **large)
        yield Row("2024-12", f"405b, FP8, async TP 8, {schedule}", figure, 512, job)
    for cp, figure in ((1, 76), (2, 47), (4, 31), (8, 16)):
        job = _job(
            "405b",
            1,
            length=32768 * cp,
            cp=cp,
            batch=64 // cp,
            pipeline_parallel_schedule="1F1B",
            **large,
        )
        yield Row(
            "2024-12", f"405b, FP8, async TP 8, 1F1B, CP {cp}, {32768 * cp:,}", figure, 512, job
        )
    for machines, figure in ((4, 10938), (8, 10753)):
        yield Row(
            "H200",
            f"8b, FSDP {8 * machines}, compiled, FP8",
            figure,
            8 * machines,
            _job("8b", 2, fp8=FP8),
        )
    tp = {  # tokens/s without and with async tensor parallelism
        "70b": (256, 16, (None, 597.3, 652.4), (FP8_OF_TP, 809.8, 942.4), (ROWWISE, 599.6, 624.8)),
        "8b": (
            64,
            12,
            (None, 4378, 4809.4),
            (FP8_OF_TP, 5078.1, 5570.1),
            (ROWWISE, 3708.5, 3914.9),
        ),
    }
    for flavor, (ranks, batch, *recipes) in tp.items():
        for fp8, *figures in recipes:
            recipe = ", FP8 rowwise" if fp8 is ROWWISE else ", FP8" if fp8 else ""
            for asynchronous, figure in enumerate(figures):
                job = _job(
                    flavor,
                    batch,
                    fp8=fp8,
                    full=flavor == "70b",
                    tp=8,
                    enable_async_tensor_parallel=bool(asynchronous),
                )
                yield Row(
                    "2025-06",
                    f"{flavor}{recipe}, {'async ' * asynchronous}TP 8",
                    figure,
                    ranks,
                    job,
                )


def searches() -> Iterator[tuple[str, int, Sections]]:
    """A job file, a number of GPUs, and the fastest published torchtitan recipe for them.

    For 70b on 64 GPUs it is the recipe of the torchtitan job file.
    """
    wide: dict[str, Any] = {"fp8": FP8, "full": True, "tp": 8, "enable_async_tensor_parallel": True}
    yield "llama_8b.toml", 8, _job("8b", 2, fp8=FP8)
    yield "llama_70b.toml", 64, _job("70b", 8, full=True, tp=8)
    yield "llama_70b.toml", 256, _job("70b", 16, **wide)
    yield (
        "llama_405b.toml",
        512,
        _job("405b", 4, batch=256, pp=8, pipeline_parallel_schedule="Interleaved1F1B", **wide),
    )


def compare_search(most: int, name: str, ranks: int, recipe: Sections) -> list[str]:
    """A line of the table: the recipe, and what a search finds."""
    gpu, given = find_gpu("H100"), load_run(["--job.config_file", name], ranks)
    began = cpu_seconds()
    with workers() as pool:
        found, traced, of = search(given, gpu, pool.map, most)
    settings, first = found[0]
    spent, run = cpu_seconds() - began, Run(JobConfig.model_validate(recipe), ranks)
    planned = forecast(run, trace_run(run, gpu), gpu)
    words = " ".join(format_options(settings)).replace("--", "") or "(as it is)"
    speeds = [f"{plan.tokens_per_second:,.0f}" for plan in (planned, first)]
    ratio = f"{first.tokens_per_second / planned.tokens_per_second:.2f}"
    return [name, str(ranks), *speeds, ratio, f"{traced} of {of}", f"{spent:,.0f}", words]


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument(
        "--search", action="store_true", help="what a search finds beside the torchtitan recipes"
    )
    parser.add_argument(
        "--most", type=int, default=MAX_TRACED_JOBS, help="jobs that a search traces"
    )
    given = parser.parse_args()
    only, lines, traced = given.only, list[list[str]](), dict[str, tuple[RankTrace, ...]]()
    if given.search:
        for job in searches():
            if only in f"{job[0]} {job[1]}":
                lines.append(compare_search(given.most, *job))
                print(*lines[-1], sep="  ", flush=True)
        heads = [
            "job",
            "GPUs",
            "recipe, tokens/s",
            "search, tokens/s",
            "ratio",
            "traced",
            "CPU, s",
            "first choice",
        ]
        print("\n".join(table(heads, lines)))
        return
    for row in (row for row in rows() if only in row.name):
        run, gpu = row.run, H200 if row.table == "H200" else H100
        # The trace is the same without async tensor parallelism. The torchtitan optimizer was not
        # fused by default.
        same = {
            "parallelism.enable_async_tensor_parallel": False,
            "optimizer.implementation": "foreach",
        }
        alike = with_keys(run, same)
        key = f"{row.ranks} {alike.job.model_dump_json()}"
        if key not in traced:
            with torchtitan():
                traced[key] = tuple(ring(alike, trace) for trace in trace_run(alike, gpu))
        speed = forecast(run, traced[key], gpu).tokens_per_second
        cells = [
            f"{row.name} ({row.table})",
            str(row.ranks),
            f"{row.published:,.0f}",
            f"{speed:,.0f}",
        ]
        lines.append([*cells, f"{speed / row.published:.2f}"])
        print(*lines[-1], sep="  ", flush=True)
    print("\n".join(table(["job", "GPUs", "published", "plan", "plan / published"], lines)))


if __name__ == "__main__":
    main()
