"""Train several jobs on the ghost GPU in the same ranks, and write measurements.

`torchrun steps.py JOBS.json OUT`. JOBS.json maps names to options. The option `without=NAME`
removes a compiler option of FP8 blocks. OUT.RANK maps names to the measurements of the last two
steps (see `measure`). The log of the ghost GPU contains these steps between the lines `mark job
NAME` and the next mark.
"""

import ctypes
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from titanlite.load_run import load_run
from titanlite.parallel import parallelize
from titanlite.train.trainer import Trainer

# This is the ghost GPU with the race detector.
gpu = ctypes.CDLL("libcuda.so.1")
mark = gpu.ghost_mark
WARM_STEPS = 3
STEPS = 2


def measure(name: str, options: list[str], folder: Path) -> dict[str, Any]:
    """Measure the last steps of a job.

    Earlier steps compile and allocate. Recompilations in later steps are counted.
    """
    counters.clear()
    earlier_alarms = gpu.race_alarms()
    run = load_run(
        [*options, "--job.dump_folder", str(folder / name)],
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    with Trainer(run) as trainer:
        for _ in range(WARM_STEPS):
            trainer.step()
        graphs = counters["stats"]["unique_graphs"]
        torch.cuda.reset_peak_memory_stats()
        mark(f"job {name}".encode())
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(STEPS):
                trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            mark(b"end")
        return {
            "graphs": graphs,
            "recompilations": counters["stats"]["unique_graphs"] - graphs,
            "graph_breaks": dict(counters["graph_break"]),
            "alarms": gpu.race_alarms() - earlier_alarms,
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "of other streams": sum(
                part["total_size"] for part in torch.cuda.memory_snapshot() if part["stream"]
            ),
        }


def remove_compiler_options(options: list[str]) -> tuple[Any, list[str]]:
    """Split options of a job into a patch for the options `without=NAME`, and all others."""
    prefix = "without="
    removed = {option.removeprefix(prefix) for option in options if option.startswith(prefix)}
    inductor_options = parallelize.inductor_options

    def remaining_options(*args: Any) -> dict[str, Any] | None:
        defaults = inductor_options(*args)
        return defaults and {name: defaults[name] for name in defaults.keys() - removed}

    job_options = [option for option in options if not option.startswith(prefix)]
    return patch.object(parallelize, "inductor_options", remaining_options), job_options


def main(jobs: Path, out: Path) -> None:
    """Run a job on all ranks. An error is its result, and the next job starts in a new world."""
    rank = int(os.environ["RANK"])
    results = {}
    mark(f"rank {rank}".encode())
    for name, options in json.loads(jobs.read_text()).items():
        torch._dynamo.reset()
        without_options, job_options = remove_compiler_options(options)
        try:
            with without_options:
                results[name] = measure(name, job_options, out.parent)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            if dist.is_initialized():
                dist.destroy_process_group()
        # The memory that this job leaves would be counted in the next job.
        gc.collect()
        torch.cuda.empty_cache()
    out.with_name(f"{out.name}.{rank}").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
