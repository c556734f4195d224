"""Compare the memory of real steps, on a CPU and on the ghost GPU, with `titanlite plan`.

    python benchmarks/planner.py [--only TEXT] [--out benchmarks/planner.md]
    scripts/ghost.sh python benchmarks/planner.py [--only TEXT] [--out benchmarks/planner.md]

On the ghost GPU (docs/internals/ghost.md), each case runs three steps on rank 0, and also on the
rank with the highest planned peak. Each rank runs alone, because collectives on the ghost GPU do
not wait for other ranks. The benchmark measures allocated and reserved memory of the torch
allocator.

On a CPU, each case builds its job like a training run, on 1, 2 or 4 processes, and runs nine steps
on empty sequences. The lowest peak of the last eight counts: in a single step, a communication
thread that the operating system has paused can free a buffer late. A preloaded library
(benchmarks/allocated.c) counts the memory that malloc allocates, so the result is independent of
the planner and of torch. A tiny job runs first, so that memory of imported modules does not count.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from runs import MIB, RESULTS, about, describe_measurement, table
from torch.distributed.pipelining import PipelineStage

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.batch import blank_microbatch
from titanlite.model.attention import backend_order
from titanlite.observe.gpus import GIB, find_gpu
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.plan.advice import make_plan
from titanlite.plan.allocator import CUBLAS_WORKSPACES
from titanlite.plan.roofline import bytes_outside_allocator
from titanlite.plan.step_counts import UNANIMOUS_SHAPE_VOTE
from titanlite.plan.trace import trace_run, with_keys
from titanlite.runtime.process import set_up_torch
from titanlite.runtime.world import process_group
from titanlite.train.step import TrainStep

PAGE = Path(__file__).with_suffix(".md")
SHIM = Path(__file__).with_name("allocated.c")
Sections = Mapping[str, Mapping[str, Any]]

SMALL = {
    "dim": 256,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 768,
    "vocab_size": 4096,
}
MEDIUM = {
    "dim": 512,
    "n_layers": 6,
    "n_heads": 8,
    "n_kv_heads": 4,
    "ffn_dim": 1536,
    "vocab_size": 8192,
}
LARGE = {
    "dim": 768,
    "n_layers": 8,
    "n_heads": 12,
    "n_kv_heads": 4,
    "ffn_dim": 2048,
    "vocab_size": 16384,
}
SHORT_SEQUENCES = {"seq_len": 256, "local_batch_size": 4}
LONG_SEQUENCES = {"seq_len": 1024, "local_batch_size": 1}
# Each block is its own FSDP group, as in large models.
EACH_BLOCK = {"fsdp_min_num_params": 0}


class Case(NamedTuple):
    """A job whose memory is planned and measured.

    Attributes:
        num_ranks: Number of ranks.
        sections: Sections of the job file.
    """

    num_ranks: int
    sections: Sections


def make_job(
    model: Mapping[str, Any],
    batch: Mapping[str, Any],
    ac_mode: str = "none",
    *,
    training: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Sections:
    """Return the sections of a job.

    Args:
        model: Section [model].
        batch: Keys of the section [training] that set the sequence length and the batch size.
        ac_mode: Mode of activation checkpointing.
        training: Further keys of the section [training].
        sections: Further sections.
    """
    return {
        "model": model,
        "training": {"mixed_precision_param": "bfloat16", **batch, **(training or {})},
        "activation_checkpoint": {"mode": ac_mode, "selective_ac_option": "op"},
        **sections,
    }


def make_pipeline(schedule: str, num_microbatches: int) -> dict[str, Any]:
    """Return the sections [training] and [parallelism] of a pipeline on two ranks."""
    return {
        "training": {"local_batch_size": 1, "global_batch_size": num_microbatches},
        "parallelism": {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": schedule,
            **EACH_BLOCK,
        },
    }


TENSOR_2 = {"tensor_parallel_degree": 2}
CONTEXT_2 = {"context_parallel_degree": 2}
HSDP_2 = {"data_parallel_replicate_degree": 2, **EACH_BLOCK}
FLOAT8 = {"enable": True, "emulate": True, "min_features": 0}
FP8_ALL_GATHER = {
    "enable_fsdp_float8_all_gather": True,
    "precompute_float8_dynamic_scale_for_fsdp": True,
}
CASES = {
    "small": Case(1, make_job(SMALL, SHORT_SEQUENCES)),
    "small, selective": Case(1, make_job(SMALL, SHORT_SEQUENCES, "selective")),
    "small, full": Case(1, make_job(SMALL, SHORT_SEQUENCES, "full")),
    "small, fp32": Case(
        1, make_job(SMALL, SHORT_SEQUENCES, training={"mixed_precision_param": "float32"})
    ),
    "small, 4 microbatches": Case(
        1, make_job(SMALL, SHORT_SEQUENCES, training={"global_batch_size": 16})
    ),
    "medium, selective": Case(1, make_job(MEDIUM, LONG_SEQUENCES, "selective")),
    "medium, document masks": Case(
        1, make_job(MEDIUM, LONG_SEQUENCES, "full", dataset={"document_mask": True})
    ),
    "medium, bf16 state": Case(
        1,
        make_job(
            MEDIUM,
            SHORT_SEQUENCES,
            training={"dtype": "bfloat16"},
            optimizer={"stochastic_rounding": True},
        ),
    ),
    "large, full": Case(1, make_job(LARGE, LONG_SEQUENCES, "full")),
    "large": Case(1, make_job(LARGE, SHORT_SEQUENCES)),
    "small, FSDP": Case(2, make_job(SMALL, SHORT_SEQUENCES)),
    "medium, FSDP, selective": Case(
        2, make_job(MEDIUM, SHORT_SEQUENCES, "selective", parallelism=EACH_BLOCK)
    ),
    "large, FSDP, full": Case(2, make_job(LARGE, SHORT_SEQUENCES, "full")),
    "medium, FSDP, offload": Case(
        2, make_job(MEDIUM, SHORT_SEQUENCES, "full", training={"enable_cpu_offload": True})
    ),
    "medium, tensor": Case(2, make_job(MEDIUM, SHORT_SEQUENCES, parallelism=TENSOR_2)),
    "medium, context": Case(
        2, make_job(MEDIUM, LONG_SEQUENCES, "selective", parallelism=CONTEXT_2)
    ),
    "medium, 1F1B": Case(2, make_job(MEDIUM, SHORT_SEQUENCES, **make_pipeline("1F1B", 8))),
    "medium, Interleaved1F1B": Case(
        2, make_job(MEDIUM, SHORT_SEQUENCES, "full", **make_pipeline("Interleaved1F1B", 8))
    ),
    "medium, FSDP on 4": Case(4, make_job(MEDIUM, SHORT_SEQUENCES, "full", parallelism=EACH_BLOCK)),
    "medium, HSDP": Case(4, make_job(MEDIUM, SHORT_SEQUENCES, parallelism=HSDP_2)),
    "medium, tensor and FSDP": Case(
        4, make_job(MEDIUM, SHORT_SEQUENCES, parallelism={**TENSOR_2, **EACH_BLOCK})
    ),
    "medium, float8": Case(1, make_job(MEDIUM, SHORT_SEQUENCES, "selective", float8=FLOAT8)),
    "medium, FSDP, float8": Case(
        2,
        make_job(MEDIUM, SHORT_SEQUENCES, float8=FLOAT8 | FP8_ALL_GATHER, parallelism=EACH_BLOCK),
    ),
    "medium, compiled": Case(
        1, make_job(MEDIUM, SHORT_SEQUENCES, "selective", compile={"enable": True})
    ),
}


def make_gpu_job(
    flavor: str,
    batch_size: int,
    ac_mode: str = "selective",
    seq_len: int = 8192,
    *,
    model: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Sections:
    """Return the sections of a job for the ghost GPU.

    Args:
        flavor: Model.
        batch_size: Sequences per microbatch.
        ac_mode: Mode of activation checkpointing.
        seq_len: Tokens per sequence.
        model: Further keys of the section [model].
        sections: Further sections, and further keys of the section [training].
    """
    batch = {"seq_len": seq_len, "local_batch_size": batch_size}
    return make_job({"flavor": flavor, **(model or {})}, batch, ac_mode, **sections)


def make_short_job(flavor: str, ac_mode: str, **sections: Any) -> Sections:
    """Return a job with one sequence of 4,096 tokens, where fragmentation is relatively largest."""
    return make_gpu_job(flavor, 1, ac_mode, 4096, **sections)


def parallel(name: str, degree: int, **keys: Any) -> dict[str, Any]:
    """Return the section [parallelism] with the degree of one dimension."""
    return {"parallelism": {f"{name}_parallel_degree": degree, **keys}}


COMPILED: Mapping[str, Any] = {"compile": {"enable": True}}
# A pipeline cannot share the embedding with the output layer.
UNTIED: Mapping[str, Any] = {"model": {"tied_embeddings": False}}
FP8: Mapping[str, Any] = {**COMPILED, "float8": {"enable": True, **FP8_ALL_GATHER}}
FP8_ROWWISE: Mapping[str, Any] = {**COMPILED, "float8": {"enable": True, "recipe_name": "rowwise"}}
# Four microbatches on four ranks, with the optimizer state in CPU memory.
OFFLOAD: Mapping[str, Any] = {"training": {"enable_cpu_offload": True, "global_batch_size": 32}}
INTERLEAVED: Mapping[str, Any] = parallel(
    "pipeline", 4, pipeline_parallel_schedule="Interleaved1F1B"
)

GHOST_CASES = {
    "1b, 4,096 tokens": Case(1, make_short_job("1b", "selective")),
    "1b, 4,096 tokens, full": Case(1, make_short_job("1b", "full")),
    "1b, 4,096 tokens, FSDP": Case(2, make_short_job("1b", "selective")),
    "1b, 4,096 tokens, FSDP, no activation checkpointing": Case(4, make_short_job("1b", "none")),
    "1b, 4,096 tokens, FSDP, full, compiled": Case(2, make_short_job("1b", "full", **COMPILED)),
    "3b, 4,096 tokens": Case(1, make_short_job("3b", "selective")),
    "3b, 4,096 tokens, no activation checkpointing": Case(1, make_short_job("3b", "none")),
    "3b, 4,096 tokens, no activation checkpointing, compiled": Case(
        1, make_short_job("3b", "none", **COMPILED)
    ),
    "3b, 4,096 tokens, FSDP": Case(2, make_short_job("3b", "selective")),
    "3b, 4,096 tokens, FSDP, full": Case(4, make_short_job("3b", "full")),
    "1b": Case(1, make_gpu_job("1b", 2)),
    "1b, compiled, no activation checkpointing": Case(1, make_gpu_job("1b", 2, "none", **COMPILED)),
    # This case takes 5 GB of CPU memory per rank. On one rank, it would take 20 GB.
    "1b, offload, 4 microbatches": Case(4, make_gpu_job("1b", 2, "full", **OFFLOAD)),
    "1b, compiled, 4 microbatches": Case(
        2, make_gpu_job("1b", 2, training={"global_batch_size": 16}, **COMPILED)
    ),
    "1b, float8 rowwise": Case(2, make_gpu_job("1b", 2, **FP8_ROWWISE)),
    "1b, tensor 2": Case(2, make_gpu_job("1b", 2, **parallel("tensor", 2))),
    "1b, document masks, compiled": Case(
        2, make_gpu_job("1b", 2, dataset={"document_mask": True}, **COMPILED)
    ),
    "1b, context 2": Case(2, make_gpu_job("1b", 1, seq_len=32768, **parallel("context", 2))),
    "1b, pipeline 2, compiled": Case(
        4,
        make_gpu_job(
            "1b",
            1,
            training={"global_batch_size": 16},
            **UNTIED,
            **COMPILED,
            **parallel("pipeline", 2),
        ),
    ),
    "8b": Case(8, make_gpu_job("8b", 2)),
    "8b, compiled": Case(8, make_gpu_job("8b", 2, **COMPILED)),
    "8b, float8": Case(8, make_gpu_job("8b", 2, **FP8)),
    "8b, context 2, float8, full": Case(
        8, make_gpu_job("8b", 1, "full", 32768, **FP8, **parallel("context", 2))
    ),
    "8b, tensor 8, compiled": Case(8, make_gpu_job("8b", 8, **COMPILED, **parallel("tensor", 8))),
    "8b, pipeline 4 x 2, Interleaved1F1B": Case(
        8, make_gpu_job("8b", 1, training={"global_batch_size": 16}, **INTERLEAVED)
    ),
    "8b, full, compiled, 4 microbatches": Case(
        8, make_gpu_job("8b", 2, "full", training={"global_batch_size": 64}, **COMPILED)
    ),
}

INTRO = """\
# Accuracy of memory plans

This page compares memory plans with measurements. The name of a job contains its model and its
settings. For example, "selective" and "full" are modes of activation checkpointing, and "tensor 2"
is tensor parallelism of degree 2.

## On a CPU

`python benchmarks/planner.py`

The table compares the memory of training steps on a CPU with the estimates of `titanlite plan`. The
columns have these meanings:

- **malloc:** the peak of allocated memory during a step, minus the memory before the model was
  built, on the rank that needs the most memory. A preloaded library counts the allocated memory.
- **plan:** the sum of all tensors that `titanlite plan` counts. Memory that does not belong to
  tensors is part of the allowance of a plan, which this column does not include. For example,
  oneDNN keeps 9 to 15 MB of scratch memory for bf16 matmuls between steps, gloo has buffers, and
  some operators need memory during a call.
- **kept:** the memory that is still allocated after the model was freed.
- **error without kept:** the error of the plan without the kept memory.

We ran {run} of the {cases} cases on a CPU. In each case, some memory remains allocated after the
model is freed. The measurement includes this memory, but the plan does not. If we include it, the
largest error of a plan is {largest:.2%}, and the median error is {median:.2%}. Without it, the
largest error is {largest_without_kept:.2%}, and the median error is {median_without_kept:.2%}.
"""
GHOST_INTRO = """
## On the ghost GPU

`scripts/ghost.sh python benchmarks/planner.py`

The table compares two memory sizes: the prediction of `titanlite plan`, and the memory of training
steps that run on the [ghost GPU](../docs/internals/ghost.md), which simulates an H100. The training
steps use the memory allocator of torch with expandable segments, as on a real GPU. The columns
have these meanings:

| column | meaning |
| --- | --- |
| allocated | peak of allocated memory in the second and third step, with the workspaces of cuBLAS |
| reserved | memory that the allocator holds after the third step, without CUDA and NCCL memory |
| error | difference between the plan and the measured value |

We ran {run} of the {cases} cases. The largest error of the plan is {allocated:.1%} for allocated
memory and {reserved:.1%} for reserved memory.
"""
TINY = {**SMALL, "dim": 128, "ffn_dim": 256}


@dataclass(frozen=True)
class Result:
    """Planned and measured memory of a case, in bytes, on the rank that needs the most.

    Attributes:
        name: Name of the case.
        ranks: Number of ranks.
        planned: Planned tensors at the peak.
        allocated: Lowest peak of the steps after the first one, minus the memory before the model
            was built.
        kept: Memory from malloc that remains after the model was deleted.
        planned_reserved: Planned memory including fragmentation.
        reserved: Memory that the torch allocator reserved.
        about: Date, CPU, versions and commit.
    """

    name: str
    ranks: int
    planned: int
    allocated: int
    kept: int = 0
    planned_reserved: int = 0
    reserved: int = 0
    about: str = ""

    @property
    def error(self) -> float:
        """Return the relative error of `planned`."""
        return self.planned / self.allocated - 1

    @property
    def error_without_kept(self) -> float:
        """Return the relative error of `planned`, without the memory that the run keeps."""
        return self.planned / (self.allocated - self.kept) - 1

    @property
    def error_of_reserved(self) -> float:
        """Return the relative error of `planned_reserved`."""
        return self.planned_reserved / self.reserved - 1


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", help="cases whose name contains this; may be given several times"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS / "planner.json",
        help="file that results are added to",
    )
    parser.add_argument("--out", type=Path, default=PAGE)
    return parser.parse_args()


def main() -> None:
    """Measure the chosen cases, store each result at once, and write the page of all results."""
    options = parse()
    stored = json.loads(options.results.read_text()) if options.results.exists() else {}
    on_ghost = torch.cuda.is_available()
    for name in GHOST_CASES if on_ghost else CASES:
        if options.only and not any(text in name for text in options.only):
            continue
        result = compare_on_ghost(name) if on_ghost else compare_on_cpu(name)
        print(format_line(result), flush=True)
        stored[name] = asdict(result)
        options.results.write_text(json.dumps(stored, indent=1) + "\n")

    pages = []
    for cases, format_page in ((CASES, cpu_page), (GHOST_CASES, ghost_page)):
        results = [Result(**stored[name]) for name in cases if name in stored]
        if results:
            pages.append(format_page(results))
    options.out.write_text("\n".join(pages))


def format_line(result: Result) -> str:
    """Format a result in one line."""
    line = f"{result.name:<40}{result.ranks:>2}"
    line += f" {result.allocated / MIB:9.2f} MiB {result.error:+z7.2%}"
    if result.reserved:
        line += f" {result.reserved / MIB:9.2f} MiB {result.error_of_reserved:+z7.2%}"
    return line


def compare_on_cpu(name: str) -> Result:
    """Plan a case, and measure it on a CPU, with one process per rank."""
    num_ranks, sections = CASES[name]
    run = Run(JobConfig.model_validate(sections), num_ranks)
    # On a CPU, offloaded state is in the same memory as everything else.
    run = with_keys(run, {"training.enable_cpu_offload": False})
    planned = max(trace.peak for trace in trace_run(run))

    with tempfile.TemporaryDirectory() as folder:
        shim = str(Path(folder, "allocated.so"))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", shim, SHIM], check=True)
        os.environ["LD_PRELOAD"] = shim
        with socket.socket() as free_socket:
            free_socket.bind(("127.0.0.1", 0))
            port = free_socket.getsockname()[1]
        try:
            with multiprocessing.get_context("spawn").Pool(num_ranks) as pool:
                jobs = [(rank, num_ranks, port, folder, sections) for rank in range(num_ranks)]
                measured = pool.starmap(_measure_cpu_rank, jobs, chunksize=1)
        finally:
            del os.environ["LD_PRELOAD"]
    allocated, kept = max(measured)
    return Result(name, num_ranks, planned, allocated, kept, about=about())


def _measure_cpu_rank(
    rank: int, num_ranks: int, port: int, folder: str, sections: Sections
) -> tuple[int, int]:
    """Run a case on one rank, and return `Result.allocated` and `Result.kept`."""
    _set_rank(rank, rank, num_ranks)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shim = ctypes.CDLL(str(Path(folder, "allocated.so")))
    shim.bytes_now.restype = ctypes.c_long
    shim.bytes_most.restype = ctypes.c_long
    run = Run(JobConfig.model_validate(sections), num_ranks)
    tiny_run = Run(JobConfig.model_validate({**sections, "model": TINY}), num_ranks)

    gc.disable()  # as in training
    with process_group(run.job) as device:
        _lowest_peak(tiny_run, device, shim)
        gc.collect()
        bytes_before = shim.bytes_now()
        peak = _lowest_peak(run, device, shim)
        gc.collect()
        return peak - bytes_before, shim.bytes_now() - bytes_before


def _set_rank(rank: int, local_rank: int, num_ranks: int) -> None:
    """Set the environment variables that identify this rank."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }


def _lowest_peak(run: Run, device: torch.device, shim: ctypes.CDLL) -> int:
    """Train nine steps and return the lowest peak of the last eight, in bytes."""
    peaks: list[int] = []
    _train(run, device, 9, lambda _: peaks.append(shim.bytes_most()))
    peaks.append(shim.bytes_most())
    # peaks[0] belongs to building the model, and peaks[1] to the first step.
    peaks_after_first_step = peaks[2:]
    return min(peaks_after_first_step)


def _train(
    run: Run, device: torch.device, num_steps: int, before_step: Callable[[int], Any]
) -> None:
    """Train on empty sequences.

    Args:
        run: The job and the number of ranks.
        device: Device of this rank.
        num_steps: Number of steps.
        before_step: Called before each step with its number, which starts at 0.
    """
    mesh = build_mesh(run.degrees, device.type)
    model = build_model(run, mesh, device, lambda _: None)
    train_step = TrainStep(run, mesh, model, device)
    train_step.precompute_scales()

    training = run.job.training
    batch_size = training.local_batch_size
    seq_len = training.seq_len
    microbatches = [blank_microbatch(run.job, device) for _ in range(run.microbatches)]
    num_tokens = len(microbatches) * batch_size * seq_len
    for step in range(num_steps):
        before_step(step)
        train_step(microbatches, num_tokens, 1e-4)


def compare_on_ghost(name: str) -> Result:
    """Plan a case, and measure it on one rank of the ghost GPU."""
    num_ranks, sections = GHOST_CASES[name]
    run = Run(JobConfig.model_validate(sections), num_ranks)
    # The launcher configures the allocator in the same way.
    set_up_torch()

    # Processes of a multiprocessing.Pool could not start processes, as the planner does.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        plan = pool.submit(make_plan, run, find_gpu("H100"), "nothing").result()
        measured = [
            pool.submit(_measure_ghost_rank, rank, num_ranks, sections).result()
            for rank in {0, plan.rank}
        ]
    return Result(
        name,
        num_ranks,
        planned=plan.peak + CUBLAS_WORKSPACES,
        allocated=max(allocated for allocated, _ in measured),
        planned_reserved=plan.needs - bytes_outside_allocator(run),
        reserved=max(reserved for _, reserved in measured),
        about=about(),
    )


class _OneRankStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A store that behaves as if all other ranks had arrived."""

    def set(self, key: str, value: Any) -> None:
        pass

    def get(self, key: str) -> bytes:
        return bytes(128)

    def add(self, key: str, amount: int) -> int:
        return amount

    def check(self, keys: Sequence[str]) -> bool:
        # With True, the NCCL watchdog would report that another rank has failed.
        return False

    def wait(self, *_: Any) -> None:
        pass


def _measure_ghost_rank(rank: int, num_ranks: int, sections: Sections) -> tuple[int, int]:
    """Run one rank of a case alone, and return `Result.allocated` and `Result.reserved`."""
    _set_rank(rank, 0, num_ranks)
    device = torch.device("cuda", 0)
    run = Run(JobConfig.model_validate(sections), num_ranks).resolve_compute_dtype(on_gpu=True)
    gc.disable()  # as in training
    torch.cuda.set_device(device)
    # The process group does not keep the store alive, so a variable does.
    store = _OneRankStore()
    dist.init_process_group("cpu:fake,cuda:nccl", store=store, rank=rank, world_size=num_ranks)
    # Since torch 2.14, pipeline stages also exchange votes. Without other ranks, they would wait.
    for name, method in UNANIMOUS_SHAPE_VOTE.items():
        setattr(PipelineStage, name, method)

    def forget_first_step(step: int) -> None:
        if step == 1:
            torch.cuda.reset_peak_memory_stats()

    # As in training. A separate thread for the backward pass would add cuBLAS workspaces.
    with backend_order(device), torch.autograd.set_multithreading_enabled(False):
        _train(run, device, 3, forget_first_step)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def cpu_page(results: Sequence[Result]) -> str:
    """Format the results on a CPU as Markdown."""
    rows = [
        [
            result.name,
            str(result.ranks),
            f"{result.allocated / MIB:,.2f}",
            f"{result.planned / MIB:,.2f}",
            f"{result.error:+z.2%}",
            f"{result.kept / MIB:,.2f}",
            f"{result.error_without_kept:+z.2%}",
        ]
        for result in results
    ]
    header = [
        "job",
        "ranks",
        "malloc, MiB",
        "plan, MiB",
        "error",
        "kept, MiB",
        "error without kept",
    ]
    errors = [abs(result.error) for result in results]
    errors_without_kept = [abs(result.error_without_kept) for result in results]
    intro = INTRO.format(
        run=len(results),
        cases=len(CASES),
        largest=max(errors),
        median=statistics.median(errors),
        largest_without_kept=max(errors_without_kept),
        median_without_kept=statistics.median(errors_without_kept),
    )
    return "\n".join([intro, *table(header, rows), *_describe_measurements(results)])


def ghost_page(results: Sequence[Result]) -> str:
    """Format the results on the ghost GPU as Markdown."""
    rows = [
        [
            result.name,
            str(result.ranks),
            f"{result.planned / GIB:,.2f}",
            f"{result.allocated / GIB:,.2f}",
            f"{result.error:+z.1%}",
            f"{result.planned_reserved / GIB:,.2f}",
            f"{result.reserved / GIB:,.2f}",
            f"{result.error_of_reserved:+z.1%}",
        ]
        for result in results
    ]
    header = ["job", "ranks", "plan, GiB", "allocated", "error", "plan, GiB", "reserved", "error"]
    intro = GHOST_INTRO.format(
        run=len(results),
        cases=len(GHOST_CASES),
        allocated=max(abs(result.error) for result in results),
        reserved=max(abs(result.error_of_reserved) for result in results),
    )
    return "\n".join([intro, *table(header, rows), *_describe_measurements(results)])


def _describe_measurements(results: Sequence[Result]) -> list[str]:
    """Return a paragraph for each different date, CPU and commit of the results."""
    lines: list[str] = []
    for description in dict.fromkeys(result.about for result in results):
        lines += [describe_measurement(description), ""]
    return lines


if __name__ == "__main__":
    main()
