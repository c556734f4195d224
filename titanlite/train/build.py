"""The hooks of a run, in their order, and what is said of it before it starts.

Invariant: `standard_hooks` is the one place that says which hooks there are and in which order they are called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from titanlite.config.registry import HOOKS
from titanlite.config.run import Run
from titanlite.data.amounts import measured, table, toy_note
from titanlite.data.loader import Loader
from titanlite.data.tokenizer import Tokenizer
from titanlite.hooks.checkpoints import BestCheckpoint, Checkpoints
from titanlite.hooks.ema import Ema
from titanlite.hooks.garbage import GarbageCollection
from titanlite.hooks.guards import NonFiniteGuard
from titanlite.hooks.hang_report import HangReport
from titanlite.hooks.hook import Hook, Training
from titanlite.hooks.live_view import LiveRun
from titanlite.hooks.norms import Norms
from titanlite.hooks.profiler import Profiler
from titanlite.hooks.records import Records
from titanlite.hooks.replicas import ReplicaGuard
from titanlite.hooks.samples import Samples
from titanlite.hooks.spikes import SpikeGuard
from titanlite.hooks.stop_signals import StopSignals
from titanlite.hooks.stragglers import Stragglers
from titanlite.hooks.validation import Validation
from titanlite.observe.flops import num_params
from titanlite.runtime.logging import LOGGER_NAME, Event, setup_logging


def standard_hooks(training: Training) -> list[Hook]:
    """What each run has, as far as its job asks for it, in the order in which the loop calls it."""
    setup_logging(training.rank, None)
    job, profiling = training.run.job, training.run.job.profiling
    watch = HangReport(training)  # first, because a hang in the build is reported, too
    training.alive = watch.alive
    records = Records(training)  # locks the folder, and opens the log in it
    checkpoints = Checkpoints() if job.checkpoint.enable else None
    validation = Validation() if job.validation.freq else None
    saves: list[Hook | None] = [checkpoints, validation]  # a save comes first, so that nothing is lost meanwhile
    if checkpoints is not None and job.checkpoint.keep_best:  # whether it is due, the validation decides
        saves = [validation, BestCheckpoint(checkpoints), checkpoints]
    profiles = profiling.enable_profiling or profiling.enable_memory_snapshot
    hooks = [
        watch,
        StopSignals(),
        GarbageCollection(),
        Profiler(profiling, training.run.dump_folder) if profiles else None,
        Ema(job.ema.decay) if job.ema.decay else None,
        Norms() if job.metrics.details else None,
        Stragglers() if training.run.world_size > 1 else None,
        records,
        *guards(checkpoints),  # before the saves, and after the records, so that the line of the damage is written
        *saves,
        Samples() if job.samples.freq else None,
        LiveRun(training),
        *(HOOKS.make(name, job) for name in job.job.hooks),
    ]
    return [hook for hook in hooks if hook is not None]


def guards(checkpoints: Checkpoints | None = None) -> list[Hook]:
    """What protects a run: see [guards]."""
    return [SpikeGuard(checkpoints), NonFiniteGuard(), ReplicaGuard()]


def describe(run: Run, device: torch.device, tokenizer: Tokenizer, loader: Loader, rank: int) -> Iterator[str]:
    """The first lines of the log: the model, the data and the devices."""
    job, training = run.job, run.job.training
    tokens = sum(rows for _, rows in run.rows) * training.seq_len
    yield (
        f"{job.job.description or 'Training'}: {job.model.flavor}, {num_params(run.arch):,} parameters, on "
        f"{loader.describe()}, {tokens:,} tokens in {training.steps:,} steps of {run.global_batch_size} x "
        f"{training.seq_len}, {run.world_size} x {device.type}"
    )
    if job.job.config_file is None:
        yield f"There is no job file. The job as it runs will be in {run.dump_folder / 'config.toml'}."
    if unused := run.arch.vocab_size - tokenizer.vocab_size:
        yield f"{unused:,} of {run.arch.vocab_size:,} rows of the embedding (model.vocab_size) stand for no token."
    if rank == 0:
        sizes = [measured(source, tokenizer) for source in loader.sources]
        yield Event(f"Data:\n{table(run, sizes)}", "data")
        if note := toy_note(run, tokenizer, sizes):
            logging.getLogger(LOGGER_NAME).warning(Event(note, "data"))
