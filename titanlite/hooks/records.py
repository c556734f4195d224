"""The output folder of a run: its lock, its log, its files, and the writers of its numbers.

Invariant: one run at a time uses a folder, and no line goes into the log of another. What an earlier start has measured
is continued or set aside.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.folder import Ranks
from titanlite.config.errors import ERROR_FOLDER
from titanlite.hooks.hook import Hook, Training
from titanlite.hooks.starts import differences, environment_of
from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.outputs import OutputFolder
from titanlite.observe.writers import RunStart, Writer, open_writers
from titanlite.runtime.logging import LOG_FILE, LOGGER_NAME, Event, failed_writes, setup_logging


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
                part.parent.mkdir(parents=True, exist_ok=True)
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
        if aside := self._outputs.begin(run.job, now, step if training.resumed else None):
            training.log(aside)
        self._writers = open_writers(RunStart(run, step, now))
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
