"""`titanlite train --dry-run`: the real build and real steps on rows without text.

Invariant: no data is read, and no file or folder is made.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.data.batch import blank_microbatch
from titanlite.observe.flops import state_bytes
from titanlite.observe.forecast import GIB, handed_down
from titanlite.optim.schedule import learning_rate
from titanlite.parallel.init_weights import check_memory
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.runtime.logging import setup_logging
from titanlite.runtime.world import process_group
from titanlite.train.out_of_memory import explained, is_out_of_memory
from titanlite.train.step import TrainStep


def dry_run(run: Run, argv: Sequence[str] = ()) -> None:
    """Build the run on its devices, do two full-size steps, and log their memory and time beside the plan.

    The first step compiles what is to be compiled. The second one is timed.

    Raises:
        UserError: The run does not fit into memory.
    """
    with process_group(run.job) as device:
        log = setup_logging(dist.get_rank(), None).info
        try:
            _steps(run, device, log)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(str(explained(error, run, argv, device, "in the dry run"))) from None


def _steps(run: Run, device: torch.device, log: Callable[[str], None]) -> None:
    check_memory(run, state_bytes(run), device)
    started = time.perf_counter()
    mesh = build_mesh(run.degrees, device.type)
    update = TrainStep(run, mesh, build_model(run, mesh, device, log), device)
    update.precompute_scales()
    training = run.job.training
    rows = [
        blank_microbatch(training.local_batch_size, training.seq_len, run.job.dataset.document_mask, device)
        for _ in range(run.microbatches)
    ]
    tokens = len(rows) * training.local_batch_size * training.seq_len
    seconds = [time.perf_counter() - started]
    for step in (1, 2):
        started = time.perf_counter()
        lr = learning_rate(step, run.job.optimizer.lr, run.job.lr_scheduler, training.steps)
        update(rows, tokens, lr).grad_norm.item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    if device.type == "cuda":
        peak, what = torch.cuda.max_memory_allocated(device), "allocated to tensors"
    else:
        peak, what = _resident(), "of the process"
    worst = torch.tensor([float(peak), seconds[2]], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    peak, step_seconds = worst.tolist()
    speed = run.global_batch_size * training.seq_len / step_seconds / run.world_size
    log(f"Dry run: built in {seconds[0]:.1f} s, step 1 in {seconds[1]:.1f} s, step 2 in {step_seconds:.3g} s.")
    log(f"On the rank with the most: {peak / GIB:.2f} GiB {what}; {speed:,.0f} tokens/s per device.")
    if plan := handed_down():
        log(plan.line())
        log(plan.compared(peak, step_seconds))


def _resident() -> int:
    """The largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
