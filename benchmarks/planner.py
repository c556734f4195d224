"""How far the memory of `titanlite plan` is off: real steps on a CPU beside their plans.

    python benchmarks/planner.py [--only TEXT] [--out benchmarks/planner.md]

Each case builds its job as a training run does, on 1, 2 or 4 processes, and does two steps over empty rows. What they
take is what malloc has handed out (benchmarks/allocated.c, which a C compiler makes and each process preloads), so it
comes neither from the planner's own counter nor from torch. A tiny job goes first, so that what Python imports on the
way does not count.
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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from runs import MIB, RESULTS, about, table

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.batch import blank_microbatch
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.plan.trace import trace_run, with_keys
from titanlite.runtime.world import process_group
from titanlite.train.step import TrainStep

PAGE = Path(__file__).with_suffix(".md")
SHIM = Path(__file__).with_name("allocated.c")
Sections = Mapping[str, Mapping[str, Any]]

SMALL = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 768, "vocab_size": 4096}
MEDIUM = {"dim": 512, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 1536, "vocab_size": 8192}
LARGE = {"dim": 768, "n_layers": 8, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 2048, "vocab_size": 16384}
ROWS = {"seq_len": 256, "local_batch_size": 4}
LONG = {"seq_len": 1024, "local_batch_size": 1}
EACH_BLOCK = {"fsdp_min_num_params": 0}  # a group of FSDP for each block, as large models have


def _job(model: Mapping[str, Any], rows: Mapping[str, Any], mode: str = "none", **more: Any) -> Sections:
    recompute = {"mode": mode, "selective_ac_option": "op"}
    training = {**rows, **more.pop("training", {})}
    return {"model": model, "training": training, "activation_checkpoint": recompute, **more}


def _pipeline(schedule: str, microbatches: int) -> dict[str, Any]:
    layout = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule, **EACH_BLOCK}
    rows = {"local_batch_size": 1, "global_batch_size": microbatches}
    return {"training": rows, "parallelism": layout}


FLOAT8 = {"enable": True, "emulate": True, "min_features": 0}
GATHERED_FP8 = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
CASES: dict[str, tuple[int, Sections]] = {
    "small": (1, _job(SMALL, ROWS)),
    "small, selective": (1, _job(SMALL, ROWS, "selective")),
    "small, full": (1, _job(SMALL, ROWS, "full")),
    "small, fp32": (1, _job(SMALL, ROWS, training={"mixed_precision_param": "float32"})),
    "small, 4 microbatches": (1, _job(SMALL, ROWS, training={"global_batch_size": 16})),
    "medium, selective": (1, _job(MEDIUM, LONG, "selective")),
    "medium, masks": (1, _job(MEDIUM, LONG, "full", dataset={"document_mask": True})),
    "medium, bf16 state": (
        1,
        _job(MEDIUM, ROWS, training={"dtype": "bfloat16"}, optimizer={"stochastic_rounding": True}),
    ),
    "large, full": (1, _job(LARGE, LONG, "full")),
    "large": (1, _job(LARGE, ROWS)),
    "small, FSDP": (2, _job(SMALL, ROWS)),
    "medium, FSDP, selective": (2, _job(MEDIUM, ROWS, "selective", parallelism=EACH_BLOCK)),
    "large, FSDP, full": (2, _job(LARGE, ROWS, "full")),
    "medium, FSDP, offload": (2, _job(MEDIUM, ROWS, "full", training={"enable_cpu_offload": True})),
    "medium, tensor": (2, _job(MEDIUM, ROWS, parallelism={"tensor_parallel_degree": 2})),
    "medium, context": (2, _job(MEDIUM, LONG, "selective", parallelism={"context_parallel_degree": 2})),
    "medium, 1F1B": (2, _job(MEDIUM, ROWS, **_pipeline("1F1B", 8))),
    "medium, Interleaved1F1B": (2, _job(MEDIUM, ROWS, "full", **_pipeline("Interleaved1F1B", 8))),
    "medium, FSDP on 4": (4, _job(MEDIUM, ROWS, "full", parallelism=EACH_BLOCK)),
    "medium, HSDP": (4, _job(MEDIUM, ROWS, parallelism={"data_parallel_replicate_degree": 2, **EACH_BLOCK})),
    "medium, tensor and FSDP": (4, _job(MEDIUM, ROWS, parallelism={"tensor_parallel_degree": 2, **EACH_BLOCK})),
    "medium, float8": (1, _job(MEDIUM, ROWS, "selective", float8=FLOAT8)),
    "medium, FSDP, float8": (2, _job(MEDIUM, ROWS, float8=FLOAT8 | GATHERED_FP8, parallelism=EACH_BLOCK)),
    "medium, compiled": (1, _job(MEDIUM, ROWS, "selective", compile={"enable": True})),
}


INTRO = """\
# Plans beside real steps

`python benchmarks/planner.py`

What a step takes is the most that malloc has handed out during it, beyond what there was before the model was built,
on the rank that takes the most. A library that is loaded before all others counts it. The plan counts tensors, as
`titanlite plan` does; what malloc hands out beside them is in its allowance. oneDNN keeps 9 to 15 MB of scratch for
products in bfloat16 from step to step, gloo has buffers, and some operators take memory within a call. The column
"kept" has what was still there when the model was gone; the last column is the error without that. Compiled parts are
planned as if they were not compiled.

{run} of {cases} cases were run. The largest error is {largest:.2%}, the median {median:.2%}; but for what is kept
{largest_but:.2%} and {median_but:.2%}.
"""
TINY = {**SMALL, "dim": 128, "ffn_dim": 256}


@dataclass(frozen=True)
class Result:
    """Bytes of a case, on the rank that takes the most."""

    name: str
    ranks: int
    planned: int
    """By the plan: tensors that are alive at the worst moment."""
    allocated: int
    """By malloc: the most in the second step, beyond what there was before the model."""
    kept: int
    """By malloc: what is still there when the model is gone. Libraries keep it."""
    about: str = ""

    @property
    def error(self) -> float:
        return self.planned / self.allocated - 1

    @property
    def error_but_for_kept(self) -> float:
        return self.planned / (self.allocated - self.kept) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="cases whose name contains this; may be given several times")
    parser.add_argument("--results", type=Path, default=RESULTS / "planner.json", help="where figures are added")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    for name in CASES:
        if not options.only or any(text in name for text in options.only):
            result = compare(name)
            print(f"{name:<28}{result.ranks:>2} {result.allocated / MIB:9.2f} MiB {result.error:+z7.2%}", flush=True)
            known[name] = asdict(result)
            options.results.write_text(json.dumps(known, indent=1) + "\n")
    options.out.write_text(page([Result(**known[name]) for name in CASES if name in known]))


def compare(name: str) -> Result:
    """A case in the plan and in reality."""
    ranks, sections = CASES[name]
    run = with_keys(Run(JobConfig.model_validate(sections), ranks), {"training.enable_cpu_offload": False})
    planned = max(trace.peak for trace in trace_run(run))  # on a CPU device and host are one memory
    with tempfile.TemporaryDirectory() as folder:
        shim = str(Path(folder, "allocated.so"))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", shim, SHIM], check=True)
        os.environ["LD_PRELOAD"] = shim
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        try:
            with multiprocessing.get_context("spawn").Pool(ranks) as pool:
                jobs = [(rank, ranks, port, folder, sections) for rank in range(ranks)]
                found = pool.starmap(_rank, jobs, chunksize=1)
        finally:
            del os.environ["LD_PRELOAD"]
    return Result(name, ranks, planned, *max(found), about())


def _rank(rank: int, ranks: int, port: int, folder: str, sections: Sections) -> tuple[int, int]:
    """What `Result.allocated` and `Result.kept` are, on one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shim = ctypes.CDLL(str(Path(folder, "allocated.so")))
    shim.bytes_now.restype = shim.bytes_most.restype = ctypes.c_long
    run = Run(JobConfig.model_validate(sections), ranks)
    gc.disable()  # as in training
    with process_group(run.job) as device:
        _two_steps(Run(JobConfig.model_validate({**sections, "model": TINY}), ranks), device, shim)
        gc.collect()
        before = shim.bytes_now()
        most = _two_steps(run, device, shim)
        gc.collect()
        return most - before, shim.bytes_now() - before


def _two_steps(run: Run, device: torch.device, shim: ctypes.CDLL) -> int:
    """The most bytes in the second step."""
    mesh = build_mesh(run.degrees, device.type)
    update = TrainStep(run, mesh, build_model(run, mesh, device, lambda _: None), device)
    update.precompute_scales()
    training = run.job.training
    shape = training.local_batch_size, training.seq_len, run.job.dataset.document_mask
    rows = [blank_microbatch(*shape, device) for _ in range(run.microbatches)]
    for _ in range(2):
        shim.bytes_most()
        update(rows, len(rows) * shape[0] * shape[1], 1e-4)
    return shim.bytes_most()


def page(results: Iterable[Result]) -> str:
    """The page of figures."""
    results, rows = list(results), []
    for each in results:
        sizes = (f"{size / MIB:,.2f}" for size in (each.allocated, each.planned))
        kept = f"{each.kept / MIB:,.2f}", f"{each.error_but_for_kept:+z.2%}"
        rows.append([each.name, str(each.ranks), *sizes, f"{each.error:+z.2%}", *kept])
    errors = [abs(each.error) for each in results]
    but = [abs(each.error_but_for_kept) for each in results]
    numbers = {"largest": max(errors), "median": statistics.median(errors)}
    numbers |= {"largest_but": max(but), "median_but": statistics.median(but)}
    lines = table(["job", "ranks", "malloc, MiB", "plan, MiB", "error", "kept, MiB", "error but for it"], rows)
    places = [f"Measured {place}." for place in dict.fromkeys(each.about for each in results)]
    return "\n".join([INTRO.format(run=len(results), cases=len(CASES), **numbers), *lines, *places, ""])


if __name__ == "__main__":
    main()
