"""Create the hooks of a run, choose its compute dtype, and describe the run in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist

from titanlite.checkpoint.find import read_compute_dtype
from titanlite.config.compute_dtype import ComputeDtype, cpu_has_bfloat16, fast_compute_dtype
from titanlite.config.registry import HOOKS
from titanlite.config.run import Run
from titanlite.data.amounts import describe_sources, explain_toy_run, measure_source
from titanlite.data.loader import Loader
from titanlite.data.tokenizer import Tokenizer
from titanlite.hooks.checkpoints import BestCheckpoint
from titanlite.hooks.ema import Ema
from titanlite.hooks.garbage import GarbageCollection
from titanlite.hooks.guards import build_guards
from titanlite.hooks.hook import Hook
from titanlite.hooks.live_view import LiveRun
from titanlite.hooks.norms import Norms
from titanlite.hooks.profiler import Profiler
from titanlite.hooks.samples import Samples
from titanlite.hooks.stragglers import Stragglers
from titanlite.observe.flops import num_params
from titanlite.rules import find_suspicious_values
from titanlite.runtime.logging import LOGGER_NAME, Event
from titanlite.runtime.world import gathered


def standard_hooks(run: Run) -> list[Hook]:
    """Create the hooks that a job enables, in the order in which the trainer calls them.

    The built-in hooks come first, such as the profiler, the weight average and the guards against
    bad steps. The plugin hooks in job.hooks follow.
    """
    job = run.job
    hooks: list[Hook] = [GarbageCollection(job.training.gc_freq)]
    profiling = job.profiling
    if profiling.enable_profiling or profiling.enable_memory_snapshot:
        hooks.append(Profiler(profiling, run.dump_folder))

    # Ema and Norms may come before the guards, because they read the skip flag only after the
    # update. By then, all guards have set it.
    if job.ema.decay:
        hooks.append(Ema(job.ema.decay))
    if job.metrics.details:
        hooks.append(Norms())
    if run.world_size > 1:
        hooks.append(Stragglers())

    hooks += build_guards()

    if job.checkpoint.enable and job.checkpoint.keep_best:
        hooks.append(BestCheckpoint())
    if job.samples.freq:
        hooks.append(Samples())
    hooks.append(LiveRun())

    # Plugins come after the guards, so their `before_update` can read which steps a guard skips.
    plugin_hooks = _create_plugin_hooks(run)
    return hooks + plugin_hooks


def _create_plugin_hooks(run: Run) -> list[Hook]:
    """Create the plugin hooks that job.hooks lists.

    A hook without a `name` gets the name under which it is registered.
    """
    hooks: list[Hook] = []
    for name in run.job.job.hooks:
        hook = HOOKS.make_instance(Hook, name, job=run.job)
        hook.name = hook.name or name
        hooks.append(hook)
    return hooks


def settle_compute_dtype(run: Run, device: torch.device) -> Run:
    """Replace `training.mixed_precision_param = "auto"` with the same concrete dtype on all ranks.

    A run that resumes keeps the dtype of its checkpoint. A new run uses the fastest dtype of the
    device of rank 0, because the CPUs of the nodes may differ. All ranks must call this together.

    Returns:
        The run with the chosen dtype, or `run` itself if the job sets a dtype.
    """
    if run.job.training.mixed_precision_param != "auto":
        return run

    on_gpu = device.type == "cuda"
    dtype: ComputeDtype | None = None
    if dist.get_rank() == 0:
        dtype = read_compute_dtype(run) or fast_compute_dtype(on_gpu)
    dtype_by_rank: list[ComputeDtype | None] = gathered(dtype)
    return run.resolve_compute_dtype(on_gpu, dtype_by_rank[0])  # rank 0 decides


def describe_run(
    run: Run, device: torch.device, tokenizer: Tokenizer, loader: Loader, rank: int
) -> Iterator[str | Event]:
    """Yield the first lines of the log: model size, data, number of tokens, and precision.

    On rank 0, also estimate the size of the data. Log a warning if options look suspicious, or if
    the data or the tokenizer is too small to train a useful model.
    """
    yield _summarize_run(run, device, loader)
    yield describe_compute_dtype(run.job.training.mixed_precision_param, device)
    yield f"Attention backend: {run.job.model.attention_backend}"

    if run.job.job.config_file is None:
        yield (
            f"The run has no job file. Its options will be saved to {run.dump_folder}/config.toml."
        )
    num_unused = run.arch.vocab_size - tokenizer.vocab_size
    if num_unused:
        yield (
            f"{num_unused:,} of {run.arch.vocab_size:,} embeddings (model.vocab_size) "
            "are not used by the tokenizer."
        )

    if rank == 0:
        yield from _describe_data(run, tokenizer, loader)


def _summarize_run(run: Run, device: torch.device, loader: Loader) -> str:
    """Return a log line with the size of the model, the data, the steps and the ranks."""
    job = run.job
    title = job.job.description or "Training"
    num_sequences = sum(count for _, count in run.sequence_counts)
    num_tokens = num_sequences * job.training.seq_len
    return (
        f"{title}: {job.model.flavor}, {num_params(run.arch):,} parameters, "
        f"on {loader.describe()}, {num_tokens:,} tokens in {job.training.steps:,} steps of "
        f"{run.global_batch_size} x {job.training.seq_len}, {run.world_size} x {device.type}"
    )


def _describe_data(run: Run, tokenizer: Tokenizer, loader: Loader) -> Iterator[Event]:
    """Yield a log event with the estimated size of each training source.

    This also logs warnings directly: if options look suspicious, or if the data or the tokenizer is
    too small to train a useful model.
    """
    logger = logging.getLogger(LOGGER_NAME)
    for line in find_suspicious_values(run):
        logger.warning(line)

    sizes = [measure_source(source, tokenizer) for source in loader.sources]
    yield Event(f"Data:\n{describe_sources(run, sizes)}", "data")
    warning = explain_toy_run(run, tokenizer, sizes)
    if warning:
        logger.warning(Event(warning, "data"))


def describe_compute_dtype(dtype: str, device: torch.device) -> str:
    """Return a log line with the compute dtype and, for a CPU, whether it supports bfloat16.

    Args:
        dtype: "float32" or "bfloat16".
        device: Device of this rank.
    """
    if device.type == "cuda":
        return f"Computing in {dtype}"
    if cpu_has_bfloat16():
        return f"Computing in {dtype}; this CPU has bfloat16 instructions"
    if dtype == "float32":
        return "Computing in float32, because this CPU has no bfloat16 instructions"
    return (
        "Computing in bfloat16, as the job or the checkpoint requires. This is slow because this "
        "CPU has no bfloat16 instructions. For a much faster new run, set "
        "--training.mixed_precision_param float32."
    )
