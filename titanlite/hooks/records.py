"""The output folder of a run: its lock, its log, its files, and the writers of its numbers.

Invariant: one run at a time uses a folder, and no line goes into the log of another. What an earlier start has measured
is continued or set aside.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from titanlite import __version__
from titanlite.checkpoint import step_folders
from titanlite.checkpoint.folder import LOCK_PATIENCE, Ranks
from titanlite.config.errors import ERROR_FOLDER
from titanlite.hooks.hook import Hook, Training
from titanlite.hooks.starts import describe_code, differences, record_of, start_before, told
from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.outputs import OutputFolder
from titanlite.observe.writers import LOGGER, RunStart, Writer, open_writers
from titanlite.runtime.logging import EVENTS_FILE, LOG_FILE, Event, failed_writes, setup_logging

PACKAGES = ("torch", "torchao", "numpy", "tokenizers", "tiktoken")


class Records(Hook):
    """Locks the folder when it is made, and then opens the log there.

    Raises:
        UserError: Another run is using the folder, or it cannot be written to.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._writers: list[Writer] = []
        self._failed: Counter[str] = Counter()  # name of a writer -> its failed calls
        folder, seconds = training.run.dump_folder, training.run.job.comm.init_timeout_seconds

        def lock() -> str:
            folder.mkdir(parents=True, exist_ok=True)
            if (held := step_folders.lock(folder / "run", min(LOCK_PATIENCE, seconds / 2), training.log)) is not None:
                training.opened.callback(os.close, held)
            return secrets.token_hex(8)

        ranks = Ranks(seconds)
        training.identity = ranks.on_rank0(lock)
        ranks.close()
        if training.rank == 0:
            self._outputs = OutputFolder(folder, training.log)
            setup_logging(0, folder / LOG_FILE)
            if errors := os.environ.get(ERROR_FOLDER):  # so that the launcher can add to train.log why a worker ended
                Path(errors, LOG_FILE).write_text(str((folder / LOG_FILE).absolute()), encoding="utf-8")

    def started(self, step: int) -> None:
        training, run = self._training, self._training.run
        environment = self._environment()
        if training.rank == 0:
            self._outputs.start(run.job, environment, step if training.resumed else None)
        self._writers = open_writers(RunStart(run, step, environment), training.rank)
        training.opened.callback(self._tell, lambda writer: writer.close())
        if training.rank == 0:  # after the writers, because one that cannot begin ends this start
            self._say_start(step, environment)

    def numbers(self, step: int) -> Mapping[str, Any]:
        return {"failed_writes": self._failed.total() + failed_writes()}

    def logged(self, entry: LoggedStep) -> None:
        self._tell(lambda writer: writer.logged(entry))

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
                    LOGGER.warning(f"Training goes on, but its metrics cannot be written by {name}: {error}")
                self._failed[name] += 1

    def _environment(self) -> dict[str, Any]:
        """The content of environment.json: with what, where, and on how many ranks a run trains. Only rank 0, which
        writes it, looks at the code."""
        training = self._training
        cpu = platform.processor() or platform.machine()
        return {
            "run": training.identity,
            "code": describe_code() if training.rank == 0 else {},
            "python": platform.python_version(),
            "packages": {"titanlite": __version__} | {package: version(package) for package in PACKAGES},
            "device": torch.cuda.get_device_name(training.device) if training.device.type == "cuda" else cpu,
            "world_size": training.run.world_size,
            "layout": asdict(training.run.degrees),
            "threads": torch.get_num_threads(),
            "platform": platform.platform(),
        }

    def _say_start(self, step: int, environment: Mapping[str, Any]) -> None:
        """Log that training starts, and what differs from the start before."""
        training = self._training
        sources, tokenizer = training.loader.sources, training.tokenizer.fingerprint
        record = record_of(training.run.job, environment, training.hosts, sources, tokenizer)
        before = start_before(self._outputs.folder / EVENTS_FILE)
        changed = None if before is None else differences(before, record)
        details: dict[str, Any] = {"host": socket.gethostname(), "process": os.getpid(), "record": record}
        text = f"Training starts {f'after step {step}' if step else 'anew'}"
        if changed is not None:
            text += told(changed, training.changes)
            details["changed"] = [f"{part}: {line}" for part, line in changed]
        training.log(Event(text, "start", step, **details))
