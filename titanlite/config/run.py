"""Combine a job with a number of ranks, and derive all values that other modules need.

A `Run` contains the job, the number of ranks, and derived values such as the model architecture,
the parallelism degrees, the pipeline stages and the batch sizes.

Invariant: a `Run` is immutable and does not import torch. `titanlite.load_run` creates it and
rejects invalid jobs. All other code takes the `Run` as an argument and never derives these values a
second time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from titanlite.config import schema
from titanlite.config.compute_dtype import ComputeDtype, fast_compute_dtype
from titanlite.config.flavors import FLAVORS, Architecture
from titanlite.config.load import resolve_path
from titanlite.config.models import Section
from titanlite.config.registry import ARCHITECTURES
from titanlite.config.stages import (
    LOGIT_BYTES,
    LOSS_TOKENS,
    PieceCosts,
    activation_values,
    balanced_cuts,
    forward_flops,
)

MOST_RANKS = 1_000_000
"""Maximum number of ranks. A larger number is reported as a mistake."""
ONE_STAGE_A_RANK = ("1F1B", "GPipe")
"""Pipeline schedules that run exactly one stage on each rank."""
V_SHAPED = ("ZBVZeroBubble",)  # rank r runs stages r and n - 1 - r
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Zero-bubble pipeline schedules, which compute weight gradients later than activation gradients.

They do not support compiled blocks, whose backward pass frees buffers ("donated buffers") that the
weight gradients need. With donated buffers disabled, the fp32 loss is off by 1.4e-3 after ten steps
in torch 2.13.
"""
LONGEST_DEFAULT_SEQUENCE = 4096
"""Maximum default sequence length, in tokens, of a job that starts from a pretrained model."""
SMALL_GRADIENTS = 2**28
"""Maximum size, in bytes, of unsharded gradients that count as small for `fsdp_reduce = "auto"`."""


@dataclass(frozen=True)
class Degrees:
    """Number of ranks along each dimension of the device mesh, outermost dimension first.

    Attributes:
        pipeline: Pipeline-parallel degree.
        replicate: Number of model replicas that are kept in sync by all-reduce (DDP or HSDP).
        shard: Number of ranks that the parameters are sharded over (FSDP).
        context: Context-parallel degree: ranks that share each sequence.
        tensor: Tensor-parallel degree.
    """

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int

    @property
    def data(self) -> int:
        """Data-parallel degree: the number of parts that a global batch is split into."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """Total number of ranks, the product of all degrees."""
        return self.pipeline * self.data * self.context * self.tensor


@dataclass(frozen=True)
class Run:
    """A job together with the number of ranks that run it, and all values derived from both.

    Values are derived on first access, so that validation can use valid parts of an otherwise
    invalid job.

    Attributes:
        job: The complete configuration, merged from the job file, the command line and defaults.
        world_size: Number of ranks, over all nodes.
    """

    job: schema.JobConfig
    world_size: int = 1

    @cached_property
    def arch(self) -> Architecture:
        """Model architecture: the flavor that the job names, with the overrides of the job."""
        model = self.job.model
        # The section of a plugin architecture has the same name as the architecture.
        plugin_sections = self.job.model_extra or {}
        return build_architecture(model, plugin_sections.get(model.architecture))

    @cached_property
    def degrees(self) -> Degrees:
        """Number of ranks along each dimension of the device mesh."""
        return compute_degrees(self.job.parallelism, self.world_size)

    @cached_property
    def stages(self) -> list[range]:
        """Block indices of each pipeline stage, for example [range(0, 3), range(3, 6)].

        Without pipeline parallelism, one stage contains all blocks.
        """
        cuts: Sequence[int] = []
        if self.degrees.pipeline > 1:
            cuts = self.pipeline_cuts or self._choose_cuts()
        boundaries = [0, *cuts, self.arch.n_layers]
        return [range(first, end) for first, end in pairwise(boundaries)]

    def _choose_cuts(self) -> tuple[int, ...]:
        """Choose the first blocks of pipeline stages 1, 2, ... such that stages are balanced."""
        num_stages = self.degrees.pipeline * self.stages_per_rank
        times = forward_flops(self.arch, self.job.training.seq_len)
        memory = tuple(stage_memory(self, num_stages))
        return balanced_cuts(times, memory, self.arch.n_layers)

    @property
    def stages_per_rank(self) -> int:
        """Number of stages that the pipeline schedule runs on each rank by default."""
        return 1 if self.job.parallelism.pipeline_parallel_schedule in ONE_STAGE_A_RANK else 2

    @property
    def pipeline_cuts(self) -> list[int]:
        """Index of the first block of each pipeline stage after stage 0, as set by the job.

        For example, the split points ["layers.3", "layers.6"] give [3, 6]. The list is empty if the
        job does not set split points.
        """
        points = self.job.parallelism.pipeline_parallel_split_points
        return [int(point.removeprefix("layers.")) for point in points]

    @property
    def global_batch_size(self) -> int:
        """Default number of sequences per optimizer step, summed over all ranks.

        A stage in [[dataset.stages]] can override it. Use `batch_size` to get the value for a step.
        """
        size = self.job.training.global_batch_size
        return self.global_microbatch_size if size == -1 else size

    def batch_size(self, done: int) -> int:
        """Return the global batch size of the step that follows `done` completed steps.

        Args:
            done: Number of completed optimizer steps.

        Returns:
            Number of sequences, summed over all ranks.
        """
        return self.job.dataset.get_stage_value("global_batch_size", done, self.global_batch_size)

    @property
    def sequence_counts(self) -> list[tuple[int, int]]:
        """Pairs (first step, number of training sequences), one for each data stage of the run.

        Steps are counted from 0. For example, with 8 sequences per step up to step 99 and 16 in the
        last 50 steps, the pairs are [(0, 800), (100, 800)].
        """
        return self.count_sequences(self.job.training.steps)

    def count_sequences(self, steps: int) -> list[tuple[int, int]]:
        """Count the training sequences of each data stage in the first `steps` steps of the run.

        Returns:
            For each stage that begins before step `steps` (counted from 0), a pair of its first
            step and its number of sequences.
        """
        starts = {0, *(stage.start_step for stage in self.job.dataset.stages)}
        starts_in_run = sorted(start for start in starts if start < steps)
        stages = pairwise([*starts_in_run, steps])
        return [(start, (end - start) * self.batch_size(start)) for start, end in stages]

    @property
    def largest_batch_size(self) -> int:
        """Largest global batch size of any step of the run, in sequences."""
        return max(self.batch_size(first_step) for first_step, _ in self.sequence_counts)

    @property
    def microbatches(self) -> int:
        """Number of microbatches (forward passes) per optimizer step on each data-parallel rank."""
        return self.global_batch_size // self.global_microbatch_size

    @property
    def global_microbatch_size(self) -> int:
        """Number of sequences per microbatch, summed over all ranks."""
        return self.job.training.local_batch_size * self.degrees.data

    @property
    def local_microbatch_tokens(self) -> int:
        """Number of tokens that a rank processes per microbatch.

        A context-parallel rank processes only its share of each sequence.
        """
        training = self.job.training
        return training.local_batch_size * training.seq_len // self.degrees.context

    @cached_property
    def fsdp_reduce(self) -> Literal["step", "microbatch"]:
        """When FSDP reduces gradients: once per optimizer "step", or after each "microbatch".

        Reducing once per step saves communication, but each rank stores unsharded gradients until
        the last microbatch. If the job sets "auto", the value is "microbatch" only if these
        gradients are large, and if that saves memory without additional rounding errors.
        """
        setting = self.job.parallelism.fsdp_reduce
        if setting != "auto":
            return setting
        if self._can_reduce_microbatches() and self._gradient_bytes() > SMALL_GRADIENTS:
            return "microbatch"
        return "step"

    def _can_reduce_microbatches(self) -> bool:
        """Return whether reducing per microbatch saves memory without more rounding errors."""
        if self.degrees.pipeline > 1:  # not supported
            return False

        training = self.job.training
        if training.dtype != training.mixed_precision_reduce:  # each reduction would round the sum
            return False

        is_sharded = self.degrees.shard * self.degrees.context > 1 or training.enable_cpu_offload
        has_microbatches = self.largest_batch_size > self.global_microbatch_size
        return is_sharded and has_microbatches

    def _gradient_bytes(self) -> int:
        """Estimate the size of the unsharded gradients on a rank in fp32, in bytes."""
        matrices = self.arch.n_layers * self.arch.block_matrices
        embeddings = 2 * self.arch.vocab_size * self.arch.dim
        return 4 * (matrices + embeddings) // self.degrees.tensor

    @property
    def data_seed(self) -> int:
        """Random seed for the data order: `dataset.seed` or, if not set, `training.seed`."""
        seed = self.job.dataset.seed
        return self.job.training.seed if seed is None else seed

    @property
    def validation_seed(self) -> int:
        """Random seed that selects the validation documents.

        If the documents are held out from the training data, this is `dataset.seed`, and otherwise
        `validation.seed`. If the key that applies is not set, this is `training.seed`.
        """
        has_holdout = self.job.validation.holdout > 0
        seed = self.job.dataset.seed if has_holdout else self.job.validation.seed
        return self.job.training.seed if seed is None else seed

    @property
    def tokenizer_path(self) -> Path:
        """Local path of the tokenizer. A tokenizer at a URL is downloaded to the cache first."""
        return resolve_path(self.job.tokenizer.path)

    @property
    def dump_folder(self) -> Path:
        """Output folder of the run, which contains checkpoints, metrics and logs."""
        return Path(self.job.job.dump_folder)

    @property
    def checkpoint_folder(self) -> Path:
        """Folder that contains the checkpoints, for example "outputs/llama/checkpoint"."""
        return self.dump_folder / self.job.checkpoint.folder

    def resolve_compute_dtype(self, on_gpu: bool, resumed: ComputeDtype | None = None) -> Run:
        """Return a run in which "auto" in `training.mixed_precision_param` is replaced by a dtype.

        If the job already sets a dtype, return the run unchanged. Call this after the ranks have
        started, because the dtype depends on their hardware.

        Args:
            on_gpu: Whether the ranks compute on GPUs.
            resumed: Compute dtype of the checkpoint to resume from, which takes precedence. None
                for a new run.
        """
        if self.job.training.mixed_precision_param != "auto":
            return self
        dtype = resumed or fast_compute_dtype(on_gpu)
        return with_keys(self, {"training.mixed_precision_param": dtype})

    @property
    def masks_attention(self) -> bool:
        """Whether attention needs more than a causal mask, for documents or a sliding window."""
        has_window = 0 < self.arch.sliding_window < self.job.training.seq_len
        return self.job.dataset.document_mask or has_window

    def resolve_attention_backend(self, on_gpu: bool) -> Run:
        """Return a run in which "auto" in `model.attention_backend` is replaced by a backend.

        On a GPU, choose flex attention if attention needs a mask for documents, a sliding window or
        context parallelism. The alternatives are a boolean mask of T x T elements, and kernels for
        variable lengths, which have not been timed on a real GPU. In all other cases, choose scaled
        dot-product attention.

        Args:
            on_gpu: Whether the ranks compute on GPUs.
        """
        if self.job.model.attention_backend != "auto":
            return self
        needs_mask = self.masks_attention or self.degrees.context > 1
        backend = "flex" if on_gpu and needs_mask else "sdpa"
        return with_keys(self, {"model.attention_backend": backend})

    def compiles(self, component: schema.Component) -> bool:
        """Return whether the job compiles `component`, for example "model" or "loss"."""
        return self.job.compile.enable and component in self.job.compile.components

    @property
    def state_dtype(self) -> Literal["float32", "bfloat16"]:
        """Dtype in which the optimizer stores its moments."""
        return self.job.optimizer.state_dtype or self.job.training.dtype


def with_keys(run: Run, settings: Mapping[str, Any]) -> Run:
    """Return a copy of a run with some keys changed. The new values are not validated.

    Args:
        run: The run to change.
        settings: New value of each key, by "section.key". For example, {"model.n_layers": 4}.
    """
    job = run.job
    for key, value in settings.items():
        section, name = key.split(".")
        job = job.with_section(section, **{name: value})
    return Run(job, run.world_size)


def sequence_divisor(degree: Degrees) -> int:
    """Return the number by which the sequence length must be divisible in a parallel layout.

    Context parallelism splits each sequence into two chunks per rank, to balance the work under a
    causal mask. Tensor parallelism then splits the tokens of each rank again.

    Args:
        degree: Parallelism degrees.
    """
    context_chunks = 2 * degree.context if degree.context > 1 else 1
    return math.lcm(context_chunks, degree.context * degree.tensor)


def stage_memory(run: Run, num_stages: int) -> list[PieceCosts]:
    """Estimate how much memory each part of a model would take in each pipeline stage.

    The parts are the embedding, a transformer block and the output layer. Only a block can take
    more memory in early stages, which keep the activations of more microbatches in some schedules.

    Args:
        run: The run.
        num_stages: Total number of pipeline stages.

    Returns:
        Bytes per rank of each part, for each stage. `PieceCosts.get_stage_cost` adds up the parts
        that a stage contains.
    """
    bytes_per_parameter = _bytes_per_parameter(run)
    block_weight_bytes = run.arch.block_matrices * bytes_per_parameter
    embedding_bytes = run.arch.vocab_size * run.arch.dim * bytes_per_parameter
    output_bytes = embedding_bytes + _logit_bytes(run)  # its matrix has the same size
    microbatch_bytes = _block_activation_bytes(run)

    stages = []
    for stage in range(num_stages):
        activation_bytes = _microbatches_in_flight(run, stage) * microbatch_bytes
        block_bytes = block_weight_bytes + activation_bytes
        stages.append(PieceCosts(embedding_bytes, block_bytes, output_bytes))
    return stages


def _block_activation_bytes(run: Run) -> float:
    """Estimate the bytes of bf16 activations that a block keeps per microbatch on each rank."""
    return 2 * _kept_values_per_token(run) * run.local_microbatch_tokens


def _logit_bytes(run: Run) -> float:
    """Estimate the bytes of the logits of one chunk of tokens.

    The loss processes one chunk at a time, to save memory.
    """
    chunk_tokens = min(run.local_microbatch_tokens, LOSS_TOKENS)
    # Tensor parallelism splits the logits along the vocabulary.
    num_logits = chunk_tokens * run.arch.vocab_size / run.degrees.tensor
    return LOGIT_BYTES * num_logits


def _bytes_per_parameter(run: Run) -> float:
    """Estimate the bytes per parameter that a rank uses in a step with pipeline parallelism.

    Each rank has shards of the parameter, the gradient and two optimizer moments. Until the last
    microbatch, it also keeps the unsharded parameter and gradient. Tensor parallelism divides all
    of these.
    """
    bytes_of = {"float32": 4, "bfloat16": 2}
    sharded = 2 * bytes_of[run.job.training.dtype] + 2 * bytes_of[run.state_dtype]
    unsharded = bytes_of["bfloat16"] + bytes_of["float32"]
    num_shards = run.degrees.shard * run.degrees.context
    return (sharded / num_shards + unsharded) / run.degrees.tensor


def _kept_values_per_token(run: Run) -> float:
    """Estimate how many values per token a block keeps for its backward pass on each rank.

    Activation checkpointing reduces this number.
    """
    all_values = activation_values(run.arch, run.degrees.tensor)
    mode = run.job.activation_checkpoint.mode
    if mode == "none":
        return all_values
    if mode == "full":
        return run.arch.dim / run.degrees.tensor
    return 0.4 * all_values


def _microbatches_in_flight(run: Run, stage: int) -> int:
    """Return the maximum number of microbatches whose activations a pipeline stage keeps at once.

    With GPipe, a stage keeps the activations of all microbatches of a step. With 1F1B, early stages
    keep more than late stages.
    """
    schedule = run.job.parallelism.pipeline_parallel_schedule
    if schedule == "GPipe":
        return run.microbatches
    if schedule == "1F1B":
        return min(run.degrees.pipeline - stage, run.microbatches)
    return min(run.degrees.pipeline, run.microbatches)


def stage_rank(stage: int, stages: int, pipeline: int, schedule: str) -> int:
    """Return the pipeline rank that runs pipeline stage number `stage`.

    Args:
        stage: Index of the stage, from 0.
        stages: Total number of stages.
        pipeline: Pipeline-parallel degree.
        schedule: Name of the schedule. V-shaped schedules pair a stage from the start of the model
            with one from its end. All other schedules assign stages round-robin.
    """
    if schedule in V_SHAPED:
        return min(stage, stages - 1 - stage)
    return stage % pipeline


def compute_degrees(parallelism: schema.Parallelism, world_size: int) -> Degrees:
    """Return the number of ranks along each dimension of the device mesh.

    `data_parallel_shard_degree = -1` is replaced by `world_size` divided by the product of the
    other degrees, rounded down but at least 1.

    Args:
        parallelism: The [parallelism] section.
        world_size: Number of ranks, over all nodes.
    """
    pipeline = parallelism.pipeline_parallel_degree
    replicate = parallelism.data_parallel_replicate_degree
    shard = parallelism.data_parallel_shard_degree
    context = parallelism.context_parallel_degree
    tensor = parallelism.tensor_parallel_degree
    if shard == -1:
        shard = max(1, world_size // (pipeline * replicate * context * tensor))
    return Degrees(pipeline, replicate, shard, context, tensor)


def build_architecture(model: schema.Model, plugin_section: Section | None = None) -> Architecture:
    """Return the model architecture of a job: its flavor with the overrides in [model].

    Args:
        model: The [model] section.
        plugin_section: Section with the additional fields of a plugin architecture. None for the
            built-in architecture.
    """
    values = _get_flavor_values(model.flavor)
    for field in fields(Architecture):
        override = getattr(model, field.name)
        if override is not None:
            values[field.name] = override

    if plugin_section is not None:
        values |= dict(plugin_section)
    architecture_class = ARCHITECTURES[model.architecture]
    return architecture_class(**values)


def _get_flavor_values(name: str) -> dict[str, Any]:
    """Return the fields of the flavor called `name`, which a job may override.

    If `head_dim` is dim / n_heads, return it as 0, so that `Architecture` computes it after the job
    has overridden `dim` or `n_heads`.
    """
    flavor = FLAVORS[name]
    values = asdict(flavor)
    if flavor.head_dim * flavor.n_heads == flavor.dim:
        values["head_dim"] = 0
    return values


def model_tables(arch: Architecture) -> dict[str, dict[str, Any]]:
    """Convert a model architecture to the job sections that define it.

    Returns:
        Keys and values of each section, by section name. The sections are "model" and, if a plugin
        architecture has additional fields, the section of the plugin.
    """
    model_keys = {field.name for field in fields(Architecture)}
    values = asdict(arch)
    tables = {"model": {name: value for name, value in values.items() if name in model_keys}}

    plugin_keys = {name: value for name, value in values.items() if name not in model_keys}
    if plugin_keys:
        tables[arch.architecture] = plugin_keys
    return tables
