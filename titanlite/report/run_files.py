"""The files in the output folder of one run, and what state they show it to be in.

Invariant: a state says no more than the files do. A run whose end nobody wrote down is "crashed" only on the machine
where it ran, whose locks tell; from elsewhere it is "stale" after a time without a word.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import tomli

from titanlite.checkpoint import step_folders
from titanlite.config.errors import UserError
from titanlite.config.files import read_file
from titanlite.config.load import MOST_BYTES
from titanlite.observe.live import Losses, RunStatus, State
from titanlite.report.json_lines import Tail, moment, number, sample, step_of
from titanlite.runtime.events import ENDS, EVENTS_FILE

SIGNS = ("metrics.jsonl", "config.toml", EVENTS_FILE)  # files by which a folder is known as a run's
_SAMPLES = 400  # points of the loss that are read from a large file
_PATIENCE = 300.0  # seconds without a word after which a run may have ended


def is_run(folder: Path) -> bool:
    """Whether a run has written to this folder."""
    return any((folder / name).is_file() for name in SIGNS)


def find_run(folder: Path) -> Path:
    """The folder, with ~ expanded. Raises UserError if no run has written to it."""
    folder = Path(os.path.expanduser(folder))
    if not is_run(folder):
        problem = "no run has written to this folder" if folder.is_dir() else "there is no such folder"
        raise UserError(
            f"{folder}: {problem}. Name the output folder of a run (job.dump_folder), for example outputs/debug_model; "
            "`titanlite runs FOLDER` lists those in a folder."
        )
    return folder


def read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    """The tables of config.toml; of any version, so nothing in it is checked."""
    path = folder / "config.toml"
    try:
        return tomli.loads(read_file(path, MOST_BYTES).decode()) if path.exists() else {}
    except (UserError, ValueError, RecursionError) as error:
        problems.append(f"config.toml cannot be read: {error}")
        return {}


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a small JSON file; {} if it is not there."""
    try:
        value = json.loads(read_file(path, MOST_BYTES)) if path.exists() else {}
        if isinstance(value, dict):
            return value
        problems.append(f"{path.name} is no JSON object")
    except (UserError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
    return {}


class RunFiles:
    """The files of a run that a status needs. Call `read` again while the run goes on: it reads what is new.

    Raises:
        UserError: no run has written to the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = find_run(folder)
        self._status = RunStatus(self.folder.resolve().name)
        self._read_config()
        self._metrics = Tail(self.folder / "metrics.jsonl")
        self._events = Tail(self.folder / EVENTS_FILE)
        self._step = 0  # the last one that an event since the last start names
        self._last: dict[str, Any] | None = None  # last event
        self._start: dict[str, Any] = {}  # last event of a start

    def read(self, curve: bool = True) -> RunStatus:
        """The status now, which is the same object at each call.

        Args:
            curve: Whether the loss of all steps is needed, not only that of the last ones.
        """
        status = self._status
        entries = self._metrics.new()
        if self._metrics.replaced:  # a resume has cut what it trains again
            status.losses = Losses()
            status.step_times.clear()
        if curve and not status.step_times and self._metrics.begins_late:
            self._read_early(entries)
        for entry in (entry for entry in entries if step_of(entry) is not None):
            status.logged({name: number(entry, name) for name in entry})
        for event in self._events.new():
            self._take(event)
        status.step = max(self._step, int(status.numbers.get("step", 0)))
        times = [moment(entry) for entry in (*entries[-1:], *([self._last] if self._last else ()))]
        status.last_word = max((t for t in (status.last_word, *times) if t is not None), default=None)
        status.problems = [*self._problems, *self._metrics.problems(), *self._events.problems()]
        status.state, status.reason = self._state()
        return status

    def _read_config(self) -> None:
        self._problems: list[str] = []
        config = read_config(self.folder, self._problems)
        job, training = config.get("job"), config.get("training")
        name, description = self.folder.resolve().name, job.get("description") if isinstance(job, dict) else None
        steps = training.get("steps") if isinstance(training, dict) else None
        self._status.title = f"{name}: {description}" if description else name
        self._status.total_steps = steps if type(steps) is int and 0 <= steps < 2**53 else None

    def _read_early(self, entries: list[dict[str, Any]]) -> None:
        """The course of the loss before `entries`, the end of metrics.jsonl, from a sample of its lines."""
        until = next((step for entry in entries if (step := step_of(entry)) is not None), 0)
        for entry in sample(self._metrics.path, _SAMPLES):
            step, loss = step_of(entry), number(entry, "loss")
            if step is not None and loss is not None and step < until:
                self._status.losses.add(step, loss)

    def _take(self, event: dict[str, Any]) -> None:
        at, text, step = moment(event), event.get("text"), step_of(event)
        if at is None or not isinstance(text, str):
            return
        self._last = event
        if event.get("event") == "start":
            self._start = event
            self._read_config()  # a start can have changed it
        if step is not None:
            self._step = step if event.get("event") == "start" else max(self._step, step)
        if event.get("event") != "data":
            self._status.events.append((at, text))

    def _state(self) -> tuple[State, str]:
        kind = None if self._last is None else self._last.get("event")
        if self._last is not None and kind in ENDS:
            state: State = "finished" if kind == "finish" else "stopped" if kind == "stop" else "crashed"
            text = str(self._last["text"]).strip()
            # The reason of a traceback is its last line.
            reason = text.rpartition("\n")[2] if text.startswith("Traceback") else text.partition("\n")[0]
            return state, "" if state == "finished" else reason
        silent = time.time() - (self._status.last_word or 0.0)
        if kind == "restart" and silent < _PATIENCE:
            return "running", "its launcher starts it again"
        here = self._start.get("host") == socket.gethostname()
        if here and self._start.get("process") == os.getpid():
            return "running", ""  # asking for the lock would end it, because this process holds it
        locked = step_folders.is_locked(self.folder / "run")
        if locked:
            return "running", ""
        if self._last is None and self._status.step and self._status.step == self._status.total_steps:
            return "finished", ""  # a run of version 0.1 wrote no events
        if here and locked is not None:
            return "crashed", "its process is gone, and has not written why: it was killed, or the machine went down"
        if silent < max(_PATIENCE, 10 * max(self._status.step_times, default=0.0)):
            return "running", ""
        return "stale", "nothing says that it ended, and nothing new came for a long time"
