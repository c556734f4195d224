"""The files in the output folder of one run, and what state they show it to be in.

Invariant: a state says no more than the files do. A run whose end nobody wrote down is "crashed" only on the machine
where it ran, whose locks tell; from elsewhere it is "stale" after a time without a word.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomli

from titanlite.checkpoint import step_folders
from titanlite.config.errors import UserError
from titanlite.config.files import read_file
from titanlite.config.load import MOST_BYTES
from titanlite.observe.live import RunStatus, State
from titanlite.report.json_lines import JsonLines, moment, number, step_of
from titanlite.runtime.logging import ENDS, EVENTS_FILE

LAST, ALL = 1 << 18, 1 << 26  # bytes: about 600 and 150,000 lines of metrics.jsonl
_SIGNS = ("metrics.jsonl", "config.toml", EVENTS_FILE)  # files by which a folder is known as a run's
_DEPTH = 3  # of folders in folders that are searched for runs
_PATIENCE = 300.0  # seconds without a word after which a run may have ended


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs in a folder and in the folders in it, the one that wrote last first.

    Returns:
        A JSON value for each: {"run": path, "state", "reason", "step", "total_steps", "loss", "tps", "last_word": Unix
        time, "age": seconds, "problems": [lines]}. What is not known is null.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    folder, rows, now = Path(os.path.expanduser(folder)), [], time.time()
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder. Name a folder with the output folders of runs.")
    for path in _find(folder, _DEPTH):
        status = RunFiles(path, LAST).read()
        numbers = {name: value for name, value in status.numbers.items() if math.isfinite(value)}
        found = {name: getattr(status, name) for name in ("state", "reason", "step", "total_steps", "last_word")}
        age = None if status.last_word is None else max(0.0, now - status.last_word)
        found |= {"loss": numbers.get("loss"), "tps": numbers.get("tps"), "age": age, "problems": status.problems}
        rows.append({"run": str(path), **found})
    if not rows:
        raise UserError(f"{folder}: no run here, nor in the folders in it. Name a folder with output folders of runs.")
    return sorted(rows, key=lambda row: -(row["last_word"] or 0.0))


def _find(folder: Path, depth: int, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The folders of runs in a folder. A link to one of the folders `above` leads nowhere new."""
    real = folder.resolve()
    if real in above:
        return
    if _is_run(folder):
        yield folder
    elif depth:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith(".") and os.access(path, os.R_OK | os.X_OK):
                yield from _find(path, depth - 1, (*above, real))


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _SIGNS)


class RunFiles:
    """The files of a run that a status needs. Call `read` again while the run goes on: it reads what is new.

    Args:
        last: Bytes of metrics.jsonl that are read of a larger one: `LAST` for the numbers of now, `ALL` for the loss.

    Raises:
        UserError: no run has written to the folder.
    """

    def __init__(self, folder: Path, last: int = ALL) -> None:
        self.folder = Path(os.path.expanduser(folder))
        if not _is_run(self.folder):
            problem = "no run has written to this folder" if self.folder.is_dir() else "there is no such folder"
            raise UserError(
                f"{self.folder}: {problem}. Name the output folder of a run (job.dump_folder), for example "
                "outputs/debug_model; `titanlite runs FOLDER` lists those in a folder."
            )
        self._status = RunStatus(self.folder.resolve().name)
        self._read_config()
        self._metrics, self._events = (
            JsonLines(self.folder / "metrics.jsonl", last),
            JsonLines(self.folder / EVENTS_FILE),
        )
        self._step = 0  # the last one that an event since the last start names
        self._last: dict[str, Any] = {}  # last event
        self._start: dict[str, Any] = {}  # last event of a start

    def read(self) -> RunStatus:
        """The status now, which is the same object at each call."""
        status = self._status
        words = [status.last_word]
        for i, entry in enumerate(self._metrics.new()):
            if i == 0 and self._metrics.replaced:  # a resume has cut what it trains again
                status.losses.clear()
                status.step_times.clear()
            if step_of(entry) is not None:
                status.logged({name: number(entry, name) for name in entry})
                words[1:] = [moment(entry)]
        for event in self._events.new():
            self._take(event)
        status.step = max(self._step, int(status.numbers.get("step", 0)))
        status.last_word = max((t for t in (*words, moment(self._last)) if t is not None), default=None)
        status.problems = [*self._problems, *self._metrics.problems(), *self._events.problems()]
        status.state, status.reason = self._state()
        return status

    def _read_config(self) -> None:
        self.config, self._problems = read_tables(self.folder / "config.toml", tomli.loads)
        job, training = (self.config.get(name) for name in ("job", "training"))
        name, description = self.folder.resolve().name, job.get("description") if isinstance(job, dict) else None
        steps = training.get("steps") if isinstance(training, dict) else None
        self._status.title = f"{name}: {description}" if description else name
        self._status.total_steps = steps if type(steps) is int and 0 <= steps < 2**53 else None

    def _take(self, event: dict[str, Any]) -> None:
        at, kind, text, step = moment(event), event.get("event"), event.get("text"), step_of(event)
        if at is None or not isinstance(text, str):
            return
        self._last = event
        if kind == "start":
            self._start = event
            self._read_config()  # a start can have changed it
        if step is not None:
            self._step = step if kind == "start" else max(self._step, step)
        if kind != "data":
            self._status.events.append((at, text))

    def _state(self) -> tuple[State, str]:
        kind = self._last.get("event")
        if kind in ENDS:
            text = str(self._last["text"]).strip()
            # The reason of a traceback is its last line.
            reason = text.rpartition("\n")[2] if text.startswith("Traceback") else text.partition("\n")[0]
            return ("finished", "") if kind == "finish" else ("stopped" if kind == "stop" else "crashed", reason)
        silent = time.time() - (self._status.last_word or 0.0)
        if kind == "restart" and silent < _PATIENCE:
            return "running", "its launcher starts it again"
        here = self._start.get("host") == socket.gethostname()
        if here and self._start.get("process") == os.getpid():
            return "running", ""  # asking for the lock would end it, because this process holds it
        locked = step_folders.is_locked(self.folder / "run")
        if locked:
            return "running", ""
        if here and locked is not None:
            return "crashed", "its process is gone, and has not written why: it was killed, or the machine went down"
        if silent < max(_PATIENCE, 10 * max(self._status.step_times, default=0.0)):
            return "running", ""
        return "stale", "nothing says that it ended, and nothing new came for a long time"


def read_tables(path: Path, parse: Callable[[str], Any]) -> tuple[dict[str, Any], list[str]]:
    """The content of a small file, of any version, so nothing in it is checked; and what cannot be read."""
    try:
        value = parse(read_file(path, MOST_BYTES).decode()) if path.exists() else {}
        return value if isinstance(value, dict) else {}, []
    except (UserError, ValueError, RecursionError) as error:
        return {}, [f"{path.name} cannot be read: {error}"]
