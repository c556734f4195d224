"""`titanlite train --dry-run`: the real build and real steps on rows without text.

Invariant: no data is read, and no file or folder is made.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.data.batch import blank_microbatch
from titanlite.observe.flops import state_bytes
from titanlite.observe.forecast import GIB, handed_down
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
            check_memory(run, state_bytes(run), device)
            mesh, training = build_mesh(run.degrees, device.type), run.job.training
            update = TrainStep(run, mesh, build_model(run, mesh, device, log), device)
            update.precompute_scales()
            shape = training.local_batch_size, training.seq_len, run.job.dataset.document_mask
            rows = [blank_microbatch(*shape, device) for _ in range(run.microbatches)]
            for _ in range(2):
                began = time.perf_counter()
                update(rows, len(rows) * shape[0] * shape[1], run.job.optimizer.lr).grad_norm.item()  # waits for it
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(str(explained(error, run, argv, device, "in the dry run"))) from None
        if device.type == "cuda":
            peak, what = torch.cuda.max_memory_allocated(device), "allocated to tensors"
        else:  # the largest resident set of this process so far
            unit = 1 if sys.platform == "darwin" else 1024
            peak, what = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "of the process"
        worst = torch.tensor([float(peak), time.perf_counter() - began], dtype=torch.float64, device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        most, seconds = worst.tolist()
        speed = run.global_batch_size * training.seq_len / seconds / run.world_size
        log(f"Dry run: on the rank with the most {most / GIB:.2f} GiB {what}.")
        log(f"The second step took {seconds:.3g} s: {speed:,.0f} tokens/s per device.")
        if plan := handed_down():
            log(plan.line())
            log(plan.compared(most, seconds))
