"""Divide a model into pipeline stages, based on estimates of their time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from titanlite.config.flavors import Architecture

FLOPS_PER_BYTE = 300  # bf16 FLOP/s of an H100 divided by its memory bandwidth
LOSS_TOKENS = 4096  # number of tokens whose logits are in memory at once
LOGIT_BYTES = 6  # bytes per logit: 2 for its bf16 value, and 4 for its fp32 gradient


@dataclass(frozen=True)
class PieceCosts:
    """Time or memory of each kind of model part, in any unit, to balance pipeline stages.

    Attributes:
        embedding: Cost of the embedding, which is in the first pipeline stage.
        block: Cost of one transformer block.
        output: Cost of the output layer and the loss, which are in the last pipeline stage.
    """

    embedding: float
    block: float
    output: float

    def get_stage_cost(self, stage: int, num_stages: int, num_blocks: int) -> float:
        """Return the total cost of the parts that a pipeline stage contains.

        Args:
            stage: Index of the stage, from 0.
            num_stages: Total number of stages.
            num_blocks: Number of blocks in the stage.
        """
        cost = num_blocks * self.block
        if stage == 0:
            cost += self.embedding
        if stage == num_stages - 1:
            cost += self.output
        return cost


def forward_flops(arch: Architecture, seq_len: int) -> PieceCosts:
    """Estimate the forward FLOPs per token of the embedding, a block and the output.

    The embedding has no matmuls, so its time is expressed as the number of FLOPs that would take
    the same time.

    Args:
        arch: Architecture of the model.
        seq_len: Sequence length in tokens, which determines the cost of attention.
    """
    matmul_flops = 2 * arch.block_matrices
    attention_flops = 4 * arch.attended(seq_len) * arch.q_dim  # scores and weighted sum
    return PieceCosts(
        embedding=_convert_embedding_time(arch, seq_len),
        block=matmul_flops + attention_flops,
        output=2 * arch.dim * arch.vocab_size,
    )


def _convert_embedding_time(arch: Architecture, seq_len: int) -> float:
    """Return the forward FLOPs per token of a matmul that would take as long as the embedding.

    The lookup in the forward pass is ignored. The backward pass takes the time to write a dense
    fp32 gradient, once per sequence.
    """
    gradient_bytes = 4 * arch.vocab_size * arch.dim
    flops_during_write = gradient_bytes * FLOPS_PER_BYTE
    # A matmul takes 3 FLOPs in total for each FLOP of its forward pass.
    return flops_during_write / (3 * seq_len)


def activation_values(arch: Architecture, tensor_degree: int) -> float:
    """Estimate how many values per token a block stores for its backward pass on each rank.

    This assumes no activation checkpointing.

    Args:
        arch: Architecture of the model.
        tensor_degree: Tensor-parallel degree.
    """
    residuals = 2 * arch.dim
    attention = 2 * arch.q_dim + 2 * arch.kv_dim  # queries, keys, values and output
    feed_forward = 3 * arch.ffn_dim  # SwiGLU
    norm_outputs = 2 * arch.dim  # not sharded by tensor parallelism
    return (residuals + attention + feed_forward) / tensor_degree + norm_outputs


class _SplitCost(NamedTuple):
    """Cost of dividing a model into pipeline stages. Smaller is better.

    Costs are compared as tuples: first by `slowest_time`, then by `sum_of_squares`.

    Attributes:
        slowest_time: Time of the slowest stage, which determines the speed of the pipeline.
        sum_of_squares: Sum of the squared times of all stages. It breaks ties: it is smaller if the
            times are more even.
    """

    slowest_time: float
    sum_of_squares: float

    def add_stage(self, time: float) -> _SplitCost:
        """Return the cost of the split with one more stage."""
        return _SplitCost(max(self.slowest_time, time), self.sum_of_squares + time * time)


class _Split(NamedTuple):
    """A division of the first n blocks of a model into pipeline stages.

    Attributes:
        cost: Cost by which splits are compared.
        starts: First block of each stage, starting with 0.
    """

    cost: _SplitCost
    starts: list[int]


@cache  # a layout search calls this thousands of times, with few distinct arguments
def balanced_cuts(
    times: PieceCosts, memory: tuple[PieceCosts, ...], num_layers: int
) -> tuple[int, ...]:
    """Divide a model into pipeline stages such that the slowest stage is as fast as possible.

    No stage takes more memory than the largest stage of an even split. If several splits are
    equally fast, choose the one with the most even times.

    Args:
        times: Time of the embedding, a block and the output.
        memory: Memory of the same parts, for each stage.
        num_layers: Number of blocks of the model.

    Returns:
        First block of stages 1, 2, ... For example, (3, 6) means that stage 1 begins with block 3.
    """
    num_stages = len(memory)
    assert num_stages <= num_layers
    max_memory = _max_memory_of_even_split(memory, num_layers)

    # Add one stage after another (dynamic programming). `best_splits` maps each possible number of
    # blocks n to the best split of the first n blocks into the stages so far.
    best_splits = {0: _Split(_SplitCost(0.0, 0.0), starts=[])}  # no stages and no blocks yet
    for stage, piece_memory in enumerate(memory):
        # Compute the time of this stage for each number of blocks that fits into memory.
        time_of_size = {}
        for num_blocks in range(1, num_layers + 1):
            stage_memory = piece_memory.get_stage_cost(stage, num_stages, num_blocks)
            if stage_memory > max_memory:
                break
            time_of_size[num_blocks] = times.get_stage_cost(stage, num_stages, num_blocks)

        best_splits = _add_stage(best_splits, time_of_size, num_layers)

    best_split = best_splits[num_layers]
    return tuple(best_split.starts[1:])  # without stage 0, which begins with block 0


def _add_stage(
    best_splits: dict[int, _Split], time_of_size: dict[int, float], num_layers: int
) -> dict[int, _Split]:
    """Return the best splits with one more pipeline stage, given the best splits without it.

    Append a stage of each possible size to each split, and keep the best result for each total
    number of blocks. This is one step of the dynamic programming in `balanced_cuts`.

    Args:
        best_splits: Best split of the first n blocks into the stages so far, for each possible n.
        time_of_size: Time of the new stage by its number of blocks, in ascending order.
        num_layers: Number of blocks of the model.
    """
    longer_splits: dict[int, _Split] = {}
    for start, split in best_splits.items():
        for num_blocks, time in time_of_size.items():
            # The new stage contains the blocks from `start` to `end` - 1.
            end = start + num_blocks
            if end > num_layers:
                break  # all further stages are larger

            cost = split.cost.add_stage(time)
            best_so_far = longer_splits.get(end)
            if best_so_far is None or cost < best_so_far.cost:
                longer_splits[end] = _Split(cost, [*split.starts, start])
    return longer_splits


def _max_memory_of_even_split(memory: tuple[PieceCosts, ...], num_layers: int) -> float:
    """Return the memory of the largest pipeline stage if the model is split evenly.

    Args:
        memory: Memory of the embedding, a block and the output, for each stage.
        num_layers: Number of blocks of the model.
    """
    num_stages = len(memory)
    boundaries = [0, *even_cuts(num_layers, num_stages), num_layers]
    sizes = [
        memory[stage].get_stage_cost(stage, num_stages, end - first)
        for stage, (first, end) in enumerate(pairwise(boundaries))
    ]
    return max(sizes)


def even_cuts(layers: int, stages: int) -> list[int]:
    """Split a model evenly, and return the first block of pipeline stages 1, 2, ...

    The embedding and the output count as one block each. For example, 7 blocks in 3 stages give
    [2, 5]: the embedding and 2 blocks, then 3 blocks, then 2 blocks and the output.

    Args:
        layers: Number of blocks of the model.
        stages: Number of stages.
    """
    size, surplus = divmod(layers + 2, stages)  # the first `surplus` stages have one extra block
    cuts = []
    for stage in range(1, stages):
        num_before = stage * size + min(stage, surplus)  # the embedding and the blocks before
        num_remaining = stages - stage  # this stage and all later ones, which need a block each
        cuts.append(min(num_before - 1, layers - num_remaining))
    return cuts
