"""Refuses a run whose state is larger than the memory.

Invariant: the estimate is a lower bound, because it leaves out activations and buffers. A run that is refused would
have failed.
"""

from __future__ import annotations

import os

import torch

from titanlite.config.errors import UserError
from titanlite.config.run import Run

GIB = 2**30


def check_memory(run: Run, state_bytes: int, device: torch.device) -> None:
    """Compare `state_bytes`, a rank's weights, gradients and moments, with the memory of the device, or of this machine
    if the state is kept on the CPU.

    Raises:
        UserError: The state is larger.
    """
    if device.type == "cuda" and not run.job.training.enable_cpu_offload:
        ranks, where, memory = 1, "this GPU", torch.cuda.get_device_properties(device).total_memory
    else:
        ranks, where = int(os.environ["LOCAL_WORLD_SIZE"]), "this machine"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = state_bytes * ranks
    if needed > memory:
        raise UserError(
            f'model.flavor = "{run.job.model.flavor}": weights, gradients and optimizer state take {needed / GIB:.1f} '
            f"GiB on {where}, which has {memory / GIB:.1f} GiB. Take more or larger devices, a smaller model, or "
            'training.dtype = "bfloat16" with optimizer.stochastic_rounding. `titanlite plan` says what fits.'
        )
