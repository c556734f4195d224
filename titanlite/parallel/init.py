"""Initial weights of a sharded model.

Invariant 1: each rank draws the full tensor from the generator of (seed, name) and keeps its shard, so the weights
are bitwise the same on any mesh. May import torch and model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlite.model.llama import Llama


def keep_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of `full`, which every rank holds, into `parameter`; no communication."""
    if isinstance(parameter, DTensor):
        # Rounded to the parameter's dtype before it is cut, as the whole tensor would be.
        full = full.to(parameter.dtype)
        parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None))
    else:
        parameter.copy_(full)


def materialize(model: Llama, device: torch.device, seed: int) -> None:
    """Allocate a meta-device model's shards on `device` and draw its initial weights."""
    model.to_empty(device=device)
    model.init_weights(seed, keep_shard)
