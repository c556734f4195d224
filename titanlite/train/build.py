"""Builds the parts of a trainer that belong to no other room: folder and log, checkpoints and metrics.

Invariant: a part takes what it needs from the run and from parts that were built before it. Nothing here trains.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.folder import LOCK_PATIENCE, CheckpointFolder
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.rank_agreement import Ranks
from titanlite.checkpoint.resume import Resumer
from titanlite.checkpoint.save import Saver
from titanlite.config.errors import ERROR_FOLDER
from titanlite.config.flavors import unused_rows
from titanlite.config.run import Run
from titanlite.data.heldout import ValidationSet
from titanlite.data.loader import Loader
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokenizer_export import write_tokenizer
from titanlite.observe.flops import num_params
from titanlite.observe.gpus import peak_flops
from titanlite.observe.metrics import MetricsRecorder
from titanlite.observe.outputs import OutputFolder, describe_environment
from titanlite.observe.writers import RunStart, open_writers
from titanlite.runtime.events import EVENTS_FILE, Event
from titanlite.runtime.logging import LOG_FILE, setup_logging
from titanlite.train.starts import Start, describe_code, start_before, told

Log = Callable[[str], None]


def open_folder(run: Run, log: Log, opened: ExitStack) -> tuple[str, OutputFolder | None]:
    """Lock the output folder until `opened` closes, and then write the log there.

    The log is opened after the lock, so that it never goes into the folder of another run.

    Returns:
        A new identity for the run, the same on all ranks, and on rank 0 the folder.

    Raises:
        UserError: Another run is using the folder, or it cannot be written to.
    """
    folder, seconds = run.dump_folder, run.job.comm.init_timeout_seconds

    def lock() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        if (held := step_folders.lock(folder / "run", min(LOCK_PATIENCE, seconds / 2), log)) is not None:
            opened.callback(os.close, held)
        return secrets.token_hex(8)

    ranks = Ranks(seconds)
    identity = ranks.on_rank0(lock)
    ranks.close()
    if dist.get_rank() != 0:
        return identity, None
    outputs = OutputFolder(folder, log)
    setup_logging(0, folder / LOG_FILE)
    if error_folder := os.environ.get(ERROR_FOLDER):  # so that the launcher can add to train.log why a worker ended
        Path(error_folder, LOG_FILE).write_text(str((folder / LOG_FILE).absolute()), encoding="utf-8")
    return identity, outputs


def describe(
    run: Run, device: torch.device, tokenizer: Tokenizer, loader: Loader, validation: ValidationSet | None
) -> Iterator[str]:
    """The first lines of the log: the model, the data and the devices."""
    job, training = run.job, run.job.training
    tokens = training.steps * run.global_batch_size * training.seq_len
    yield (
        f"{job.job.description or 'Training'}: {job.model.flavor}, {num_params(run.arch):,} parameters, on "
        f"{loader.describe()}, {tokens:,} tokens in {training.steps:,} steps of {run.global_batch_size} x "
        f"{training.seq_len}, {run.world_size} x {device.type}"
    )
    if unused := unused_rows(run.arch, tokenizer.vocab_size):
        yield unused
    if dist.get_rank() == 0:
        yield Event("Data:\n" + loader.table(training.steps), "data")
    if validation is not None:
        yield f"Validation on {validation.describe()}"


def open_checkpoints(
    run: Run, live: LiveState, tokenizer: Tokenizer, loader: Loader, log: Log, opened: ExitStack
) -> tuple[Saver, Resumer]:
    """What saves the run, and what resumes it. Their folder is the run's until `opened` closes."""
    folder = CheckpointFolder(run.job.checkpoint, run.checkpoint_folder, log)
    opened.callback(folder.close)
    job = run.job.model_dump(mode="json")

    def write_tokenizer_files(out: Path) -> dict[str, int | None]:
        return write_tokenizer(run.tokenizer_path, out, run.arch.max_seq_len)

    saver = Saver(folder, live, job=job, write_tokenizer=write_tokenizer_files)
    opened.callback(saver.close)
    resumer = Resumer(folder, live, job=job, same_tokenizer=tokenizer.is_known_as, compare_data=loader.compare)
    return saver, resumer


def environment_of(run: Run, device: torch.device, identity: str) -> dict[str, Any]:
    """The content of environment.json. Only rank 0, which writes it, looks at the code."""
    cpu = platform.processor() or platform.machine()
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    code = describe_code() if dist.get_rank() == 0 else {}
    return describe_environment(device_name, identity, asdict(run.degrees), code)


def say_start(outputs: OutputFolder, step: int | None, record: Start, said: list[str]) -> None:
    """On rank 0: log that training starts, and what differs from the start before.

    Args:
        step: Last step of the checkpoint that the run resumed from; None if it begins anew.
        said: Differences that the log has said already.
    """
    before = start_before(outputs.folder / EVENTS_FILE)
    changed = None if before is None else record.differences(before)
    text = f"Training starts {f'after step {step}' if step else 'anew'}" + (
        "" if changed is None else told(changed, said)
    )
    details = {"host": socket.gethostname(), "process": os.getpid(), "record": record.model_dump(mode="json")}
    if changed is not None:
        details["changed"] = [f"{part}: {line}" for part, line in changed]
    outputs.log(Event(text, "start", step or 0, **details))


def start_metrics(
    run: Run, device: torch.device, environment: Mapping[str, Any], state: dict[str, Any] | None
) -> MetricsRecorder:
    """Open the run's metrics at the current step.

    Args:
        environment: What `environment_of` returns.
        state: The state of the checkpoint that the run resumed from, if any.

    Raises:
        UserError: A writer of metrics cannot begin.
    """
    step, tokens = (0, 0) if state is None else (state["step"], state["tokens"])
    writers = open_writers(RunStart(run, step, environment), dist.get_rank())
    return MetricsRecorder(run, writers, device, peak_flops(environment["device"]), step, tokens)
