"""Whether a run can fit at all: what its state takes, beside the memory that there is.

Invariant: a lower bound. It leaves out activations and buffers, so what it refuses would have failed. May import torch
and config.
"""

from __future__ import annotations

import os

import torch

from titanlite.config.errors import UserError
from titanlite.config.schema import JobConfig
from titanlite.parallel.layout import degrees

GIB = 2**30


def state_bytes(job: JobConfig, num_params: int, world: int) -> int:
    """Weights, gradients and both moments of one of `world` ranks."""
    size = {"float32": 4, "bfloat16": 2}
    stored = size[job.training.dtype]
    moments = 2 * size[job.optimizer.state_dtype or job.training.dtype]
    return num_params * (2 * stored + moments) * degrees(job.parallelism, world).replicate // world


def check_memory(job: JobConfig, num_params: int, world: int, device: torch.device) -> None:
    """Compare with the memory of the device, or, where the state lies there, of this machine.

    Raises:
        UserError: The state alone is larger.
    """
    if device.type == "cuda" and not job.training.enable_cpu_offload:
        ranks, where, memory = 1, "this GPU", torch.cuda.get_device_properties(device).total_memory
    else:
        ranks, where = int(os.environ["LOCAL_WORLD_SIZE"]), "this machine"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = state_bytes(job, num_params, world) * ranks
    if needed > memory:
        raise UserError(
            f'model.flavor = "{job.model.flavor}", {num_params:,} parameters: weights, gradients and optimizer state '
            f"take {needed / GIB:.1f} GiB on {where}, which has {memory / GIB:.1f} GiB. Take more or larger "
            'devices, a smaller model, or training.dtype = "bfloat16" with optimizer.stochastic_rounding.'
        )
