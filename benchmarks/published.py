"""Compare the planned speeds of `titanlite plan` with published measurements.

    python benchmarks/published.py [--only TEXT]
    python benchmarks/published.py --search [--only TEXT] [--most N]

The measurements are from torchtitan (its folder benchmarks/), from NVIDIA's Megatron Bridge (its
page performance-summary-archive) and from SmolLM3. The plans use the titanlite trainer with the
same model, layout, batch and activation checkpointing. Where the other framework runs operations
that take a different time, the plan contains these instead; see `trace_measurement`. Without
--only, the script also prints the interval of titanlite/plan/training_time.py and checks how well
it predicts. With --search, the top result of `titanlite plan --search` is compared with the
torchtitan recipe, both planned on the H100 of the data sheet. Prints the tables of
docs/internals/planner.md.
"""

from __future__ import annotations

import argparse
import math
import resource
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from runs import table
from torch import Tensor

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.load_run import load_run
from titanlite.observe.gpus import Gpu, find_gpu
from titanlite.plan import step_counts
from titanlite.plan.advice import MAX_TRACED_JOBS, format_options, search
from titanlite.plan.counter import FLEX_OPS, Group, Work
from titanlite.plan.override import override
from titanlite.plan.roofline import forecast
from titanlite.plan.simulate import FusedRMSNorm
from titanlite.plan.trace import RankTrace, trace_run, with_keys
from titanlite.plan.workers import workers

# torchtitan was measured on GPUs with "96GB HBM2e with 2.4 TB/sec" and "500W power limit". The
# power of a chip is proportional to its clock times the square of its voltage, and the voltage to
# the clock, so the clock is proportional to the cube root of the power. The data sheets roughly
# agree: an H100 SXM reaches 989 TFLOP/s with 700 W. An H100 NVL, which has as many cores, reaches
# 835 TFLOP/s with 400 W.
_CLOCK = (500 / 700) ** (1 / 3)
# The torch attention was its own build of FlashAttention 2 then. In the forward pass it reached 287
# to 304 TFLOP/s on an H100, 30% of the data sheet (https://github.com/pytorch/benchmark/pull/2296,
# heads of 128, 1,024 to 16,384 tokens).
_TORCH_FLASH2 = {"attention": 0.30}
# SmolLM3 used the flash-attn package, whose FlashAttention 2 reaches 35% of the data sheet on an
# H100 (https://arxiv.org/abs/2407.08608).
_FLASH2 = {"attention": 0.35}

H100 = find_gpu("H100")
GB200 = find_gpu("GB200")
SMOLLM_H100 = H100.model_copy(update=_FLASH2)
TORCHTITAN_H200 = find_gpu("H200").model_copy(update=_TORCH_FLASH2)
TORCHTITAN_H100 = H100.model_copy(
    update={
        "memory_gib": 94.5,
        "bandwidth": 2400.0,
        "bf16": H100.bf16 * _CLOCK,
        "fp8": H100.fp8 * _CLOCK,
        "fp32": H100.fp32 * _CLOCK,
        **_TORCH_FLASH2,
    }
)

FP8_ALL_GATHER = {
    "enable": True,
    "enable_fsdp_float8_all_gather": True,
    "precompute_float8_dynamic_scale_for_fsdp": True,
}
FP8 = {"enable": True}
FP8_ROWWISE = {"enable": True, "recipe_name": "rowwise"}

# Collectives of K and V, and of their gradients, in the context parallelism of titanlite.
KV_COLLECTIVES = ("all_gather", "reduce_scatter")

Sections = Mapping[str, Mapping[str, Any]]


class Measurement(NamedTuple):
    """A published speed.

    Attributes:
        source: Framework that was measured, and the date or version of the publication.
        name: Description of the job.
        tokens_per_second: Measured tokens/s of each GPU.
        gpu: GPU that was measured.
        num_gpus: Number of GPUs.
        job: Sections of the same job in titanlite.
    """

    source: str
    name: str
    tokens_per_second: float
    gpu: Gpu
    num_gpus: int
    job: Sections

    @property
    def framework(self) -> str:
        """Framework that was measured, such as "torchtitan"."""
        name, _, _ = self.source.rpartition(" ")
        return name


def make_job(
    flavor: str,
    batch_size: int,
    *,
    seq_len: int = 8192,
    global_batch_size: int = -1,
    recompute: str = "selective",
    is_compiled: bool = True,
    float8: Mapping[str, Any] | None = None,
    reduce_dtype: str = "float32",
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    **parallelism: Any,
) -> Sections:
    """Return the sections of a job.

    Args:
        flavor: Model.
        batch_size: Sequences per microbatch.
        seq_len: Sequence length in tokens.
        global_batch_size: Sequences per step. -1: one microbatch per data-parallel rank.
        recompute: Activation checkpointing mode.
        is_compiled: Whether blocks and loss are compiled.
        float8: Keys of the section [float8]. None: bfloat16.
        reduce_dtype: Dtype of gradient reduction.
        tp: Tensor parallel degree.
        cp: Context parallel degree.
        pp: Pipeline parallel degree.
        parallelism: Further keys of the section [parallelism].
    """
    return {
        "model": {"flavor": flavor},
        "training": {
            "seq_len": seq_len,
            "local_batch_size": batch_size,
            "global_batch_size": global_batch_size,
            "mixed_precision_reduce": reduce_dtype,
        },
        "activation_checkpoint": {"mode": recompute},
        "compile": {"enable": is_compiled},
        "float8": float8 or {},
        "parallelism": {
            "tensor_parallel_degree": tp,
            "context_parallel_degree": cp,
            "pipeline_parallel_degree": pp,
            **parallelism,
        },
    }


def list_measurements() -> Iterator[Measurement]:
    """Yield all published measurements."""
    yield from list_torchtitan_fsdp()
    yield from list_torchtitan_context_parallel()
    yield from list_torchtitan_large()
    yield from list_torchtitan_h200()
    yield from list_torchtitan_async_tp()
    yield from list_megatron_bridge()
    yield from list_smollm3()


def list_torchtitan_fsdp() -> Iterator[Measurement]:
    """Yield the torchtitan measurements of Llama 8B with FSDP."""
    recipes: list[tuple[str, dict[str, Any]]] = [
        ("", {"is_compiled": False}),
        (", compiled", {}),
        (", compiled, FP8", {"float8": FP8_ALL_GATHER}),
    ]
    speeds = {8: (5762, 6667, 8532), 128: (5605, 6514, 8380)}
    for num_gpus, figures in speeds.items():
        for (suffix, options), figure in zip(recipes, figures, strict=True):
            name = f"8b, FSDP {num_gpus}{suffix}"
            job = make_job("8b", 2, **options)
            yield Measurement("torchtitan 2024-12", name, figure, TORCHTITAN_H100, num_gpus, job)


def list_torchtitan_context_parallel() -> Iterator[Measurement]:
    """Yield the torchtitan measurements of Llama 8B with long sequences."""
    for cp, figure in ((1, 3890), (2, 2540), (4, 1071), (8, 548)):
        seq_len = 32768 * cp
        name = f"8b, FP8, CP {cp}, {seq_len:,} tokens per sequence"
        job = make_job("8b", 1, seq_len=seq_len, recompute="full", float8=FP8_ALL_GATHER, cp=cp)
        yield Measurement("torchtitan 2024-12", name, figure, TORCHTITAN_H100, 8, job)


def list_torchtitan_large() -> Iterator[Measurement]:
    """Yield the torchtitan measurements of Llama 70B and 405B of December 2024.

    A pipeline has as many microbatches as ranks, which was the default of torchtitan.
    """

    def measure(name: str, figure: float, num_gpus: int, job: Sections) -> Measurement:
        return Measurement("torchtitan 2024-12", name, figure, TORCHTITAN_H100, num_gpus, job)

    options: dict[str, Any] = {"recompute": "full", "float8": FP8_ALL_GATHER, "tp": 8}
    asynchronous: dict[str, Any] = {"enable_async_tensor_parallel": True}
    yield measure("70b, FP8, TP 8", 829, 256, make_job("70b", 16, **options))
    job = make_job("70b", 16, **options, **asynchronous)
    yield measure("70b, FP8, async TP 8", 876, 256, job)

    options |= {"pp": 8, **asynchronous}
    for schedule, figure in (("1F1B", 100), ("Interleaved1F1B", 128)):
        options["pipeline_parallel_schedule"] = schedule
        job = make_job("405b", 4, global_batch_size=256, **options)
        yield measure(f"405b, FP8, async TP 8, {schedule}", figure, 512, job)

    options["pipeline_parallel_schedule"] = "1F1B"
    for cp, figure in ((1, 76), (2, 47), (4, 31), (8, 16)):
        seq_len = 32768 * cp
        job = make_job("405b", 1, seq_len=seq_len, global_batch_size=64 // cp, cp=cp, **options)
        name = f"405b, FP8, async TP 8, 1F1B, CP {cp}, {seq_len:,}"
        yield measure(name, figure, 512, job)


def list_torchtitan_h200() -> Iterator[Measurement]:
    """Yield the torchtitan measurements on H200."""
    job = make_job("8b", 2, float8=FP8_ALL_GATHER)
    for num_gpus, figure in ((32, 10938), (64, 10753)):
        name = f"8b, FSDP {num_gpus}, compiled, FP8"
        yield Measurement("torchtitan H200", name, figure, TORCHTITAN_H200, num_gpus, job)


def list_torchtitan_async_tp() -> Iterator[Measurement]:
    """Yield the torchtitan measurements of June 2025, with and without async tensor parallelism."""
    recipes = [("", None), (", FP8", FP8), (", FP8 rowwise", FP8_ROWWISE)]
    # Tokens/s of each recipe without and with async tensor parallelism.
    speeds = {
        "70b": [(597.3, 652.4), (809.8, 942.4), (599.6, 624.8)],
        "8b": [(4378, 4809.4), (5078.1, 5570.1), (3708.5, 3914.9)],
    }
    for flavor, pairs in speeds.items():
        num_gpus = 256
        batch_size = 16
        recompute = "full"
        if flavor == "8b":
            num_gpus = 64
            batch_size = 12
            recompute = "selective"
        for (suffix, float8), (plain, asynchronous) in zip(recipes, pairs, strict=True):
            for layout, figure in (("TP 8", plain), ("async TP 8", asynchronous)):
                job = make_job(
                    flavor,
                    batch_size,
                    recompute=recompute,
                    float8=float8,
                    tp=8,
                    enable_async_tensor_parallel=layout.startswith("async"),
                )
                name = f"{flavor}{suffix}, {layout}"
                yield Measurement(
                    "torchtitan 2025-06", name, figure, TORCHTITAN_H100, num_gpus, job
                )


def list_megatron_bridge() -> Iterator[Measurement]:
    """Yield NVIDIA's measurements of Llama with Megatron Bridge.

    The page docs/performance-summary-archive.md of NVIDIA-NeMo/Megatron-Bridge (commit 067f987)
    lists the precision (FP8 with current scaling, that is, tensorwise), the batch sizes and the
    layouts. The recipes of these releases recompute nothing, reduce gradients in bfloat16 and
    overlap tensor-parallel communication. TE's fused kernels are planned as compiled blocks.
    """
    options: dict[str, Any] = {
        "recompute": "none",
        "float8": FP8_ALL_GATHER,
        "reduce_dtype": "bfloat16",
    }
    fsdp = make_job("8b", 1, global_batch_size=128, **options)
    yield Measurement("Megatron Bridge 25.11", "8b, FSDP 8, FP8", 14451, H100, 8, fsdp)

    # Megatron's distributed optimizer gathers weights and reduces gradients once per step.
    once_per_step: dict[str, Any] = {"fsdp_reshard_after_forward": "never", "fsdp_reduce": "step"}
    data_parallel = make_job("8b", 2, global_batch_size=128, **options, **once_per_step)
    yield Measurement(
        "Megatron Bridge 25.11", "8b, DP 8, FP8, GB200", 31508, GB200, 8, data_parallel
    )

    options |= {
        "pp": 8,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "enable_async_tensor_parallel": True,
    }
    # Five stages per rank, of two blocks each.
    cuts = tuple(f"layers.{block}" for block in range(2, 80, 2))
    pipeline = make_job(
        "70b", 1, global_batch_size=256, tp=4, pipeline_parallel_split_points=cuts, **options
    )
    name = "70b, TP 4, PP 8, VP 5, FP8"
    yield Measurement("Megatron Bridge 26.04", name, 1664, H100, 64, pipeline)

    # Eight stages per rank, of two blocks each. The first and the last stage have one block,
    # because they also have the embedding and the output projection.
    cuts = tuple(f"layers.{block}" for block in range(1, 126, 2))
    pipeline = make_job(
        "405b",
        1,
        global_batch_size=1536,
        tp=8,
        cp=2,
        pipeline_parallel_split_points=cuts,
        **options,
    )
    name = "405b, TP 8, PP 8, CP 2, VP 8, FP8"
    yield Measurement("Megatron Bridge 26.04", name, 328, H100, 1024, pipeline)


def list_smollm3() -> Iterator[Measurement]:
    """Yield the measurement of SmolLM3, which was trained with nanotron.

    The settings are from stage1_8T.yaml in huggingface/smollm. Its document mask is not planned,
    because the lengths of the documents are not published.
    """
    job = make_job(
        "smollm3-3b",
        3,
        seq_len=4096,
        recompute="none",
        is_compiled=False,
        tp=2,
        data_parallel_replicate_degree=192,
        enable_async_tensor_parallel=True,
    )
    yield Measurement("nanotron 2025-07", "smollm3-3b, TP 2, DP 192", 14100, SMOLLM_H100, 384, job)


def trace_measurement(
    measurement: Measurement, traces: dict[str, tuple[RankTrace, ...]]
) -> tuple[Run, tuple[RankTrace, ...]]:
    """Trace the job of a measurement with the operations of the measured framework.

    Args:
        measurement: The measurement.
        traces: Traces of earlier measurements, extended in place. Jobs that differ only in async
            tensor parallelism have the same trace.

    Returns:
        The run and its traces.
    """
    run = Run(JobConfig.model_validate(measurement.job), measurement.num_gpus)
    settings: dict[str, Any] = {"parallelism.enable_async_tensor_parallel": False}
    is_torchtitan = measurement.framework == "torchtitan"
    # The optimizer of torchtitan was not fused by default.
    if is_torchtitan:
        settings["optimizer.implementation"] = "foreach"
    traced_run = with_keys(run, settings)

    key = f"{measurement.framework} {run.world_size} {traced_run.job.model_dump_json()}"
    if key not in traces:
        if is_torchtitan:
            with unfused_norms():
                traced = trace_run(traced_run, measurement.gpu)
            traces[key] = tuple(use_ring_attention(traced_run, trace) for trace in traced)
        else:
            with skipped_microbatches():
                traced = trace_run(traced_run, measurement.gpu)
            traces[key] = tuple(use_cudnn_attention(trace) for trace in traced)
    return run, traces[key]


@contextmanager
def unfused_norms() -> Iterator[None]:
    """Run norms that are not compiled as several fp32 kernels within this context.

    torchtitan did so, because torch had no fused norm.
    """

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight

    with override(FusedRMSNorm, apply=norm):
        yield


@contextmanager
def skipped_microbatches() -> Iterator[None]:
    """Plan pipelines with many stages per rank in minutes instead of hours, within this context.

    The planner runs all microbatches of such a pipeline, because its memory depends on the order
    of unsharding. Only its time is needed here, which follows from a few microbatches: each action
    of a stage does the same work for all of them, and unsharding is counted wherever it happens.
    """
    plan_microbatches = step_counts._skippable_microbatches

    def skip_microbatches(run: Run) -> range:
        if run.degrees.pipeline == 1:
            return plan_microbatches(run)
        return range(1, run.microbatches - 1)

    with override(step_counts, _skippable_microbatches=skip_microbatches):
        yield


def use_cudnn_attention(trace: RankTrace) -> RankTrace:
    """Return the trace with the cuDNN kernel in place of flex attention, as in Megatron."""
    work = tuple(
        item._replace(op=item.op.replace("flash", "cudnn")) if is_flex(item) else item
        for item in trace.work
    )
    return replace(trace, work=work)


def is_flex(work: Work) -> bool:
    """Return whether the work is flex attention, which flash attention represents in a trace."""
    return work.op in FLEX_OPS


def use_ring_attention(run: Run, trace: RankTrace) -> RankTrace:
    """Return the trace with the context parallelism of torchtitan instead of titanlite.

    titanlite gathers K and V and calls attention once. torchtitan uses
    `torch.distributed.tensor.experimental.context_parallel`, a ring with as many steps as ranks.
    Each step calls flash attention on half of the scores between the sequence chunks of two ranks,
    so the FLOPs are the same. K and V are first repeated to all heads and gathered once in each
    pass. A step merges its output into an fp32 sum. In the backward pass, it adds to dQ, dK and dV
    in fp32, and dK and dV go to the next rank. The ring is compiled, so element-wise work is fused,
    and no communication overlaps, because a traced functional collective is waited for at once.
    """
    num_ranks = run.degrees.context
    if num_ranks == 1:
        return trace
    group = Group("context", num_ranks, (num_ranks - 1) * run.degrees.tensor + 1)
    works: list[Work] = []
    for work in trace.work:
        is_kv_collective = work.op in KV_COLLECTIVES and work.group == group
        if is_flex(work):
            works += ring_work(work, group)
        elif not is_kv_collective:
            works.append(work)
    return replace(trace, work=tuple(works))


def ring_work(attention: Work, group: Group) -> list[Work]:
    """Return the work of ring attention in place of a call of flex attention.

    The memory traffic is counted in units of Q in bfloat16:

    - Forward: 6 to repeat and join K and V, and for each further step 5 to read a sum and an output
      and to write the sum.
    - Backward: for each step 10 to read and write dK and dV, and 5 for dQ; once, 12 to join K and
      V, to cast dK and dV, and to add up what was repeated.

    Args:
        attention: Attention in the forward or backward pass.
        group: Context parallel group.
    """
    batch, num_heads, num_queries, _, head_dim = attention.shape
    q_bytes = 2 * batch * num_heads * num_queries * head_dim * attention.count
    num_steps = group.size * attention.count
    is_backward = "backward" in attention.op
    traffic = 5 * (group.size - 1) + 6
    if is_backward:
        traffic = 15 * group.size + 12

    def add(op: str, count: int, num_bytes: int, group: Group | None) -> Work:
        return Work(attention.phase, op, "", (), group, count, 0, num_bytes)

    works = [
        attention._replace(op=attention.op.replace("flash", "cudnn")),
        add("all_gather", attention.count, 2 * q_bytes * group.size, group),
        add("merge", num_steps, traffic * q_bytes, None),
    ]
    if is_backward:
        works.append(add("send", num_steps, 4 * q_bytes * group.size, group))
    return works


def compare_plans(only: str) -> None:
    """Plan all measurements whose label contains `only`, and print the table.

    If `only` is empty, also print the interval and its coverage.
    """
    rows: list[list[str]] = []
    # Maps frameworks to ratios of planned and published speeds.
    ratios: dict[str, list[float]] = defaultdict(list)
    traces: dict[str, tuple[RankTrace, ...]] = {}
    for measurement in list_measurements():
        label = f"{measurement.name} ({measurement.source})"
        if only not in label:
            continue
        run, traced = trace_measurement(measurement, traces)
        planned = forecast(run, traced, measurement.gpu).tokens_per_second
        published = measurement.tokens_per_second
        ratio = round(planned / published, 2)
        ratios[measurement.framework].append(ratio)
        row = [
            label,
            f"{measurement.num_gpus:,}",
            f"{published:,.0f}",
            f"{planned:,.0f}",
            f"{ratio:.2f}",
        ]
        rows.append(row)
        print(*row, sep="  ", flush=True)

    print("\n".join(table(["job", "GPUs", "published", "plan", "plan / published"], rows)))
    if not only:
        everything = tuple(chain(*ratios.values()))
        low, high = ratio_interval(everything)
        print("\n".join(table(["held out", "rows", "covered"], check_coverage(ratios))))
        print(f"90% interval: {low:.2f} to {high:.2f} times the planned time")
        print(f"RATIO_LOW = {low}\nRATIO_HIGH = {high}")


def ratio_interval(ratios: Iterable[float]) -> tuple[float, float]:
    """Fit a log-normal distribution to `ratios`, and return its 5% and 95% quantiles.

    Args:
        ratios: Planned speed divided by measured speed of each job, which equals its measured time
            divided by its planned time.
    """
    logs = NormalDist.from_samples([math.log(ratio) for ratio in ratios])
    return math.exp(logs.inv_cdf(0.05)), math.exp(logs.inv_cdf(0.95))


def check_coverage(ratios: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Count how often the interval contains a ratio that it was not computed from.

    Args:
        ratios: Framework -> planned speed divided by published speed, for each measurement.

    Returns:
        Rows of a table: each measurement held out alone, and all measurements of a framework.
    """
    everything = list(chain(*ratios.values()))
    num_covered = 0
    for index, ratio in enumerate(everything):
        others = everything[:index] + everything[index + 1 :]
        num_covered += count_covered([ratio], others)
    rows = [("each row alone", len(everything), num_covered)]

    for framework, held_out in ratios.items():
        others = list(chain(*(values for name, values in ratios.items() if name != framework)))
        rows.append((f"all rows of {framework}", len(held_out), count_covered(held_out, others)))
    return [[name, str(size), f"{covered} ({covered / size:.0%})"] for name, size, covered in rows]


def count_covered(held_out: Sequence[float], others: Sequence[float]) -> int:
    """Count the ratios in `held_out` that are in the interval of `others`."""
    low, high = ratio_interval(others)
    return sum(low <= ratio <= high for ratio in held_out)


def list_searches() -> Iterator[tuple[str, int, Sections]]:
    """Yield job files, numbers of GPUs, and the fastest published torchtitan recipes for them.

    For 70B on 64 GPUs, the recipe is from the torchtitan job file.
    """
    large: dict[str, Any] = {
        "float8": FP8_ALL_GATHER,
        "recompute": "full",
        "tp": 8,
        "enable_async_tensor_parallel": True,
    }
    yield "llama_8b.toml", 8, make_job("8b", 2, float8=FP8_ALL_GATHER)
    yield "llama_70b.toml", 64, make_job("70b", 8, recompute="full", tp=8)
    yield "llama_70b.toml", 256, make_job("70b", 16, **large)
    large |= {"pp": 8, "pipeline_parallel_schedule": "Interleaved1F1B"}
    yield "llama_405b.toml", 512, make_job("405b", 4, global_batch_size=256, **large)


def compare_searches(only: str, max_jobs: int) -> None:
    """Compare the results of searches with the torchtitan recipes, and print the table.

    Args:
        only: Text that the job file and number of GPUs must contain, such as "llama_70b.toml 64".
        max_jobs: Largest number of jobs that a search traces.
    """
    rows: list[list[str]] = []
    for name, num_gpus, recipe in list_searches():
        if only in f"{name} {num_gpus}":
            rows.append(compare_search(name, num_gpus, recipe, max_jobs))
            print(*rows[-1], sep="  ", flush=True)
    header = [
        "job",
        "GPUs",
        "recipe, tokens/s",
        "search, tokens/s",
        "ratio",
        "traced",
        "CPU, s",
        "top result",
    ]
    print("\n".join(table(header, rows)), end="")


def compare_search(name: str, num_gpus: int, recipe: Sections, max_jobs: int) -> list[str]:
    """Search the fastest variant of a job, and compare it with a recipe.

    Args:
        name: Job file to search from.
        num_gpus: Number of H100.
        recipe: Job to compare with.
        max_jobs: Largest number of jobs to trace.

    Returns:
        Cells of the row of the table.
    """
    run = load_run(["--job.config_file", name], num_gpus)
    start = cpu_seconds()
    with workers() as pool:
        results, num_traced, num_candidates = search(run, H100, pool.map, max_jobs)
    seconds = cpu_seconds() - start
    settings, best = results[0]

    recipe_run = Run(JobConfig.model_validate(recipe), num_gpus)
    planned = forecast(recipe_run, trace_run(recipe_run, H100), H100)
    return [
        name,
        str(num_gpus),
        f"{planned.tokens_per_second:,.0f}",
        f"{best.tokens_per_second:,.0f}",
        f"{best.tokens_per_second / planned.tokens_per_second:.2f}",
        f"{num_traced} of {num_candidates}",
        f"{seconds:,.0f}",
        " ".join(format_options(settings)).replace("--", "") or "(as it is)",
    ]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the child processes that it has waited for."""
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


def main() -> None:
    """Parse the command line and print the chosen tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="jobs whose name contains this text")
    parser.add_argument(
        "--search", action="store_true", help="compare searches with the torchtitan recipes"
    )
    parser.add_argument(
        "--most", type=int, default=MAX_TRACED_JOBS, help="jobs that a search traces"
    )
    options = parser.parse_args()
    if options.search:
        compare_searches(options.only, options.most)
    else:
        compare_plans(options.only)


if __name__ == "__main__":
    main()
