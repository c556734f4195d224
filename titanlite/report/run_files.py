"""The files in the output folder of a run, and what state they show it to be in.

Invariant: a damaged line costs that line only, and is counted. A last line without its end is not damaged: its writer
has not finished it yet. A state says no more than the files do: a run whose end nobody wrote down is "crashed" only on
the machine where it ran, whose locks tell; from elsewhere it is "stale" after a time without a word.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path
from typing import Any

import tomli

from titanlite.checkpoint import step_folders
from titanlite.config.errors import UserError
from titanlite.config.files import check_regular, read_file
from titanlite.config.load import MOST_BYTES
from titanlite.observe.live import RunStatus, State
from titanlite.runtime.logging import ENDS, EVENTS_FILE

_LAST = 1 << 19  # bytes at the end of a file that a status reads: about 1,200 lines of metrics.jsonl
_LONGEST = 1 << 22  # bytes of a line
_SIGNS = ("metrics.jsonl", "config.toml", EVENTS_FILE)  # files by which a folder is known as a run's
_PATIENCE = 300.0  # seconds without a word after which a run may have ended
_LIMITS = {"time": (0, 2**37), "step": (0, 2**53)}  # what a calendar knows, and what a run can have


def json_lines(path: Path, problems: list[str], last: int = 1 << 62) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines, or in about so many bytes at its end. What cannot be read is added to
    `problems`. A file that is not there is empty."""
    damaged = 0
    if not os.path.lexists(path):
        return
    try:
        check_regular(path)
        with path.open("rb") as file:
            if (start := file.seek(0, os.SEEK_END) - last) > 0:  # go to the next whole line
                file.seek(start - 1)
                file.readline()
            else:
                file.seek(0)
            while (line := file.readline(_LONGEST)).endswith(b"\n") or len(line) == _LONGEST:
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    entry = None
                if isinstance(entry, dict):
                    yield entry
                else:
                    damaged += 1
    except (OSError, UserError) as error:
        problems.append(str(error))
    if damaged:
        problems.append(f"{path.name}: {damaged} line{'s' * (damaged > 1)} cannot be read")


def read_table(path: Path, parse: Callable[[str], Any], problems: list[str]) -> dict[str, Any]:
    """The content of a small file, of any version, so nothing in it is checked. What cannot be read is added to
    `problems`."""
    try:
        value = parse(read_file(path, MOST_BYTES).decode()) if path.exists() else {}
        return value if isinstance(value, dict) else {}
    except (UserError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}


def number(entry: dict[str, Any], key: str) -> float | None:
    """A finite number of a line that a sum can bear, or a time or step that there can be; None if it is none."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    least, most = _LIMITS.get(key, (-1e100, 1e100))
    return float(value) if least <= value < most else None


def read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    """The config.toml of a run, without what is no section."""
    config = read_table(folder / "config.toml", tomli.loads, problems)
    return {name: section for name, section in config.items() if isinstance(section, dict)}


def read_status(folder: Path) -> RunStatus:
    """How a run goes, from the last lines of its files.

    Raises:
        UserError: no run has written to the folder.
    """
    folder = Path(os.path.expanduser(folder))
    if not _is_run(folder):
        problem = "no run has written to this folder" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder}: {problem}. Name the output folder of a run; `titanlite runs FOLDER` lists them.")
    problems: list[str] = []
    config = read_config(folder, problems)
    name, description = folder.resolve().name, config.get("job", {}).get("description")
    status = RunStatus(f"{name}: {description}" if description else name, problems=problems)
    steps = config.get("training", {}).get("steps")
    status.total_steps = steps if type(steps) is int and 0 <= steps < 2**53 else None
    for entry in json_lines(folder / "metrics.jsonl", problems, _LAST):
        if number(entry, "step") is not None:
            status.logged({key: number(entry, key) for key in entry})
            status.last_word = number(entry, "time") or status.last_word
    start: dict[str, Any] = {}
    last: dict[str, Any] = {}
    reached = 0.0  # by the events since the last start
    for event in json_lines(folder / EVENTS_FILE, problems, _LAST):
        at, text, step = number(event, "time"), event.get("text"), number(event, "step")
        if at is None or not isinstance(text, str):
            continue
        last = event
        if event.get("event") == "start":
            start, reached = event, step or 0.0
        reached = max(reached, step or 0.0)
        if event.get("event") != "data":
            status.events.append((at, text))
    status.step = int(max(reached, status.numbers.get("step", 0.0)))
    status.last_word = max((t for t in (status.last_word, number(last, "time")) if t is not None), default=None)
    status.state, status.reason = _state(folder, status, start, last)
    return status


def _state(folder: Path, status: RunStatus, start: dict[str, Any], last: dict[str, Any]) -> tuple[State, str]:
    """The state and its reason, by the events of the last start and the last event of all."""
    kind = last.get("event")
    if kind in ENDS:
        text = last["text"].strip()
        # The reason of a traceback is its last line.
        reason = text.rpartition("\n")[2] if text.startswith("Traceback") else text.partition("\n")[0]
        return ("finished", "") if kind == "finish" else ("stopped" if kind == "stop" else "crashed", reason)
    silent = time.time() - (status.last_word or 0.0)
    if kind == "restart" and silent < _PATIENCE:
        return "running", "its launcher starts it again"
    here = start.get("host") == socket.gethostname()
    if here and start.get("process") == os.getpid():
        return "running", ""  # asking for the lock would end it, because this process holds it
    locked = step_folders.is_locked(folder / "run")
    if here and locked is False:
        return "crashed", "its process is gone, and has not written why: it was killed, or the machine went down"
    if locked or silent < max(_PATIENCE, 10 * status.numbers.get("step_time", 0.0)):
        return "running", ""
    return "stale", "nothing says that it ended, and nothing new came for a long time"


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs in a folder and in the folders in it, three deep, the one that wrote last first.

    Returns:
        A JSON value for each: {"run": path, "state", "reason", "step", "total_steps", "loss", "tps", "last_word": Unix
        time, "age": seconds, "problems": [lines]}. What is not known is null.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    folder, rows, now = Path(os.path.expanduser(folder)), [], time.time()
    below = (name for depth in (1, 2, 3) for name in sorted(glob("*/" * depth, root_dir=folder)))
    paths = [folder, *map(folder.joinpath, below)]
    runs = {path.resolve(): path for path in reversed(paths) if _is_run(path)}  # each once, by its shortest name
    if not runs:
        raise UserError(f"{folder}: there is no run in this folder. Name one with the output folders of runs.")
    for path in runs.values():
        status = read_status(path)
        names = ("state", "reason", "step", "total_steps", "last_word", "problems")
        found = {"run": str(path), **{name: getattr(status, name) for name in names}}
        found |= {name: status.numbers.get(name) for name in ("loss", "tps")}
        rows.append(found | {"age": None if status.last_word is None else max(0.0, now - status.last_word)})
    return sorted(rows, key=lambda row: -(row["last_word"] or 0.0))


def _is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in _SIGNS)
