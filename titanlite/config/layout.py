"""How the ranks of the world are laid out, and which blocks of the model each pipeline stage has.

Invariant: no torch here, so that a job file can be checked in a fraction of a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from titanlite.config import schema
from titanlite.config.flavors import Architecture

MOST_RANKS = 1_000_000
"""More ranks than any machine has. A larger number is a mistake."""
ONE_STAGE_A_RANK = ("1F1B", "GPipe")
V_SHAPED = ("ZBVZeroBubble",)  # rank r runs stages r and n - 1 - r
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")  # compute gradients of weights later than those of inputs
FLOPS_PER_BYTE = 300  # of an H100: its bf16 FLOP/s divided by its memory bandwidth


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
    pipeline, context = config.pipeline_parallel_degree, config.context_parallel_degree
    tensor, replicate = config.tensor_parallel_degree, config.data_parallel_replicate_degree
    shard = config.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, world_size // (pipeline * replicate * context * tensor))
    return Degrees(pipeline, replicate, shard, context, tensor)


def sequence_divisor(degree: Degrees) -> int:
    """The number that must divide the length of a row: each context rank has two chunks of it, and the tensor ranks
    divide the part of a context rank."""
    return math.lcm(2 * degree.context if degree.context > 1 else 1, degree.context * degree.tensor)


def stage_parts(config: schema.Parallelism, arch: Architecture, seq_len: int) -> list[range]:
    """The blocks of each stage. The cuts are at `pipeline_parallel_split_points`, or so that all stages cost the
    same."""
    if config.pipeline_parallel_split_points:
        cuts = [int(point.rpartition(".")[2]) for point in config.pipeline_parallel_split_points]
    else:
        per_rank = 1 if config.pipeline_parallel_schedule in ONE_STAGE_A_RANK else 2
        cuts = balanced_cuts(arch, seq_len, config.pipeline_parallel_degree * per_rank)
    return [range(first, end) for first, end in pairwise([0, *cuts, arch.n_layers])]


def piece_costs(arch: Architecture, seq_len: int) -> tuple[float, float, float]:
    """Cost of the embedding, of one block and of the output, in forward FLOPs per token.

    The embedding has no matmul. Its cost is the memory traffic of its dense gradient (V x C in fp32, once per row),
    converted to the FLOPs that the device could do in the same time, and divided by 3, because a step costs as much as
    three forward passes.
    """
    embedding = 4 * arch.vocab_size * arch.dim * FLOPS_PER_BYTE / (3 * seq_len)
    block = 2 * (2 * arch.dim * arch.dim + 2 * arch.dim * arch.kv_dim + 3 * arch.dim * arch.ffn_dim)
    block += 2 * seq_len * arch.dim  # causal attention: scores and weighted sum, half of 4 T C
    return embedding, float(block), 2.0 * arch.dim * arch.vocab_size


def balanced_cuts(arch: Architecture, seq_len: int, stages: int) -> list[int]:
    """First blocks of the stages 1, 2, ... that minimise the cost of the most expensive stage. Every stage has a block.

    Among equal solutions the smallest sum of squared costs is taken, so that the first and the last stage, which have
    the embedding and the output, do not get a surplus block.
    """
    embedding, block, output = piece_costs(arch, seq_len)
    layers = arch.n_layers
    assert stages <= layers

    # best[n]: (highest cost of a stage, sum of squared costs, cuts) of the stages so far, over the first n blocks
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(stages):
        extra = (embedding if stage == 0 else 0) + (output if stage == stages - 1 else 0)
        following: dict[int, tuple[float, float, list[int]]] = {}
        for done, (dearest, squares, cuts) in best.items():
            for end in range(done + 1, layers - (stages - 1 - stage) + 1):
                here = (end - done) * block + extra
                candidate = (max(dearest, here), squares + here * here, [*cuts, end])
                if end not in following or candidate[:2] < following[end][:2]:
                    following[end] = candidate
        best = following
    return best[layers][2][:-1]


def stage_rank(stage: int, stages: int, pipeline: int, schedule: str) -> int:
    """The pipeline rank that runs a stage."""
    if schedule in V_SHAPED:
        return min(stage, stages - 1 - stage)
    return stage % pipeline
