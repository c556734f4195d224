"""The output folder of a run: its lock, its log, its files, the writers of its numbers, and what each start runs with.

Invariant: one run at a time uses a folder, and no line goes into the log of another. What an earlier start has measured
is continued or set aside. To say what a start runs with costs no collective and reads no data, and git has a limit of
time: without its answer, the hash of the package's files tells whether the code has changed.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash

from titanlite import __version__
from titanlite.checkpoint import step_folders
from titanlite.checkpoint.folder import Ranks
from titanlite.checkpoint.job_diff import flat
from titanlite.config.errors import ERROR_FOLDER, UserError
from titanlite.config.load import PACKAGE
from titanlite.hooks.hook import Hook, Training
from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.outputs import OutputFolder
from titanlite.observe.writers import RunStart, Writer, open_writers
from titanlite.runtime.logging import LOG_FILE, LOGGER_NAME, Event, failed_writes, setup_logging

_PACKAGES = ("torch", "torchao", "numpy", "tokenizers", "tiktoken")
_GIT_SECONDS = 5.0


class Records(Hook):
    """Locks the folder when it is made, and then opens the log there.

    Raises:
        UserError: Another run is using the folder, or it cannot be written to.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._writers: list[Writer] = []
        self._failed: Counter[str] = Counter()  # name of a writer -> its failed calls
        run, seconds = training.run, training.run.job.comm.init_timeout_seconds
        folder, saves = run.dump_folder, [run.checkpoint_folder] if run.job.checkpoint.enable else []

        def lock() -> str:
            for part in (folder / "run", *saves):  # checkpoints may lie elsewhere
                patience = min(step_folders.LOCK_PATIENCE, seconds / 2)
                if (held := step_folders.lock(part, patience, training.log)) is not None:
                    training.opened.callback(os.close, held)
            return secrets.token_hex(8)

        ranks = Ranks(seconds)
        training.identity = ranks.on_rank0(lock)
        ranks.close()
        if training.rank == 0:
            self._outputs = OutputFolder(folder)
            setup_logging(0, folder / LOG_FILE)
            if errors := os.environ.get(ERROR_FOLDER):  # so that the launcher can add to train.log why a worker ended
                Path(errors, LOG_FILE).write_text(str((folder / LOG_FILE).absolute()), encoding="utf-8")

    def started(self, step: int) -> None:
        training, run = self._training, self._training.run
        if training.rank != 0:
            return
        before, now = self._outputs.environment(), environment_of(training)
        try:
            if aside := self._outputs.begin(run.job, now, step if training.resumed else None):
                training.log(aside)
            self._writers = open_writers(RunStart(run, step, now))
        except OSError as error:
            problem = f"{run.dump_folder}: the files of this run cannot be written"
            raise UserError(f"{problem}: {error}. Correct that.") from None
        training.opened.callback(self._tell, lambda writer: writer.close())
        # After the writers, because one that cannot begin ends this start.
        details: dict[str, Any] = {"host": socket.gethostname(), "process": os.getpid(), "record": now}
        lines = [f"Training starts {f'after step {step}' if step else 'anew'}"]
        if before.get("run") == training.identity:
            details["changed"] = changed = differences(before, now)
            # What a resume compares with its checkpoint has been said, with what it means.
            lines += [line for line in changed if not line.startswith(("job.", "data."))]
            lines[0] += "; changed since the start before:" if len(lines) > 1 else ""
        training.log(Event("\n".join(lines), "start", step, **details))

    def numbers(self, step: int) -> Mapping[str, Any]:
        return {"failed_writes": self._failed.total() + failed_writes()}

    def logged(self, entry: LoggedStep) -> None:
        self._tell(lambda writer: writer.logged(entry))
        steps = str(self._training.run.job.training.steps)
        mfu = "" if entry.mfu is None else f"mfu {entry.mfu:.1%}  "
        line = (
            f"step {entry.step:>{len(steps)}}/{steps}  loss {entry.loss:.4f}  grad_norm {entry.grad_norm:.3f}  "
            f"lr {entry.lr:.2e}  {entry.tps:,.0f} tokens/s  {mfu}{entry.memory:.2f} GiB  "
            f"eta {timedelta(seconds=round(entry.time_left))}"
        )
        self._training.log(line)  # after the writers: who reads it finds the step in each file

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        self._tell(lambda writer: writer.validated(step, score))

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._tell(lambda writer: writer.sampled(step, samples))

    def _tell(self, call: Callable[[Writer], None]) -> None:
        """Call each writer. What a full disk costs is counted, and said once for each writer."""
        for writer in self._writers:
            try:
                call(writer)
            except OSError as error:
                name = type(writer).__name__
                if name not in self._failed:
                    logging.getLogger(LOGGER_NAME).warning(f"Training goes on, but {name} cannot write: {error}")
                self._failed[name] += 1


def environment_of(training: Training) -> dict[str, Any]:
    """The content of environment.json: with what a run trains and where, the fingerprint of each source and of the
    tokenizer, and the keys of the job that are not at their default."""
    cpu = platform.processor() or platform.machine()
    data = {"tokenizer": training.tokenizer.fingerprint}
    for source in training.loader.sources:  # two sources can have one name
        data[source.name] = data.get(source.name, "") + source.fingerprint
    return {
        "run": training.identity,
        "code": describe_code(),
        "python": platform.python_version(),
        "packages": {"titanlite": __version__} | {package: version(package) for package in _PACKAGES},
        "device": torch.cuda.get_device_name(training.device) if training.device.type == "cuda" else cpu,
        "world_size": training.run.world_size,
        "layout": asdict(training.run.degrees),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "hosts": sorted(set(training.hosts)),
        "data": data,
        "job": training.run.job.model_dump(mode="json", exclude_defaults=True),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two environments, a line each, such as "packages.torch: 2.12.0 -> 2.13.0". Parts that the
    one before does not have (of an older version) are left out."""
    old, new = flat(before), flat({part: value for part, value in now.items() if part in before})
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name}: {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in changed]


def describe_code(package: Path = PACKAGE) -> dict[str, str]:
    """Which code of this package runs. "files": a hash of its files. In a clone of the repository also "commit", which
    ends with "-dirty" if a file of the clone differs from it."""
    digest = xxhash.xxh3_64()
    for file in sorted(package.rglob("*.py")):
        if file.is_file():  # an editor's lock is a link to nothing
            digest.update(os.fsencode(file.relative_to(package)) + b"\0" + file.read_bytes())
    folder = package.parent
    # Of this repository alone, without a lock in it, and without a process that outlives this one.
    git = ["git", f"--git-dir={folder / '.git'}", f"--work-tree={folder}", "-c", "core.fsmonitor=false"]
    command = [*git, "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or no clone
        return {"files": digest.hexdigest()}
    return {"files": digest.hexdigest(), "commit": said.stdout.decode().strip()}
