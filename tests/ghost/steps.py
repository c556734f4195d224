"""Train a few steps of several jobs on the ghost, one job after the other in the same ranks, and write what they took.

`torchrun steps.py JOBS.json OUT`. The first file has name -> options. OUT.RANK gets name -> what the last two
steps of that rank took (see `measure`); the log of the ghost has them between the lines `mark job NAME` and
`mark end`. None of them is logged, so nothing in them may wait for the device.
"""

import ctypes
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from titanlite.hooks.guards import NonFiniteGuard
from titanlite.load_run import load_run
from titanlite.train.loop import Trainer

mark = ctypes.CDLL("libcuda.so.1").ghost_mark
WARM_STEPS, STEPS = 3, 2


def read(guard: Any) -> None:
    """As the guard does, but whatever is read: memory that no kernel wrote has any value."""
    unread, guard._unread = guard._unread, []
    torch.stack([result.skipped for _, result in unread]).tolist()


NonFiniteGuard._read = read  # pyright: ignore


def measure(name: str, options: list[str], folder: Path) -> dict[str, Any]:
    """Steps before the measured ones compile and allocate. A compiler that compiles anew in later steps is counted."""
    counters.clear()
    run = load_run([*options, "--job.dump_folder", str(folder / name)], world_size=int(os.environ["WORLD_SIZE"]))
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
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "of other streams": sum(part["total_size"] for part in torch.cuda.memory_snapshot() if part["stream"]),
        }


def main(jobs: Path, out: Path) -> None:
    """All ranks take part; an error of a job is its result, and the next one starts in a new world."""
    rank, found = int(os.environ["RANK"]), {}
    mark(f"rank {rank}".encode())
    for name, options in json.loads(jobs.read_text()).items():
        torch._dynamo.reset()
        try:
            found[name] = measure(name, options, out.parent)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            if dist.is_initialized():
                dist.destroy_process_group()
        gc.collect()  # of what the job leaves: its memory would be a part of the next one's
        torch.cuda.empty_cache()
    out.with_name(f"{out.name}.{rank}").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
