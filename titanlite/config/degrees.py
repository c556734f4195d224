"""How many ranks lie along each dimension of the world.

Invariant: no torch here, so that a job file can be checked in a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.config import schema

MOST_RANKS = 1_000_000
"""More ranks than any machine has. A larger number is a mistake."""


@dataclass(frozen=True)
class Degrees:
    """How many ranks lie along each dimension of the world; outermost first, as ranks are numbered."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int

    @property
    def data(self) -> int:
        """Number of parts of a global batch; each is read by other ranks."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.pipeline * self.data * self.context * self.tensor


def degrees(config: schema.Parallelism, world_size: int) -> Degrees:
    """The layout of `world_size` ranks. data_parallel_shard_degree = -1 becomes what the other degrees leave, at least
    1."""
    pipeline, context, tensor = (
        config.pipeline_parallel_degree,
        config.context_parallel_degree,
        config.tensor_parallel_degree,
    )
    replicate, shard = config.data_parallel_replicate_degree, config.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, world_size // (pipeline * replicate * context * tensor))
    return Degrees(pipeline, replicate, shard, context, tensor)


def sequence_divisor(degree: Degrees) -> int:
    """The number that must divide the length of a row.

    Each context rank has two chunks of a row, and the tensor ranks divide the part of a context rank."""
    context = 2 * degree.context if degree.context > 1 else 1
    if degree.tensor == 1:
        return context
    # The part of a context rank, T / context, must divide by the tensor degree as well.
    need = degree.context * degree.tensor
    while need % context:
        need += degree.context * degree.tensor
    return need
