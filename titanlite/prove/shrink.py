"""Shrink a job to a small one that runs the same code, for `titanlite prove`.

Invariant: The small job keeps everything that decides which code runs: architecture, options of the
model, precision, parallel dimensions, optimizer and schedule. It only has smaller sizes. Properties
that it cannot keep are listed in `SmallJob.not_kept`.
"""

from __future__ import annotations

import fnmatch
import heapq
import inspect
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.config.errors import UserError
from titanlite.config.files import write_output
from titanlite.config.job_diff import flatten
from titanlite.config.registry import HOOKS
from titanlite.config.run import Run, sequence_divisor
from titanlite.config.schema import (
    Checkpoint,
    Dataset,
    JobConfig,
    Profiling,
    SampleOptions,
    TextSource,
    TokenizerOptions,
    Validation,
)
from titanlite.config.storage import as_url
from titanlite.data.sources.files import find_files
from titanlite.load_run import check_run, parse_train_options
from titanlite.model.formats import parameter_shapes
from titanlite.rules import check_stages, check_tensor_sizes, make_mistake

SEQ_LEN = 64
WINDOW = 24
HEAD_DIM = 16
QUANTIZED_HEAD_DIM = 64  # AdamW8bit only quantizes matrices with a multiple of 256 columns
TOY_VOCAB_SIZE = 4096  # vocabulary size of the tokenizer that is included in titanlite
TOY_TEXT = "toy_text.jsonl"
ONE_GROUP = 2**62  # more parameters than any model has, so all blocks share an FSDP group
LISTED_SECTIONS = ("model.", "training.", "parallelism.", "lr_scheduler.", "optimizer.", "float8.")


class SmallJob(NamedTuple):
    """The small version of a job that `titanlite prove` trains.

    Attributes:
        run: The small job and its number of ranks.
        changes: Options with a new value, such as "training.seq_len: 4096 -> 64".
        not_kept: Properties of the original job that the small job lacks, one sentence each.
    """

    run: Run
    changes: list[str]
    not_kept: list[str]


def parse_original(argv: Sequence[str]) -> JobConfig:
    """Parse the job to shrink from `argv`, the options of `titanlite train`.

    Also check that its parallel degrees fit its model, because the small version of the job has
    other sizes. Most other mistakes remain in the small version, whose validation reports them.

    Raises:
        UserError: If a value is invalid, or the parallel degrees do not fit the model.
    """
    parsed = parse_train_options(argv)
    if parsed.mistakes:
        raise parsed.error(parsed.mistakes)

    run = Run(parsed.job)  # the checks below do not use its number of ranks
    problems = list(check_tensor_sizes(run))  # heads, channels and chunks of each sequence
    if run.degrees.pipeline > 1:
        problems += check_stages(run)  # blocks per stage, and options without pipeline support
    if problems:
        raise parsed.error([make_mistake(run, problem) for problem in problems])
    return parsed.job


def shrink(job: JobConfig, world_size: int | None, steps: int, out: Path) -> SmallJob:
    """Shrink a job to a few small layers and short sequences, and validate the small job.

    Args:
        job: The job to shrink.
        world_size: Number of ranks of the small job. None uses 2 ranks along each parallel
            dimension of the job.
        steps: Number of steps to train.
        out: Output folder of the small job. If the small job cannot read the original data, a toy
            text is written there.

    Raises:
        UserError: If the job is invalid, or its parallel degrees do not fit `world_size`.
    """
    degrees = shrink_degrees(job, world_size)
    num_ranks = math.prod(degrees.values())
    original = Run(job, num_ranks)

    # Keep this order, because later changes depend on earlier sizes.
    not_kept: list[str] = []  # properties of the original job that the small job lacks
    small = job.with_section("parallelism", **degrees)
    small = _shrink_model(small, original, not_kept)
    small = _shrink_training(small, original, steps)
    small = _drop_options_of_missing_parameters(small, not_kept)
    small = _shrink_data(small, out, not_kept)
    small = _remove_hooks(small, not_kept)
    small = _disable_outputs(small, out)

    run = check_run(small, num_ranks)
    return SmallJob(run, list_changes(original, run), not_kept)


def list_changes(original: Run, small: Run) -> list[str]:
    """List the options that differ between a job and its small version.

    For example, "training.seq_len: 4096 -> 64".
    """
    before = _flat_options(original)
    after = _flat_options(small)
    return [
        f"{name}: {before.get(name)} -> {value}"
        for name, value in after.items()
        if name.startswith(LISTED_SECTIONS) and before.get(name) != value
    ]


def shrink_degrees(job: JobConfig, world_size: int | None) -> dict[str, int]:
    """Return small parallel degrees: 2 for each dimension that a job uses, and 1 for the others.

    If the job uses FSDP and `world_size` is set, choose the FSDP degree so that the small job uses
    all ranks.

    Args:
        job: The original job.
        world_size: Number of ranks of the small job. None means 2 along each parallel dimension.

    Returns:
        Degrees by option name, such as "tensor_parallel_degree".

    Raises:
        UserError: If the small job cannot use exactly `world_size` ranks.
    """
    names = (
        "data_parallel_replicate_degree",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
    )
    degrees = {name: min(2, getattr(job.parallelism, name)) for name in names}
    has_fsdp = job.parallelism.data_parallel_shard_degree != 1
    fsdp_degree = _choose_fsdp_degree(has_fsdp, math.prod(degrees.values()), world_size)
    return {**degrees, "data_parallel_shard_degree": fsdp_degree}


def _choose_fsdp_degree(has_fsdp: bool, other_degrees: int, world_size: int | None) -> int:
    """Choose the FSDP degree of a small job.

    For example, on 8 ranks with tensor and pipeline degrees of 2, the FSDP degree is 8 // 4 = 2.

    Args:
        has_fsdp: Whether the job uses FSDP. If not, the degree is 1.
        other_degrees: Product of all other parallel degrees.
        world_size: Number of ranks of the small job, or None for the smallest possible number.

    Raises:
        UserError: If the small job cannot use exactly `world_size` ranks.
    """
    if world_size is None:
        return 2 if has_fsdp else 1

    if has_fsdp:
        fsdp_degree = max(1, world_size // other_degrees)
        needed_ranks = f"a multiple of {other_degrees}"
    else:
        fsdp_degree = 1
        needed_ranks = str(other_degrees)
    if fsdp_degree * other_degrees != world_size:
        raise UserError(
            f"--world-size {world_size}: the small job needs {needed_ranks}, 2 ranks along each "
            "parallel dimension of the job."
        )
    return fsdp_degree


def _shrink_model(small: JobConfig, original: Run, not_kept: list[str]) -> JobConfig:
    """Shrink the sizes of a model, such as its width and number of blocks.

    The ratio of query heads to key-value heads stays the same. `head_dim * n_heads` equals the
    width of the small model if and only if it does in the original model.

    Args:
        small: Job with the small parallel degrees, which the small sizes must fit.
        original: The run with the original model.
        not_kept: List to extend with one sentence for each property that the small model lacks.
    """
    arch = original.arch
    job = original.job
    tensor_degree = small.parallelism.tensor_parallel_degree
    is_quantized = job.optimizer.name == "AdamW8bit"
    shard_multiple = job.float8.shard_multiple(tensor_degree) if job.float8.enable else 16

    # Choose the heads.
    head_dim = min(arch.head_dim, QUANTIZED_HEAD_DIM if is_quantized else HEAD_DIM)
    if job.float8.enable:
        # A rank may hold a single key-value head, whose FP8 matmuls need this width.
        head_dim = max(head_dim, shard_multiple)
    n_kv_heads = min(arch.n_kv_heads, max(2, tensor_degree))
    n_heads = n_kv_heads * (arch.n_heads // arch.n_kv_heads)

    # Choose the widths.
    dim = n_heads * head_dim
    if arch.q_dim != arch.dim:
        dim += 32  # so that q_dim and dim differ in the small model as well
    exact_ffn_dim = dim * arch.ffn_dim / arch.dim  # has the original ratio to the width
    ffn_multiple = shard_multiple * tensor_degree
    ffn_dim = ffn_multiple * max(1, round(exact_ffn_dim / ffn_multiple))

    if is_quantized and dim % 256:
        not_kept.append("8-bit moments: rows of the small matrices are not a multiple of 256.")

    sizes = {
        "dim": dim,
        "n_layers": _choose_num_blocks(original, small.parallelism.pipeline_parallel_degree),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "ffn_dim": ffn_dim,
        # Keep the remainder: a vocabulary that ranks divide unevenly must stay uneven.
        "vocab_size": TOY_VOCAB_SIZE + arch.vocab_size % tensor_degree,
        "sliding_window": min(arch.sliding_window, WINDOW),
        # Keep the ratios to the muP base model, because they determine the learning rates.
        "mup_base_dim": math.ceil(dim * arch.mup_base_dim / arch.dim),
        "mup_base_head_dim": math.ceil(head_dim * arch.mup_base_head_dim / arch.head_dim),
    }
    backend = job.model.attention_backend
    if backend in ("flex", "fa3", "fa4"):
        # These kernels need a GPU. Document bounds work on all devices.
        uses_bounds = job.model.uses_document_bounds and original.masks_attention
        backend = "varlen" if uses_bounds else "auto"
        not_kept.append(f"Attention kernels: {job.model.attention_backend}.")
    return small.with_section("model", **sizes, attention_backend=backend)


def _choose_num_blocks(original: Run, pipeline: int) -> int:
    """Return how many blocks a small model needs to contain every kind of original block.

    For example, if every fourth block has full attention, it needs at least four blocks.

    Args:
        original: The run with the original model.
        pipeline: Pipeline-parallel degree of the small model. Each stage needs at least one block.
    """
    num_stages = pipeline * original.stages_per_rank
    option = original.job.activation_checkpoint.selective_ac_option
    checkpoint_interval = 1 if option == "op" else int(option)  # one block per interval recomputes
    arch = original.arch
    pattern_length = max(arch.no_rope_interval, arch.full_attention_interval)
    return min(arch.n_layers, max(2, num_stages, checkpoint_interval, pattern_length))


def _shrink_training(small: JobConfig, original: Run, steps: int) -> JobConfig:
    """Shrink the number of steps, batch size, sequence length and warmup of a job.

    Also set the options that depend on the size of the model, such as the FSDP grouping of blocks,
    so that the small model behaves like the original model.

    Args:
        small: Job with the small model and the small parallel degrees.
        original: The run with the original job.
        steps: New number of steps.

    Returns:
        The changed job.
    """
    # Use short sequences, and a few microbatches if the original job has several.
    job = original.job
    degrees = Run(small).degrees
    divisor = sequence_divisor(degrees)
    seq_len = divisor * math.ceil(min(job.training.seq_len, SEQ_LEN) / divisor)
    local_batch_size = min(2, job.training.local_batch_size)
    # `Run(job)` has one rank, so a data-parallel degree of -1 (all remaining ranks) counts as 1.
    num_microbatches = 2 if Run(job).microbatches > 1 else 1
    if degrees.pipeline > 1:
        num_microbatches = 2 * degrees.pipeline  # so that microbatches overlap
    small = small.with_section(
        "training",
        steps=steps,
        tokens=None,
        tokens_per_parameter=None,
        seq_len=seq_len,
        local_batch_size=local_batch_size,
        global_batch_size=local_batch_size * degrees.data * num_microbatches,
        deterministic=True,
    )

    # If each original block has a separate FSDP group, so does each small block. Otherwise, all
    # small blocks share one group.
    has_large_blocks = original.arch.block_matrices >= job.parallelism.fsdp_min_num_params
    small = small.with_section(
        "parallelism",
        fsdp_min_num_params=0 if has_large_blocks else ONE_GROUP,
        fsdp_reduce=original.fsdp_reduce,
    )
    if job.float8.enable:
        small = small.with_section("float8", min_features=0)

    # Warmup, if there is any, takes one step.
    warmup_steps = 0 if job.lr_scheduler.warmup_steps == 0 else 1
    return small.with_section(
        "lr_scheduler", warmup_steps=warmup_steps, total_steps=None, decay_steps=None
    )


def _drop_options_of_missing_parameters(small: JobConfig, not_kept: list[str]) -> JobConfig:
    """Remove options that name blocks or parameters missing from the small model.

    Add one sentence to `not_kept` for each removed option.
    """
    if small.parallelism.pipeline_parallel_split_points:
        not_kept.append(
            "parallelism.pipeline_parallel_split_points: the small model has fewer blocks."
        )
        small = small.with_section("parallelism", pipeline_parallel_split_points=())

    parameter_names = list(parameter_shapes(Run(small).arch))
    groups = []
    for group in small.optimizer.groups:
        kept_patterns = []
        for pattern in group.params:
            if fnmatch.filter(parameter_names, pattern):
                kept_patterns.append(pattern)
            else:
                not_kept.append(f"optimizer.groups: {pattern!r} is not in the small model.")
        if kept_patterns:
            groups.append(group.model_copy(update={"params": tuple(kept_patterns)}))
    return small.with_section("optimizer", groups=tuple(groups))


def _shrink_data(small: JobConfig, out: Path, not_kept: list[str]) -> JobConfig:
    """Simplify how a job with small sizes reads its training data.

    The job gets the default tokenizer with its small vocabulary, at most one data worker, and no
    data stages. If it cannot read the original training data, it gets a toy text.

    Args:
        small: Job with the small model, batch size and sequence length.
        out: Folder in which the toy text is written.
        not_kept: List to extend with one sentence if data stages are removed, and one if the
            training data is replaced.
    """
    dataset = small.dataset
    small = small.model_copy(update={"tokenizer": TokenizerOptions()})
    small = small.with_section("dataset", stages=(), num_workers=min(1, dataset.num_workers))
    if dataset.stages:
        not_kept.append("dataset.stages: the small job ends before they begin.")

    problem = _find_data_problem(dataset)
    if problem:
        not_kept.append(f"[dataset]: a toy text is read instead, because {problem}.")
        toy_text = out / TOY_TEXT
        write_output(toy_text, _make_toy_text().encode())
        small = _replace_data(small, toy_text)
    return small


def _replace_data(job: JobConfig, path: Path) -> JobConfig:
    """Return a job that reads only the JSON Lines file `path`, without a limit on its epochs."""
    # [dataset] also has the options of a source, so a job with one source needs no `sources`.
    source_options = dict(TextSource(source="jsonl", path=str(path)))
    return job.with_section("dataset", **source_options, sources=(), max_epochs=0)


def _find_data_problem(dataset: Dataset) -> str:
    """Return the reason why the small job cannot read the training data of the original job.

    For example, "the small sequences need shorter documents". If it can read the data, return "".
    """
    if dataset.document_mask or dataset.packing != "concat":
        return "the small sequences need shorter documents"
    for source in dataset.sources or (dataset,):
        if source.source in ("huggingface", "c4") or as_url(source.path or "") is not None:
            return "the data is not on this node"
        if source.source in ("shards", "tokens"):
            return f"the token ids of {source.source} need the whole vocabulary"
        try:
            find_files(source)
        except UserError:
            return f"{source.path} does not exist"
    return ""


def _make_toy_text() -> str:
    """Create JSON lines with short documents, to replace training data that cannot be read.

    Several documents fit into a sequence of 64 tokens, so document masks are tested as well.
    """
    paragraphs: list[str] = []
    for module in (heapq, statistics):
        paragraphs += inspect.getsource(module).split("\n\n")
    texts = [paragraph[:160] for paragraph in paragraphs if len(paragraph) > 20]
    return "".join(f"{json.dumps({'text': text})}\n" for text in texts)


def _remove_hooks(job: JobConfig, not_kept: list[str]) -> JobConfig:
    """Remove the hooks of a job that may change weights or gradients.

    Hooks that only observe the training, and declare this with `observes_only = True`, are kept.
    Add one sentence to `not_kept` for each removed hook.
    """
    kept = []
    for name in job.job.hooks:
        if getattr(HOOKS[name], "observes_only", False):
            kept.append(name)
        else:
            not_kept.append(
                f"job.hooks: {name} may change weights or gradients (observes_only is false)."
            )
    return job.with_section("job", hooks=tuple(kept))


def _disable_outputs(job: JobConfig, out: Path) -> JobConfig:
    """Disable validation, samples, profiles, metrics loggers and regular checkpoints.

    Args:
        job: Job with small sizes.
        out: New output folder of the job.
    """
    # `titanlite prove` trains this job to create a certificate, so it must not require one.
    job = job.with_section("job", dump_folder=str(out), require_certificate=False)
    job = job.with_section(
        "metrics", log_freq=1, enable_tensorboard=False, enable_wandb=False, loggers=()
    )
    sections = {
        "validation": Validation(),
        "samples": SampleOptions(),
        "profiling": Profiling(),
        "checkpoint": Checkpoint(interval=10**6),  # more than the number of steps
    }
    return job.model_copy(update=sections)


def _flat_options(run: Run) -> dict[str, Any]:
    """Return all options of a run by key, such as "model.dim".

    Take the sizes of the model from its architecture, because the job may not set them.
    """
    return flatten(run.job.model_dump(mode="json") | {"model": asdict(run.arch)})
