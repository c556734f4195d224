"""What a job means for a world of ranks. Each value that follows from the job and the world size is derived here only.

Invariant: a `Run` is immutable and does not use torch. `titanlite.load_run` makes it and refuses a job that breaks a
rule. All other code takes the `Run` or a part of it, and never derives such a value again.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

from titanlite.config import schema
from titanlite.config.flavors import FLAVORS, Architecture
from titanlite.config.load import resolve_path
from titanlite.config.registry import ARCHITECTURES

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


@dataclass(frozen=True)
class Run:
    """A job on `world_size` ranks.

    A value is derived when it is first read. So a `Run` can be made of a job that is not valid yet, and the rules read
    only those values that exist.

    Attributes:
        job: The job file and the command line, with the values that depend on other files filled in.
        world_size: Number of ranks: the processes of all machines together.
    """

    job: schema.JobConfig
    world_size: int = 1

    @cached_property
    def arch(self) -> Architecture:
        """The flavor with the overrides of the job. Raises KeyError for an unknown flavor."""
        return architecture(self.job.model, self.job)

    @cached_property
    def degrees(self) -> Degrees:
        """Number of ranks along each dimension of the world. data_parallel_shard_degree = -1 becomes what the other
        degrees leave, at least 1."""
        config, shard = self.job.parallelism, self.job.parallelism.data_parallel_shard_degree
        pipeline, replicate = config.pipeline_parallel_degree, config.data_parallel_replicate_degree
        context, tensor = config.context_parallel_degree, config.tensor_parallel_degree
        left = max(1, self.world_size // (pipeline * replicate * context * tensor))
        return Degrees(pipeline, replicate, left if shard == -1 else shard, context, tensor)

    @cached_property
    def stages(self) -> list[range]:
        """The blocks of each pipeline stage: cut at `pipeline_parallel_split_points`, or so that all stages cost the
        same. Without a pipeline there is one stage with all blocks."""
        config, pipeline = self.job.parallelism, self.degrees.pipeline
        if pipeline == 1:
            return [range(self.arch.n_layers)]
        per_rank = 1 if config.pipeline_parallel_schedule in ONE_STAGE_A_RANK else 2
        cuts = [int(point.removeprefix("layers.")) for point in config.pipeline_parallel_split_points]
        cuts = cuts or balanced_cuts(self.arch, self.job.training.seq_len, pipeline * per_rank)
        return [range(first, end) for first, end in pairwise([0, *cuts, self.arch.n_layers])]

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step, over all ranks, unless a stage says otherwise."""
        size = self.job.training.global_batch_size
        return self.job.training.local_batch_size * self.degrees.data if size == -1 else size

    def batch_size(self, done: int) -> int:
        """Rows of the optimizer step after `done` steps, over all ranks."""
        return self.job.dataset.staged(lambda stage: stage.global_batch_size, done, self.global_batch_size)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """The parts of the run in which no stage begins: how many steps are done before each, and its rows."""
        starts = {0, *(stage.start_step for stage in self.job.dataset.stages)}
        steps = self.job.training.steps
        ends = pairwise([*sorted(start for start in starts if start < steps), steps])
        return [(start, (end - start) * self.batch_size(start)) for start, end in ends]

    @property
    def microbatches(self) -> int:
        """Forward passes of a data-parallel rank in one optimizer step."""
        return self.global_batch_size // (self.job.training.local_batch_size * self.degrees.data)

    @property
    def data_seed(self) -> int:
        """Seed of the order of the training data."""
        seed = self.job.dataset.seed
        return self.job.training.seed if seed is None else seed

    @property
    def validation_seed(self) -> int:
        """Seed of the choice of documents to validate on. With validation.holdout they come from the training data, so
        its seed is used."""
        seed = self.job.dataset.seed if self.job.validation.holdout > 0 else self.job.validation.seed
        return self.job.training.seed if seed is None else seed

    @property
    def tokenizer_path(self) -> Path:
        """Path of the tokenizer."""
        return resolve_path(self.job.tokenizer.path)

    @property
    def dump_folder(self) -> Path:
        """Folder of all outputs."""
        return Path(self.job.job.dump_folder)

    @property
    def checkpoint_folder(self) -> Path:
        """Folder that contains a folder per saved step."""
        return self.dump_folder / self.job.checkpoint.folder

    def compiles(self, component: schema.Component) -> bool:
        """Whether the job asks to compile this component."""
        return self.job.compile.enable and component in self.job.compile.components

    @property
    def state_dtype(self) -> Literal["float32", "bfloat16"]:
        """Dtype of the optimizer's two moments."""
        return self.job.optimizer.state_dtype or self.job.training.dtype


def sequence_divisor(degree: Degrees) -> int:
    """The number that must divide the length of a row: each context rank has two chunks of it, and the tensor ranks
    divide the part of a context rank."""
    return math.lcm(2 * degree.context if degree.context > 1 else 1, degree.context * degree.tensor)


def piece_costs(arch: Architecture, seq_len: int) -> tuple[float, float, float]:
    """Cost of the embedding, of one block and of the output, in forward FLOPs per token.

    The embedding has no matmul. Its cost is the memory traffic of its dense gradient (V x C in fp32, once per row),
    converted to the FLOPs that the device could do in the same time, and divided by 3, because a step costs as much as
    three forward passes.
    """
    embedding = 4 * arch.vocab_size * arch.dim * FLOPS_PER_BYTE / (3 * seq_len)
    block = 2 * arch.block_matrices + 4 * arch.attended(seq_len) * arch.q_dim  # attention: scores and weighted sum
    return embedding, block, 2.0 * arch.dim * arch.vocab_size


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


def architecture(model: schema.Model, job: schema.JobConfig | None = None) -> Architecture:
    """The flavor with the job file's overrides applied, and the keys of the architecture's own table. A width of heads
    that is dim / n_heads follows these two."""
    names, flavor = [field.name for field in fields(Architecture)], FLAVORS[model.flavor]
    values = asdict(flavor) | {"head_dim": 0 if flavor.q_dim == flavor.dim else flavor.head_dim}
    values |= {name: getattr(model, name) for name in names if getattr(model, name) is not None}
    return ARCHITECTURES[model.architecture](**values | dict(getattr(job, model.architecture, ())))
