"""Initialization of sharded parameters.

Invariant: Each rank draws the full tensor of each parameter from a generator seeded by the run seed
and the parameter name, and keeps only its shard. The initial weights are therefore bitwise equal on
any number of ranks and with any layout.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

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
