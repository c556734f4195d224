"""The view of a run below its log lines, on a terminal that can move its cursor."""

from __future__ import annotations

import contextlib
import json
import logging

from titanlite.config.run import Run
from titanlite.hooks.hook import Hook, StepResult
from titanlite.observe.live import RunStatus, State, View
from titanlite.observe.logged_step import LoggedStep, StepLine
from titanlite.runtime.logging import LOGGER_NAME, Event, LogHandler, is_live_terminal


class LiveRun(Hook):
    """Shows the numbers of logged steps itself, so their lines go to train.log only. On rank 0 of a terminal."""

    _live = None

    def __init__(self, run: Run, rank: int) -> None:
        title = ": ".join(filter(None, (run.dump_folder.resolve().name, run.job.job.description)))
        self._status = RunStatus(title, run.job.training.steps)
        self._metrics, self._shows = run.dump_folder / "metrics.jsonl", rank == 0 and is_live_terminal()

    def train_begins(self, step: int) -> None:
        if not self._shows:
            return
        from rich.live import Live

        with self._metrics.open(encoding="utf-8") as earlier:
            for line in earlier:
                self._status.logged(json.loads(line))
        handlers = logging.getLogger(LOGGER_NAME).handlers
        self._handlers = [h for h in handlers if isinstance(h, LogHandler) and h.file is None]
        for handler in self._handlers:
            handler.addFilter(self._takes)
        # A thread draws it, because a step must not wait for the terminal.
        self._live = Live(View(self._status), refresh_per_second=1)
        self._live.start()

    def after_step(self, step: int, result: StepResult) -> None:
        self._status.step = step

    def logged(self, entry: LoggedStep) -> None:
        self._status.logged(entry.model_dump())

    def ended(self, step: int, stopped: str) -> None:
        self._end("stopped" if stopped else "finished")

    def failed(self, error: BaseException) -> None:
        self._end("crashed")

    def _end(self, state: State) -> None:
        self._status.state, live, self._live = state, self._live, None
        if live is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                live.stop()
            for handler in self._handlers:
                handler.removeFilter(self._takes)

    def _takes(self, record: logging.LogRecord) -> bool:
        """Whether the terminal gets a log line."""
        if isinstance(record.msg, Event):
            self._status.events.append((record.created, record.msg))
        return not isinstance(record.msg, StepLine)
