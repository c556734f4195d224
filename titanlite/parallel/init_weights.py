"""Allocation and initialization of a sharded model.

Invariant: Each rank draws the full tensor of each parameter from a generator seeded by the run seed
and the parameter name, and keeps only its shard. The initial weights are therefore bitwise equal on
any number of ranks and with any layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.model.llama import Llama
from titanlite.optim.adamw import shard_slices, wrap_shard


def keep_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of a full tensor into a parameter, without communication.

    Args:
        parameter: Parameter to overwrite: a DTensor, or a plain tensor that gets all of `full`.
        full: Value of the whole parameter, which must be the same on every rank.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return

    # Only a DTensor with the same layout can be copied into a DTensor without communication.
    shard = full[shard_slices(parameter)].to(parameter.dtype)
    parameter.copy_(wrap_shard(shard.contiguous(), parameter))


def materialize(model: Llama, device: torch.device, seed: int, offload: bool) -> None:
    """Allocate the shards of a model that is on the meta device, and initialize its weights.

    Args:
        model: Model after `parallelize`.
        device: Device on which the initial values are drawn. With the meta device, the model is
            left unchanged.
        seed: Seed of the run.
        offload: Allocate the shards on the CPU instead of on `device`, for CPU offload.
    """
    if device.type == "meta":
        return
    model.to_empty(device="cpu" if offload else device)
    model.init_weights(seed, keep_shard, device)
