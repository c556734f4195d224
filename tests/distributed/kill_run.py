"""Ends of a run: it is killed, or its disk is full, at a named point of a save, `POINT:RANK`.

The points are reached by wrapping functions of the checkpoint room: nothing in it knows of being killed. SIGKILL to
oneself is what a dying machine looks like: no handler runs and nothing is flushed.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.dcp import CommittingWriter


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None):
    original = getattr(owner, name)

    def wrapped(*args, **keys):
        if before is not None:
            before(*args)
        result = original(*args, **keys)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, wrapped)


def kill_within_file(file: step_folders.HashingFile, _data: object) -> None:
    if file.tell() > 200_000:
        file.flush()
        kill()


def kill_within_removal(path: Path) -> None:
    if path.name.endswith("-removed"):
        next(path.iterdir()).unlink()
        kill()


def kill_between_manifest_and_name(path: Path) -> None:
    if path.name.startswith(step_folders.UNFINISHED):
        kill()


def fill_disk_once() -> None:
    """The first file that grows finds no room."""
    full: list[str] = []

    def refuse(file: step_folders.HashingFile, _data: object) -> None:
        if file.tell() > 200_000 and not full:
            full.append(file.name)
            file.error = OSError(28, "No space left on device")
            raise file.error

    wrap(step_folders.HashingFile, "write", before=refuse)


POINTS: dict[str, Callable[[], None]] = {
    "before_data": lambda: wrap(CommittingWriter, "write_data", before=kill),
    "within_file": lambda: wrap(step_folders.HashingFile, "write", before=kill_within_file),
    "before_manifest": lambda: wrap(step_folders, "encode_manifest", before=kill),
    "before_rename": lambda: wrap(step_folders, "flush", before=kill_between_manifest_and_name),
    "after_rename": lambda: wrap(step_folders, "publish", after=kill),
    "during_purge": lambda: wrap(shutil, "rmtree", before=kill_within_removal),
    "full_disk": fill_disk_once,
    "none": lambda: None,
}


def arm(point: str) -> None:
    """Prepare the calling rank for what happens at `point`."""
    name, _, rank = point.partition(":")
    if os.environ["RANK"] == (rank or "0"):
        POINTS[name]()
