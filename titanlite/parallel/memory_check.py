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


def state_bytes(run: Run, num_params: int) -> int:
    """Bytes of the weights, the gradients and both moments on one rank."""
    size = {"float32": 4, "bfloat16": 2}
    of_a_parameter = 2 * size[run.job.training.dtype] + 2 * size[run.state_dtype]
    return num_params * of_a_parameter * run.degrees.replicate // run.world_size


def check_memory(run: Run, num_params: int, device: torch.device) -> None:
    """Compare the state with the memory of the device, or of this machine if the state is kept on the CPU.

    Raises:
        UserError: The state is larger.
    """
    if device.type == "cuda" and not run.job.training.enable_cpu_offload:
        ranks, where, memory = 1, "this GPU", torch.cuda.get_device_properties(device).total_memory
    else:
        ranks, where = int(os.environ["LOCAL_WORLD_SIZE"]), "this machine"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = state_bytes(run, num_params) * ranks
    if needed > memory:
        raise UserError(
            f'model.flavor = "{run.job.model.flavor}", {num_params:,} parameters: weights, gradients and optimizer '
            f"state take {needed / GIB:.1f} GiB on {where}, which has {memory / GIB:.1f} GiB. Take more or larger "
            'devices, a smaller model, or training.dtype = "bfloat16" with optimizer.stochastic_rounding.'
        )
