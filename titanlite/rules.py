"""Rules for jobs that involve several keys, the number of ranks, or files.

A rule is a function that takes a `Run` (a job and a number of ranks) and yields its problems. All
rules run before any folder is created. Most rules do not import torch, so they are fast. Rules for
single values are in `titanlite.config.schema`.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.checkpoint.find import has_resumed_from, read_newest_manifest
from titanlite.checkpoint.manifest import find_foreign_export, get_step, list_checkpoints
from titanlite.config import storage
from titanlite.config.certificate import FOLDER as PROOFS
from titanlite.config.certificate import find_certificate
from titanlite.config.errors import UserError
from titanlite.config.files import find_write_problem
from titanlite.config.flavors import Architecture
from titanlite.config.mistakes import Mistake, format_value
from titanlite.config.registry import resolve
from titanlite.config.run import ONE_STAGE_A_RANK, V_SHAPED, ZERO_BUBBLE, Run, sequence_divisor
from titanlite.config.schema import (
    Checkpoint,
    Dataset,
    DataSource,
    LRScheduler,
    Optimizer,
    TextSource,
    Validation,
)
from titanlite.data.hub import propose_download
from titanlite.data.sources.files import BUILTIN_SOURCES, DataPathError, find_files, find_markup
from titanlite.data.tokenizer import Tokenizer
from titanlite.model.formats import parameter_shapes
from titanlite.observe.outputs import ARCHIVED_FILES, find_overwrite_problem

UNUSED_KEYS = {
    "AdamW": ("momentum",),
    "Muon": ("implementation", "stochastic_rounding"),
    "AdamW8bit": ("momentum", "implementation", "state_dtype", "stochastic_rounding"),
    "Lion": ("momentum", "implementation", "eps"),
    "SGD": ("beta1", "beta2", "eps", "implementation"),
}
"""Maps each value of optimizer.name to the keys of [optimizer] that this optimizer ignores."""
SOURCES_WITH_KEY = {
    "config": ("huggingface", "c4"),
    "split": ("huggingface", "c4", "arrow"),
    "streaming": ("huggingface", "c4"),
    "token_dtype": ("tokens",),
}
"""Maps a key of data sources to the built-in sources that use it. Plugins may use all keys."""
FINAL_OUTPUTS = ("final", "final_hf")
"""Folders beside the checkpoint folder that the last save can write."""
HOLDOUT_KEYS = {"freq", "sequences", "holdout"}
"""Keys of [validation] that apply to documents held out from the training data."""
NORMALIZING_OPTIMIZERS = ("AdamW", "AdamW8bit", "Muon", "Lion")
"""Optimizers that normalize the gradient, so that each weight changes by about the learning
rate.
"""
MAX_LR = 1.0
UNUSUAL_LR = 0.1
SWITCHES = {
    "checkpoint.initial_load_in_hf": "initial_load_path",
    "compile.components": "enable",
    "float8.recipe_name": "enable",
    "samples.prompts": "freq",
}
"""Maps a key that has no effect by default to the key of the same section that enables it."""


class Problem(NamedTuple):
    """A broken rule, reported for the key that the user should change.

    Attributes:
        key: Full name of the key, such as "training.steps" or "dataset.sources.0.weight".
        text: Rest of the sentence that starts with the key, such as "must be at most 8.".
    """

    key: str
    text: str


Problems = Iterator[Problem]


Rules = dict[Callable[[Run], Problems], tuple[str, ...]]
"""Functions that yield the problems of a run, each with the job sections that it reads.

If one of these sections has an invalid value, the rule is skipped. The job then contains the
default value instead, so the rule could report a problem that the user did not cause.
"""


def make_mistake(run: Run, problem: Problem) -> Mistake:
    """Convert a broken rule to a `Mistake`, whose message also shows the current value of the key.

    If the job does not set a key of [model], its current value comes from the model flavor.
    """
    parts = problem.key.split(".")
    section, name, *_ = parts
    value: Any = run.job
    for part in parts:
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    if value is None and section == "model":
        value = getattr(run.arch, name)
    # The error of a file usually contains its path, which is the value of the key.
    has_value = problem.text.startswith("cannot be used: ") and str(value) in problem.text
    shown_value = "" if has_value else format_value(value)
    return Mistake(f"{section}.{name}", problem.key, shown_value, problem.text)


def find_broken_rules(run: Run) -> list[Problem]:
    """Check a run against `KEY_RULES`, the rules that read no files, and return its problems.

    `titanlite plan` calls this to skip invalid layouts. Warmup and decay are not checked, because
    the planner never changes them.
    """
    problems: list[Problem] = []
    for check in KEY_RULES:
        problems += check(run)
    return problems


# Model and layout.


def check_model(run: Run) -> Problems:
    """Check the attention heads, the RoPE scaling, the sliding window and the sequence length."""
    yield from _check_heads(run)
    yield from _check_rope_limits(run)
    if run.arch.full_attention_interval and not run.arch.sliding_window:
        yield Problem(
            "model.full_attention_interval",
            "needs model.sliding_window. Set both, or set model.full_attention_interval = 0.",
        )
    max_seq_len = run.arch.max_seq_len
    if run.job.training.seq_len > max_seq_len:
        yield Problem(
            "training.seq_len",
            f"must be at most model.max_seq_len = {max_seq_len}. Change one of them.",
        )


def _check_rope_limits(run: Run) -> Problems:
    """Check that the lower limit of RoPE scaling is below the upper limit.

    The limits are rope_low_freq_factor and rope_high_freq_factor, or rope_beta_slow and
    rope_beta_fast for YaRN. They are checked even if the model does not scale RoPE.
    """
    arch = run.arch
    if arch.rope_scaling == "yarn":
        upper_key = "rope_beta_fast"
        lower_key = "rope_beta_slow"
    else:
        upper_key = "rope_high_freq_factor"
        lower_key = "rope_low_freq_factor"
    lower_limit = getattr(arch, lower_key)
    if getattr(arch, upper_key) <= lower_limit:
        text = f"must be greater than model.{lower_key} = {lower_limit}."
        yield Problem(f"model.{upper_key}", text)


def _check_heads(run: Run) -> Problems:
    """Check that attention heads have an even width and share key/value heads evenly."""
    arch = run.arch
    if arch.head_dim % 2 and run.job.model.head_dim:
        yield Problem("model.head_dim", "must be even, because RoPE rotates pairs of channels.")
    elif arch.head_dim % 2:
        yield Problem(
            "model.n_heads",
            f"must divide model.dim = {arch.dim} into heads of an even width. Or set head_dim.",
        )
    elif arch.n_heads % arch.n_kv_heads:
        yield Problem("model.n_kv_heads", f"must divide model.n_heads = {arch.n_heads}.")


def check_attention_backend(run: Run) -> Problems:
    """Report an attention backend that has no effect or does not support the job.

    This does not check whether the GPU supports the backend, which is unknown until the run starts.
    """
    key = "model.attention_backend"
    backend = run.job.model.attention_backend
    has_context_parallelism = run.degrees.context > 1
    if backend == "flex" and not (run.masks_attention or has_context_parallelism):
        text = "has no effect without documents, windows or context parallelism. Remove it."
        yield Problem(key, text)
    if backend == "varlen" and not run.masks_attention:
        yield Problem(key, "has no effect without documents or windows. Remove it.")
    if run.job.model.uses_document_bounds:
        for text in _list_varlen_problems(run):
            yield Problem(key, text)


def _list_varlen_problems(run: Run) -> Iterator[str]:
    """Yield the reasons why the job cannot use variable-length attention.

    Each reason is the rest of a sentence that starts with the key `model.attention_backend`.
    """
    if run.degrees.context > 1:
        yield "does not support context parallelism, which divides documents. Remove it."

    head_dim = run.arch.head_dim
    if run.masks_attention and (head_dim % 8 or head_dim > 256):
        yield f"needs heads of a multiple of 8 up to 256, not {head_dim}. Remove it."

    is_flash = run.job.model.attention_backend != "varlen"
    if is_flash and run.job.training.mixed_precision_param == "float32":
        yield 'needs training.mixed_precision_param = "bfloat16". Change one of them.'


def check_layout(run: Run) -> Problems:
    """Check that the parallelism degrees fit the number of ranks, the model and the batch sizes.

    If the product of the degrees differs from the number of ranks, report this problem instead of
    checking the batch sizes, which depend on the degrees.
    """
    uses_all_ranks = run.degrees.world == run.world_size
    if uses_all_ranks:
        size_problems = list(check_batch_sizes(run))
    else:
        size_problems = [_describe_wrong_world_size(run)]
    yield from size_problems

    yield from check_tensor_sizes(run)
    if run.degrees.pipeline > 1:
        yield from check_stages(run)
        yield from check_pipeline_schedule(run)
        if not size_problems:  # otherwise the number of microbatches is meaningless
            yield from check_microbatches(run)


def _describe_wrong_world_size(run: Run) -> Problem:
    """Return the problem that the product of the parallelism degrees is not the world size."""
    # Report the largest degree, because the user will most likely change this one.
    degrees = {key: value for key, value in run.job.parallelism if key.endswith("_degree")}
    largest = max(degrees, key=degrees.__getitem__)
    return Problem(
        f"parallelism.{largest}",
        f"makes {run.degrees.world} ranks together with the other degrees, but the world has "
        f"{run.world_size} (NGPU times NNODES).",
    )


def check_tensor_sizes(run: Run) -> Problems:
    """Check that tensor and context parallelism can split the model and the sequences evenly."""
    # Tensor parallelism gives each rank the same number of heads and of channels.
    kv_heads = run.arch.n_kv_heads
    ffn_dim = run.arch.ffn_dim
    tensor_degree = run.degrees.tensor
    if kv_heads % tensor_degree or ffn_dim % tensor_degree:
        yield Problem(
            "parallelism.tensor_parallel_degree",
            f"must divide model.n_kv_heads = {kv_heads} and model.ffn_dim = {ffn_dim}.",
        )

    # Tensor and context parallelism split each sequence into chunks of the same length.
    seq_len = run.job.training.seq_len
    divisor = sequence_divisor(run.degrees)
    if seq_len % divisor:
        yield Problem(
            "training.seq_len",
            f"must be a multiple of {divisor}, because context and tensor parallelism split "
            "sequences.",
        )


def check_batch_sizes(run: Run) -> Problems:
    """Check that each global batch size can be split into equal microbatches on all ranks."""
    unit = run.global_microbatch_size
    for key, size in _list_batch_sizes(run):
        if size == 0 or size % unit:
            yield Problem(
                key,
                f"must be a multiple of {unit} (local_batch_size times {run.degrees.data} "
                "data-parallel ranks).",
            )


def check_stages(run: Run) -> Problems:
    """Check that the model can be split into pipeline stages.

    Also report keys that do not work with a pipeline, such as tied embeddings.
    """
    num_layers = run.arch.n_layers
    num_ranks = run.degrees.pipeline
    num_stages = run.stages_per_rank * num_ranks
    if run.pipeline_cuts and not _are_valid_cuts(run):
        schedule = run.job.parallelism.pipeline_parallel_schedule
        stages = f"a multiple of {num_ranks} stages"
        if schedule in (*ONE_STAGE_A_RANK, *V_SHAPED):
            stages = f"{num_stages} stages, {run.stages_per_rank} per rank"
        yield Problem(
            "parallelism.pipeline_parallel_split_points",
            f"must be blocks from layers.1 to layers.{num_layers - 1} in ascending order, and make "
            f"{stages}.",
        )
    if not run.pipeline_cuts and num_stages > num_layers:
        yield Problem(
            "parallelism.pipeline_parallel_degree",
            f"makes {num_stages} stages, but the model has only {num_layers} blocks.",
        )

    if run.arch.tied_embeddings:
        yield Problem(
            "model.tied_embeddings",
            "does not work with a pipeline, because its first and last stage would share a matrix.",
        )
    if run.job.parallelism.fsdp_reduce == "microbatch":
        yield Problem(
            "parallelism.fsdp_reduce",
            'must be "step" with a pipeline, whose stages reduce with the last microbatch.',
        )


def _are_valid_cuts(run: Run) -> bool:
    """Return whether the split points divide the model into stages that the schedule can run.

    No stage may be empty, and the number of stages must fit the number of pipeline ranks.
    """
    boundaries = [0, *run.pipeline_cuts, run.arch.n_layers]
    if any(first >= end for first, end in pairwise(boundaries)):
        return False

    num_ranks = run.degrees.pipeline
    num_stages = len(run.pipeline_cuts) + 1
    if run.job.parallelism.pipeline_parallel_schedule in (*ONE_STAGE_A_RANK, *V_SHAPED):
        return num_stages == run.stages_per_rank * num_ranks
    return num_stages % num_ranks == 0


def check_pipeline_schedule(run: Run) -> Problems:
    """Check that the other options and torch support a zero-bubble pipeline schedule, if used.

    Zero-bubble schedules split the backward pass of each block in two: first the gradients of the
    activations, and later the gradients of the weights. Some options do not support this split.
    """
    key = "parallelism.pipeline_parallel_schedule"
    schedule = run.job.parallelism.pipeline_parallel_schedule
    if schedule not in ZERO_BUBBLE:
        return

    # If a block is compiled, or recomputes only some operators, the first half of its backward pass
    # frees buffers that the second half needs.
    if run.compiles("model") or _recomputes_operators(run):
        yield Problem(
            key, 'needs compile.enable = false and activation_checkpoint.mode "full" or "none".'
        )

    # For example, before torch 2.13, the backward pass of an FP8 layer cannot be split.
    uses_varlen_attention = run.job.model.uses_document_bounds
    needs_new_torch = run.job.float8.enable or uses_varlen_attention or schedule == "ZBVZeroBubble"
    if needs_new_torch and _is_torch_older_than_2_13():
        yield Problem(key, "needs torch 2.13 for FP8, variable-length attention or ZBVZeroBubble.")


def _recomputes_operators(run: Run) -> bool:
    """Return whether activation checkpointing recomputes only some operators of a block."""
    checkpointing = run.job.activation_checkpoint
    return checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op"


def _is_torch_older_than_2_13() -> bool:
    """Return whether the installed version of torch is older than 2.13."""
    major, minor, *_ = version("torch").split(".")
    return (int(major), int(minor)) < (2, 13)


def check_microbatches(run: Run) -> Problems:
    """Check that the pipeline schedule supports the number of microbatches per step.

    The error message asks for a multiple of the number of pipeline ranks, which works with every
    schedule. Some schedules also support other numbers, and these pass the check.
    """
    num_ranks = run.degrees.pipeline
    unit = run.global_microbatch_size
    for key, size in _list_batch_sizes(run):
        if not _can_run_microbatches(run, size // unit):
            yield Problem(
                key,
                f"must be a multiple of {num_ranks * unit} ({num_ranks} pipeline ranks times "
                f"{unit} sequences in the microbatches of all data-parallel ranks).",
            )


def _can_run_microbatches(run: Run, count: int) -> bool:
    """Return whether the pipeline schedule can run `count` microbatches per step.

    Every schedule needs at least one microbatch per pipeline rank. Interleaved schedules also need
    to split the microbatches into `count // ranks` equal rounds. For example, 4 ranks can run 10
    microbatches as 2 rounds of 5, but 9 microbatches do not make 2 equal rounds.
    """
    num_rounds = count // run.degrees.pipeline
    if num_rounds == 0:
        return False
    schedule = run.job.parallelism.pipeline_parallel_schedule
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return count % num_rounds == 0
    return True


def _list_batch_sizes(run: Run) -> list[tuple[str, int]]:
    """Return each key that sets a global batch size, with the size in sequences.

    The first key is "training.global_batch_size". It is followed by the keys of data stages that
    set another size, such as "dataset.stages.0.global_batch_size".
    """
    sizes = [("training.global_batch_size", run.global_batch_size)]
    for number, stage in enumerate(run.job.dataset.stages):
        if stage.global_batch_size is not None:
            key = f"dataset.stages.{number}.global_batch_size"
            sizes.append((key, stage.global_batch_size))
    return sizes


# Optimizer and numerics.


def check_total_steps(run: Run) -> Problems:
    """Check that the learning rate schedule is not shorter than the run."""
    steps = run.job.training.steps
    total = run.job.lr_scheduler.total_steps
    if total is not None and total < steps:
        yield Problem(
            "lr_scheduler.total_steps",
            f"ends the schedule after {total} steps, before training.steps = {steps}.",
        )


def check_warmup(run: Run, *, is_preview: bool) -> Problems:
    """Check that warmup and decay fit into the learning rate schedule.

    Args:
        run: The run.
        is_preview: Whether the job trains only the first steps of a longer run. Warmup and decay
            may then be longer than the schedule.
    """
    schedule = run.job.lr_scheduler
    if schedule.decay_steps is not None and schedule.decay_ratio is not None:
        yield Problem(
            "lr_scheduler.decay_ratio",
            "is not used with lr_scheduler.decay_steps. Remove one of them.",
        )
    if not is_preview:
        yield from _check_schedule_length(run)


def _check_schedule_length(run: Run) -> Problems:
    """Check that warmup and decay together are not longer than the learning rate schedule."""
    schedule = run.job.lr_scheduler
    total = schedule.total_steps or run.job.training.steps
    warmup = _count_warmup_steps(schedule, total)
    decay = schedule.decay_steps or 0
    if warmup > total:
        yield Problem(
            "lr_scheduler.warmup_steps",
            f"makes the learning rate rise for {warmup} steps, but the schedule has {total}. "
            "Lower the warmup, or lengthen the schedule.",
        )
    elif warmup + decay > total:
        # A shorter warmup helps only if the schedule is long enough for the decay.
        keys = "it" if decay > total else "it or lr_scheduler.warmup_steps"
        yield Problem(
            "lr_scheduler.decay_steps",
            f"makes the learning rate decay for {decay} steps, but {warmup} steps of warmup leave "
            f"only {total - warmup}. Lower {keys}, or lengthen the schedule.",
        )


def _count_warmup_steps(schedule: LRScheduler, total: int) -> int:
    """Return the number of warmup steps in a schedule of `total` steps.

    A plugin schedule without `warmup_steps` counts as 0, because its default is unknown.
    """
    is_plugin = schedule.name != "wsd"
    if is_plugin:
        return schedule.warmup_steps or 0
    return schedule.count_warmup_steps(total)


def check_moments(run: Run) -> Problems:
    """Check that beta1 and beta2 are at most 0.99 if optimizer moments are stored in bfloat16.

    With a larger beta, a step changes a moment by so little that rounding to bfloat16 drops the
    change. For example, with beta2 = 0.999, the second moment never decreases.
    """
    optimizer = run.job.optimizer
    if run.state_dtype != "bfloat16" or optimizer.stochastic_rounding:
        return
    text = "must be at most 0.99 with moments in bfloat16."
    if "stochastic_rounding" not in UNUSED_KEYS.get(optimizer.name, ()):
        text += " Or set stochastic_rounding = true."
    for key in ("beta1", "beta2"):
        if getattr(optimizer, key) > 0.99:
            yield Problem(f"optimizer.{key}", text)


def check_optimizer(run: Run) -> Problems:
    """Check the learning rate and report options that the selected optimizer does not support."""
    optimizer = run.job.optimizer
    if optimizer.name in NORMALIZING_OPTIMIZERS and optimizer.lr > MAX_LR:
        yield Problem(
            "optimizer.lr",
            f"must be at most {MAX_LR:g}. {optimizer.name} changes each weight by about lr in a "
            "step; 3e-4 is typical.",
        )

    for key in UNUSED_KEYS.get(optimizer.name, ()):
        if getattr(optimizer, key) != Optimizer.model_fields[key].default:
            yield Problem(
                f"optimizer.{key}",
                f'is not used with optimizer.name = "{optimizer.name}". Remove it.',
            )

    if optimizer.name != "AdamW" and "updates" in run.job.metrics.details:
        yield Problem(
            "metrics.details",
            'can contain "updates" only with optimizer.name = "AdamW". Remove it.',
        )

    needs_other_optimizer = run.degrees.tensor > 1 or run.job.training.enable_cpu_offload
    if optimizer.name == "AdamW8bit" and needs_other_optimizer:
        yield Problem(
            "optimizer.name",
            "does not work with tensor parallelism or CPU offload. Choose another optimizer.",
        )


def check_mup(run: Run) -> Problems:
    """Check that muP, if enabled, is defined for the optimizer and the model of the job."""
    arch = run.arch
    if arch.mup_base_dim == arch.mup_base_head_dim == 0:
        return
    if run.job.optimizer.name in ("Muon", "SGD"):
        text = "does not work with muP, which is defined for Adam. Use AdamW, AdamW8bit or Lion."
        yield Problem("optimizer.name", text)
    if arch.architecture != "llama":
        text = "does not work with muP. Remove model.mup_base_dim and model.mup_base_head_dim."
        yield Problem("model.architecture", text)


def check_optimizer_groups(run: Run) -> Problems:
    """Check that each parameter is in exactly one optimizer group.

    Each name pattern of a group must also match at least one parameter.
    """
    # A model with invalid attention heads cannot be built. `check_model` reports these heads.
    has_invalid_heads = bool(list(_check_heads(run)))
    if not run.job.optimizer.groups or has_invalid_heads:
        return

    names = list(parameter_shapes(run.arch))  # slow, because it imports torch
    yield from _check_patterns(run, names)
    yield from _check_membership(run, names)


def _check_patterns(run: Run, names: list[str]) -> Problems:
    """Check that each name pattern of the optimizer groups matches at least one parameter.

    Args:
        run: The run.
        names: Names of all parameters of the model.
    """
    for number, group in enumerate(run.job.optimizer.groups):
        for pattern in group.params:
            if fnmatch.filter(names, pattern):
                continue
            # With a cutoff of 0, there is always a closest name.
            nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
            yield Problem(
                f"optimizer.groups.{number}.params",
                f'has "{pattern}", which matches no parameter. Nearest: {nearest}.',
            )


def _check_membership(run: Run, names: list[str]) -> Problems:
    """Check that each parameter is in exactly one optimizer group.

    Args:
        run: The run, which has at least one optimizer group.
        names: Names of all parameters of the model.
    """
    groups = run.job.optimizer.groups
    counts = {name: sum(group.claims(name) for group in groups) for name in names}
    missing = [name for name in names if counts[name] == 0]
    repeated = [name for name in names if counts[name] > 1]

    # No single group is at fault, so report these problems for the last group.
    last_key = f"optimizer.groups.{len(groups) - 1}.params"
    if missing:
        yield Problem(
            last_key,
            f"must match the parameters that are in no group: {_summarize(missing)}.",
        )
    if repeated:
        yield Problem(
            last_key,
            f"must not match parameters of another group: {_summarize(repeated)}.",
        )


def _summarize(names: list[str]) -> str:
    """Shorten a list of names to the first name and a count, such as "norm.weight and 2 more"."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def check_float8(run: Run) -> Problems:
    """Check that FP8, if enabled, applies to some layers and supports their sizes."""
    float8 = run.job.float8
    if not float8.enable:
        return

    dim = run.arch.dim
    if dim < float8.min_features:
        yield Problem(
            "float8.enable",
            f"converts no layer, because model.dim = {dim} is less than float8.min_features. "
            "Set float8.min_features = 0.",
        )
    else:
        yield from _check_float8_layers(run)
        yield from _check_float8_tokens(run)


def _check_float8_layers(run: Run) -> Problems:
    """Check that FP8 matmuls support the size of each tensor-parallel shard of an FP8 layer."""
    layer_sizes = _list_float8_sizes(run)
    # `check_tensor_sizes` reports sizes that the tensor-parallel degree does not divide.
    shard_sizes = [size // run.degrees.tensor for size in layer_sizes]
    shard_multiple = run.job.float8.shard_multiple(run.degrees.tensor)
    if any(size % shard_multiple for size in shard_sizes):
        yield Problem(
            "parallelism.tensor_parallel_degree",
            f"must divide the sizes of FP8 layers, {layer_sizes}, into multiples of "
            f"{shard_multiple}.",
        )


def _check_float8_tokens(run: Run) -> Problems:
    """Check that FP8 matmuls support the number of tokens in a microbatch.

    Only the weight gradient needs this check, because its matmul sums over the tokens.
    """
    float8 = run.job.float8
    has_bf16_weight_gradient = float8.recipe_name == "rowwise_with_gw_hp"
    if has_bf16_weight_gradient:
        return

    num_tokens = run.local_microbatch_tokens
    if num_tokens % float8.size_multiple:
        yield Problem(
            "training.seq_len",
            f"makes {num_tokens} tokens per microbatch, but FP8 matmuls need multiples of "
            f"{float8.size_multiple}.",
        )


def _list_float8_sizes(run: Run) -> list[int]:
    """Return the distinct dimensions of FP8 layers that tensor parallelism divides.

    For example, it divides the dimension q_dim of the matrix wq, which has the shape (q_dim, dim).
    Layers that stay in bf16 are omitted.
    """
    arch = run.arch
    # Tensor parallelism divides the inputs of wo and w2, and the outputs of all other layers.
    divided_sizes = {
        "attention.wq": arch.q_dim,
        "attention.wk": arch.kv_dim,
        "attention.wv": arch.kv_dim,
        "attention.wo": arch.q_dim,
        "feed_forward.w1": arch.ffn_dim,
        "feed_forward.w2": arch.ffn_dim,
        "feed_forward.w3": arch.ffn_dim,
    }

    float8 = run.job.float8
    fp8_sizes = []
    for layer, size in divided_sizes.items():
        # A filter for one block, such as "layers.0.attention.wq", leaves the other blocks in FP8.
        is_filtered = any(part in layer for part in float8.filter_fqns)
        is_suitable = size >= float8.min_features and size % float8.size_multiple == 0
        if is_filtered or not is_suitable:
            continue  # the layer stays in bf16
        if size not in fp8_sizes:
            fp8_sizes.append(size)
    return fp8_sizes


def check_memory_budget(run: Run) -> Problems:
    """Check that a job with activation_checkpoint.mode = "memory_budget" supports this mode.

    The model must be compiled, and must not draw random numbers, as dropout does.
    """
    key = "activation_checkpoint.mode"
    if run.job.activation_checkpoint.mode != "memory_budget":
        return
    if not run.compiles("model"):
        yield Problem(key, 'needs compile.enable = true, with "model" in compile.components.')

    if _draws_random_numbers(run):
        yield Problem(
            key,
            "computes wrong gradients for models with dropout, because of "
            'https://github.com/pytorch/pytorch/issues/190758. Use "selective" or "full". If the '
            "model draws no random numbers, set draws_random_numbers = False in its class.",
        )


def _draws_random_numbers(run: Run) -> bool:
    """Return whether the forward pass of the model may draw random numbers, as dropout does."""
    is_built_in = run.arch.model == Architecture.model
    if is_built_in:
        return False

    # This import is slow, because it imports torch.
    from titanlite.parallel.activation_checkpoint import draws_random_numbers

    return draws_random_numbers(resolve(run.arch.model))


def check_profiling(run: Run) -> Problems:
    """Check that a profile fits into its interval, and that the ranks to profile exist."""
    profiling = run.job.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if needed > profiling.profile_freq:
        yield Problem(
            "profiling.profile_freq",
            f"must be at least profiler_warmup + profiler_active = {needed}.",
        )
    if any(rank >= run.world_size for rank in profiling.profiler_ranks):
        yield Problem("profiling.profiler_ranks", f"must be at most {run.world_size - 1}.")


def check_symmetric_memory(run: Run) -> Problems:
    """Check that symmetric memory for FSDP has an effect and is compatible with other options."""
    if not run.job.parallelism.enable_fsdp_symmetric_memory:
        return
    key = "parallelism.enable_fsdp_symmetric_memory"
    if run.job.parallelism.memory_savers != "none":
        text = "cannot be combined with memory savers, which replace collectives of FSDP."
        yield Problem(key, f'{text} Set parallelism.memory_savers = "none", or remove the key.')
    if run.job.parallelism.enable_async_tensor_parallel:
        # FSDP allocates symmetric memory with NCCL, and async tensor parallelism with CUDA, but a
        # process can use only one of them.
        text = "cannot be combined with enable_async_tensor_parallel. Remove one of the two."
        yield Problem(key, text)
    if run.degrees.shard * run.degrees.context == 1:
        yield Problem(key, "has no effect, because no parameters are sharded. Remove it.")


def check_effects(run: Run) -> Problems:
    """Report keys that have no effect because of the value of another key.

    For example, `samples.freq` has no effect without `samples.prompts`.
    """
    job = run.job
    float8 = job.float8
    parallelism = job.parallelism
    validation = job.validation

    validates = validation.freq > 0
    # Name a key that the job sets, because `has_own_data` has several possible causes.
    validation_key = "validation.path" if validation.path else "validation.source"
    if validation.sources:
        validation_key = "validation.sources"
    may_validate = validates or validation.holdout or "freq" in validation.model_fields_set
    is_tensorwise = float8.recipe_name == "tensorwise"
    gathers_fp8 = float8.enable_fsdp_float8_all_gather
    has_bfloat16 = "bfloat16" in (run.state_dtype, job.training.dtype)
    compiles_tensor_parallel = run.degrees.tensor > 1 and run.compiles("model")

    # Key, whether it is set, whether it has an effect, and what an effect requires.
    effects = [
        ("samples.freq", job.samples.freq, job.samples.prompts, "samples.prompts"),
        ("compile.enable", job.compile.enable, job.compile.components, "compile.components"),
        (validation_key, validation.has_own_data, may_validate, "validation.freq"),
        ("checkpoint.keep_best", job.checkpoint.keep_best, validates, "validation.freq"),
        (
            "float8.enable_fsdp_float8_all_gather",
            gathers_fp8,
            is_tensorwise,
            'float8.recipe_name = "tensorwise"',
        ),
        (
            "float8.precompute_float8_dynamic_scale_for_fsdp",
            float8.precompute_float8_dynamic_scale_for_fsdp,
            gathers_fp8,
            "float8.enable_fsdp_float8_all_gather",
        ),
        (
            "optimizer.stochastic_rounding",
            job.optimizer.stochastic_rounding,
            has_bfloat16,
            "weights or moments in bfloat16",
        ),
        (
            "parallelism.enable_async_tensor_parallel",
            parallelism.enable_async_tensor_parallel,
            compiles_tensor_parallel,
            "tensor parallelism and a compiled model",
        ),
        (
            "parallelism.pipeline_parallel_split_points",
            parallelism.pipeline_parallel_split_points,
            run.degrees.pipeline > 1,
            "pipeline_parallel_degree > 1",
        ),
    ]
    for key, is_set, has_effect, needed in effects:
        if is_set and not has_effect:
            yield Problem(key, f"has no effect without {needed}. Set both, or remove it.")


def check_switches(run: Run) -> Problems:
    """Report keys that have no effect because the key that enables their feature is not set.

    For example, `float8.recipe_name` has no effect without `float8.enable`. It is not reported if
    the job explicitly disables the feature with `float8.enable = false`. This rule applies only to
    training, because the planner also tries disabled features, such as FP8 and compilation.
    """
    for key, switch in SWITCHES.items():
        section_name, name = key.split(".")
        section = getattr(run.job, section_name)
        is_set = name in section.model_dump(exclude_defaults=True)
        if is_set and switch not in section.model_fields_set:
            yield Problem(
                key, f"has no effect without {section_name}.{switch}. Set both, or remove it."
            )


def check_disabled_checkpoints(run: Run) -> Problems:
    """Report keys that have no effect because checkpoint.enable is false."""
    checkpoint = run.job.checkpoint
    if checkpoint.enable:
        return
    keys_without_effect = {
        "checkpoint.keep_best": checkpoint.keep_best,
        "checkpoint.mirror": checkpoint.mirror,
        "checkpoint.load_step": checkpoint.load_step != -1,
        "checkpoint.initial_load_path": checkpoint.initial_load_path,
        "checkpoint.last_save_in_hf": checkpoint.last_save_in_hf,
        "guards.on_spike": run.job.guards.on_spike == "roll_back",
    }
    for key, is_set in keys_without_effect.items():
        if is_set:
            yield Problem(
                key,
                "has no effect without checkpoint.enable. Set checkpoint.enable = true, or remove "
                "this key.",
            )


# Data and tokenizer.


def check_tokenizer(run: Run, tokenizer: Tokenizer) -> Problems:
    """Check that the embedding covers the vocabulary, and that sample prompts are not too long."""
    vocab_size = tokenizer.vocab_size
    if vocab_size > run.arch.vocab_size:
        yield Problem(
            "model.vocab_size",
            f"must be at least {vocab_size}, the vocabulary size of {run.job.tokenizer.path}.",
        )
    if run.job.samples.freq:
        yield from _check_sample_prompts(run, tokenizer)


def _check_sample_prompts(run: Run, tokenizer: Tokenizer) -> Problems:
    """Check that each sample prompt has at least one token, and fits into a sequence."""
    seq_len = run.job.training.seq_len
    for prompt in run.job.samples.prompts:
        num_tokens = len(tokenizer.encode(prompt))
        if tokenizer.bos_id is not None:
            num_tokens += 1
        if not 0 < num_tokens < seq_len:
            yield Problem(
                "samples.prompts",
                f"has a prompt of {num_tokens} tokens. With training.seq_len = {seq_len}, prompts "
                f"have 1 to {seq_len - 1} tokens.",
            )


def suggest_tokenizer(run: Run) -> str:
    """Return a hint on how to get the tokenizer of a job, to append to an error message.

    If the tokenizer file exists or its path is a URL, return an empty string.
    """
    path = run.job.tokenizer.path
    if storage.as_url(path) or os.path.isfile(run.tokenizer_path):
        return ""
    if run.job.checkpoint.initial_load_in_hf:
        return "; copy the tokenizer of the model there, or set tokenizer.path"
    if os.path.isdir(run.tokenizer_path):
        return f"; set a file in this folder, such as {os.path.join(path, 'tokenizer.json')}"

    # Some tokenizers can be downloaded, for example assets/tokenizer/gpt2.
    download = propose_download("tokenizer", path, run.arch.vocab_size)
    return download or _suggest_training_tokenizer(run)


def _suggest_training_tokenizer(run: Run) -> str:
    """Return a hint with the command that trains the tokenizer, or "" without a job file."""
    job_file = run.job.job.config_file
    if job_file is None:  # for example, for a job that was created in Python
        return ""

    # Both my/tokenizer.json and my.json give the folder "my".
    path = run.job.tokenizer.path
    folder, name = os.path.split(path)
    if name not in ("tokenizer.json", "tokenizer.model"):
        folder, _ = os.path.splitext(path)
    folder = folder or "."
    command = (
        f"titanlite tokenizer train --job.config_file {job_file} "
        f"--vocab-size {run.arch.vocab_size} --out {folder}"
    )
    return f"; `{command}` trains {folder}/tokenizer.json on the data of this job"


def check_dataset(run: Run) -> Problems:
    """Check that the training data exists, and that the data stages are valid."""
    dataset = run.job.dataset
    yield from _check_sources("dataset", dataset)

    num_sources = len(dataset.sources) or 1  # [dataset] can describe a single source
    start_steps: set[int] = set()
    for number, stage in enumerate(dataset.stages):
        if stage.start_step in start_steps:
            yield Problem(
                f"dataset.stages.{number}.start_step",
                "must differ from the start_step of all other stages.",
            )
        start_steps.add(stage.start_step)

        weights = stage.weights
        if weights is None:
            continue
        if len(weights) != num_sources or not any(weights):
            yield Problem(
                f"dataset.stages.{number}.weights",
                f"must have {num_sources} weights, one per source, and not only zeros.",
            )


def check_validation(run: Run) -> Problems:
    """Check that validation data, if used, is defined in exactly one way, and that it exists.

    It is either held out from the training data (`validation.holdout`) or read from other sources.
    """
    validation = run.job.validation
    if validation.holdout > 0:
        yield from _check_holdout(validation)
        return
    if validation.freq == 0:
        return  # there is no validation

    # A job may explicitly set the source to its default value.
    is_source_set = "source" in validation.model_fields_set
    if validation.sources or is_source_set:
        yield from _check_sources("validation", validation)
    else:
        yield Problem(
            "validation.freq", "needs validation.holdout, such as 0.01, or validation.source."
        )


def _check_holdout(validation: Validation) -> Problems:
    """Report keys of [validation] that do not apply to documents held out from [dataset]."""
    for key in validation.model_dump(exclude=HOLDOUT_KEYS, exclude_defaults=True):
        yield Problem(
            f"validation.{key}",
            "is not used with validation.holdout, which uses documents of [dataset]. Remove one.",
        )


def _check_sources(section: str, dataset: Dataset | Validation) -> Problems:
    """Check the keys and the files of all data sources in [dataset] or [validation].

    Args:
        section: "dataset" or "validation".
        dataset: Content of the section: either a list of sources, or the keys of a single source.
    """
    if not dataset.sources:
        yield from _check_source(section, dataset)
        return

    source_keys = set(DataSource.model_fields)
    for key in dataset.model_dump(include=source_keys, exclude_defaults=True):
        yield Problem(
            f"{section}.{key}",
            f"is not used with [[{section}.sources]]. Move it to the table of its source.",
        )
    if not any(source.weight for source in dataset.sources):
        yield Problem(
            f"{section}.sources.0.weight",
            "must be above 0 for at least one source.",
        )
    for number, source in enumerate(dataset.sources):
        yield from _check_source(f"{section}.sources.{number}", source)


def _check_source(table: str, source: TextSource) -> Problems:
    """Check the keys of a data source, and that its files exist.

    Args:
        table: Table of the source in the job, such as "dataset.sources.0".
        source: The source.
    """
    kind = source.source
    has_fixed_files = kind in ("python_stdlib", "c4")
    if has_fixed_files and source.path is not None:
        # The user has probably forgotten to set the source, so check nothing else.
        yield Problem(
            f"{table}.path",
            f'is not used with {table}.source = "{kind}". Also set the source, for example to '
            '"text" or "jsonl".',
        )
        return
    yield from _check_source_keys(table, source)
    yield from _check_source_files(table, source)


def _check_source_files(table: str, source: TextSource) -> Problems:
    """Check that a data source has a path, if its kind requires one, and that its files exist.

    Args:
        table: Table of the source in the job, such as "dataset.sources.0".
        source: The source.
    """
    try:
        find_files(source)
    except DataPathError as error:
        yield Problem(f"{table}.path", f"{error.problem.rstrip('.')}.")
    except UserError:  # the path is missing
        yield Problem(f"{table}.source", f"needs {table}.path.")


def _check_source_keys(table: str, source: TextSource) -> Problems:
    """Report the keys of a data source that its kind does not support.

    Args:
        table: Table of the source in the job, such as "dataset.sources.0".
        source: The source.
    """
    kind = source.source
    if source.loss_mask_column is not None and kind not in ("jsonl", "parquet"):
        yield Problem(f"{table}.loss_mask_column", 'needs source "jsonl" or "parquet".')
    if kind not in BUILTIN_SOURCES:
        return  # the source of a plugin may use all other keys

    for key, kinds_with_key in SOURCES_WITH_KEY.items():
        is_set = getattr(source, key) != TextSource.model_fields[key].default
        if is_set and kind not in kinds_with_key:
            problem = f'is not used with {table}.source = "{kind}". Remove it.'
            yield Problem(f"{table}.{key}", problem)


# Outputs and initial weights.


def check_output_folders(run: Run) -> Problems:
    """Check that the output folders are writable and that no output would replace other files."""
    yield from _check_writable(run)

    folder = run.dump_folder.absolute()
    checkpoint_folder = _get_checkpoint_folder(run)
    other_outputs = [folder / name for name in (*FINAL_OUTPUTS, *ARCHIVED_FILES)]
    checkpoint = run.job.checkpoint
    if checkpoint.last_save_model_only or checkpoint.last_save_in_hf:
        other_outputs += [checkpoint_folder.parent / name for name in FINAL_OUTPUTS]
    if checkpoint_folder in (folder, *other_outputs):
        yield Problem(
            "checkpoint.folder",
            "is the path of another output of the run. Choose another folder that is not called "
            '"final" or "final_hf".',
        )

    # The export at the end of training replaces an earlier export, but no other folder.
    foreign_export = find_foreign_export(checkpoint_folder.parent)
    if foreign_export is not None and checkpoint.enable and checkpoint.last_save_in_hf:
        yield Problem(
            "checkpoint.last_save_in_hf",
            f"cannot replace {foreign_export}, which no run has written. Move it.",
        )


def _check_writable(run: Run) -> Problems:
    """Check that files can be written to the output folder and to the checkpoint folder.

    Report only the first problem.
    """
    folder = run.dump_folder.absolute()
    write_problem = find_write_problem(folder)
    if write_problem:
        yield Problem("job.dump_folder", f"cannot be used: {write_problem}")
        return
    overwrite_problem = find_overwrite_problem(folder)
    if overwrite_problem:
        text = f"cannot be used: {overwrite_problem}, or choose another folder."
        yield Problem("job.dump_folder", text)
        return
    if run.job.checkpoint.enable:
        checkpoint_problem = find_write_problem(_get_checkpoint_folder(run))
        if checkpoint_problem:
            yield Problem("checkpoint.folder", f"cannot be used: {checkpoint_problem}")


def check_urls(run: Run) -> Problems:
    """Check access to the URLs of the checkpoint mirror and, for a new run, the initial weights.

    Only rank 0 does this, so that the storage is not accessed once per rank.
    """
    checkpoint = run.job.checkpoint
    if not checkpoint.enable or os.environ.get("RANK", "0") != "0":
        return
    urls = {"mirror": checkpoint.mirror}
    if not _list_saved(run):  # otherwise the run resumes
        urls["initial_load_path"] = checkpoint.initial_load_path
    for key, url in urls.items():
        if storage.as_url(url):
            problem = storage.find_storage_problem(str(url), write=key == "mirror")
            if problem:
                yield Problem(f"checkpoint.{key}", f"cannot be used: {problem}")


def check_mirror(run: Run) -> Problems:
    """Check that `checkpoint.mirror` is a URL whose files outlive the run.

    The URL must not be in memory (memory://), in the output folder or in the checkpoint folder.
    """
    mirror = run.job.checkpoint.mirror
    if mirror is None:
        return
    url = storage.as_url(mirror)
    if url is None:
        yield Problem(
            "checkpoint.mirror",
            "must be a URL, such as s3://bucket/my_run or file:///mnt/copies/my_run.",
        )
    elif not _outlives_run(url, run):
        yield Problem(
            "checkpoint.mirror",
            "must outlive the run. Choose a URL outside of memory and of job.dump_folder.",
        )


def _outlives_run(url: str, run: Run) -> bool:
    """Return whether files at a URL survive the end of a run and the loss of its output folder.

    Args:
        url: URL from `storage.as_url`.
        run: The run.
    """
    scheme, _, path = url.partition("://")
    if scheme in ("file", "local"):
        folders = (run.dump_folder.resolve(), run.checkpoint_folder.resolve())
        return not any(Path(path).resolve().is_relative_to(folder) for folder in folders)
    return scheme != "memory"


def check_checkpoints(run: Run) -> Problems:
    """Check that the initial weights of a new run, and the checkpoint to load, exist."""
    checkpoint = run.job.checkpoint
    if not checkpoint.enable:
        return

    saved = _list_saved(run)
    is_new_run = not saved
    if is_new_run and checkpoint.initial_load_path is not None:
        yield from _check_initial_weights(checkpoint.initial_load_path, checkpoint)

    is_step_set = checkpoint.load_step != -1
    if is_step_set and not checkpoint.mirror:  # the mirror may have any step
        yield from _check_load_step(run, checkpoint.load_step, saved)


def _check_load_step(run: Run, load_step: int, saved: list[Path]) -> Problems:
    """Check that the checkpoint selected by `checkpoint.load_step` exists, if it is still needed.

    It is no longer needed if the run has resumed from it and saved a later step. For example, a run
    that loaded step 100 and then saved step 200 resumes from step 200.

    Args:
        run: The run.
        load_step: Value of `checkpoint.load_step`, the step of the checkpoint to load.
        saved: Step folders of the run, sorted by step.
    """
    is_saved = load_step in [get_step(folder) for folder in saved]
    if is_saved or has_resumed_from(saved, load_step):
        return

    names = ", ".join(folder.name for folder in saved) or "none"
    yield Problem(
        "checkpoint.load_step",
        f"is not in {_get_checkpoint_folder(run)}. Checkpoints there: {names}.",
    )


def _check_initial_weights(path: str, checkpoint: Checkpoint) -> Problems:
    """Check that the folder of the initial weights contains a checkpoint or a Hugging Face model.

    URLs are not checked here.

    Args:
        path: Path or URL of the initial weights.
        checkpoint: Section [checkpoint] of the job.
    """
    is_hf_folder = checkpoint.initial_load_in_hf and os.path.isdir(path)
    if is_hf_folder or storage.as_url(path):
        return
    try:
        read_newest_manifest(Path(path))
    except UserError as error:
        yield Problem("checkpoint.initial_load_path", f"cannot be used: {error}")


def check_wandb(run: Run) -> Problems:
    """Check that the package wandb is installed if the job logs to Weights & Biases."""
    if run.job.metrics.enable_wandb and find_spec("wandb") is None:
        yield Problem(
            "metrics.enable_wandb",
            "needs the package wandb. Install it with pip install 'wandb>=0.19'.",
        )


def check_certificate(run: Run) -> Problems:
    """If `job.require_certificate` is set, check that `titanlite prove` has passed for the run."""
    if not run.job.job.require_certificate:
        return
    match = find_certificate(run)
    if match is None:
        problem = (
            f"needs a certificate that fits this run, and {run.dump_folder / PROOFS} has none."
        )
    else:
        path, certificate = match
        if certificate.is_valid:
            return
        problem = f"needs a proof, but {path} found a difference."
    remedy = "Run `titanlite prove` with the options of this run."
    yield Problem("job.require_certificate", f"{problem} {remedy}")


def _get_checkpoint_folder(run: Run) -> Path:
    """Return the absolute path of the folder that contains the run's checkpoints."""
    return Path(os.path.normpath(run.dump_folder.absolute() / run.job.checkpoint.folder))


def _list_saved(run: Run) -> list[Path]:
    """Return the step folders that the run has saved, sorted by step, or [] for a new run."""
    folder = _get_checkpoint_folder(run)
    return list_checkpoints(folder) if folder.is_dir() else []


KEY_RULES: Rules = {
    check_model: ("model", "training"),
    check_layout: (
        "model",
        "training",
        "parallelism",
        "dataset",
        "compile",
        "float8",
        "activation_checkpoint",
    ),
    check_attention_backend: ("model", "training", "parallelism", "dataset"),
    check_total_steps: ("training", "lr_scheduler"),
    check_moments: ("training", "optimizer"),
    check_float8: ("model", "training", "parallelism", "float8"),
    check_memory_budget: ("activation_checkpoint", "compile", "model"),
    check_profiling: ("profiling",),
    check_optimizer: ("training", "optimizer", "metrics", "parallelism"),
    check_mup: ("model", "optimizer"),
    check_optimizer_groups: ("model", "optimizer"),
    check_symmetric_memory: ("parallelism",),
    check_effects: (
        "samples",
        "validation",
        "checkpoint",
        "float8",
        "optimizer",
        "training",
        "parallelism",
        "compile",
        "model",
    ),
    check_disabled_checkpoints: ("checkpoint", "guards"),
}
"""Rules that depend only on keys and the number of ranks, and read no files."""
DATA_RULES: Rules = {
    check_dataset: ("dataset",),
    check_validation: ("dataset", "validation"),
}
"""Rules that check the training and validation data."""
OUTPUT_RULES: Rules = {
    check_output_folders: ("job", "checkpoint"),
    check_urls: ("job", "checkpoint"),
    check_mirror: ("job", "checkpoint"),
    check_checkpoints: ("job", "checkpoint"),
    check_wandb: ("metrics",),
    check_certificate: ("job",),
    check_switches: ("checkpoint", "compile", "float8", "samples"),
}
"""Rules that matter only if the run trains, such as rules about output folders and loggers."""


def find_suspicious_values(run: Run) -> list[str]:
    """Return a warning for each value of a job that is valid but probably a mistake.

    Examples are a learning rate of 0.5 for AdamW, or a plain text file that contains markup.
    """
    warnings = []
    optimizer = run.job.optimizer
    if optimizer.name in NORMALIZING_OPTIMIZERS and optimizer.lr > UNUSUAL_LR:
        text = f"is unusually high for {optimizer.name}. Typical learning rates are 1e-4 to 1e-2."
        warnings.append(f"optimizer.lr = {format_value(optimizer.lr)} {text}")

    for source in _list_sources(run):
        if source.source != "text":
            continue
        markup = find_markup(find_files(source))
        if markup:
            warnings.append(f"{source.path}: {markup}")
    return warnings


def _list_sources(run: Run) -> list[TextSource]:
    """Return all training data sources, and the validation data sources if validation uses them."""
    dataset = run.job.dataset
    validation = run.job.validation
    # A section without a list of sources is a source itself.
    sources: list[TextSource] = [*(dataset.sources or [dataset])]
    if validation.freq and validation.holdout == 0:
        sources += validation.sources or [validation]
    return sources
