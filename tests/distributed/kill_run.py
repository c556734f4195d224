"""Ends of a run: it is killed, or its disk is full, at a named point of a save, `POINT:RANK`.

The points are reached by wrapping functions of the checkpoint room: nothing in it knows of being killed. SIGKILL to
oneself is what a dying machine looks like: no handler runs and nothing is flushed. With async_mode = "process" the
points lie in the process that writes, which imports this module as its main one.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.dcp import CommittingWriter
from titanlite.checkpoint.writer import CheckpointWriter


def trainer() -> int:
    """The process id of the rank, also in the process that writes for it."""
    return int(os.environ["TRAINER"])


def kill() -> None:
    os.kill(trainer(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def first_time() -> bool:
    """Whether no process of this rank was here before."""
    try:
        Path(os.environ["FOLDER"], f"was-here-{trainer()}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def kill_writer_once(*_: object) -> None:
    if first_time():
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


def wrap_removal() -> None:
    """The removal is waited for, because a machine that is busy can reach the next save before it."""
    wrap(step_folders.shutil, "rmtree", before=kill_within_removal)
    wrap(CheckpointWriter, "purge", after=lambda writer: writer._purger.submit(int).result())


class FullDisk:
    """A file to which little can be written."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: Any) -> int:
        if self.file.tell() > 200_000:
            raise OSError(28, "No space left on device")
        return self.file.write(data)


def fill_disk_once(file: step_folders.HashingFile, _path: Path) -> None:
    if first_time():
        file._file = FullDisk(file._file)  # type: ignore[assignment]


POINTS: dict[str, Callable[[], None]] = {
    "before_data": lambda: wrap(CommittingWriter, "write_data", before=lambda *_: kill()),
    "within_file": lambda: wrap(step_folders.HashingFile, "write", before=kill_within_file),
    "before_manifest": lambda: wrap(step_folders, "write_manifest", before=lambda *_: kill()),
    "before_rename": lambda: wrap(step_folders, "write_manifest", after=lambda *_: kill()),
    "after_rename": lambda: wrap(step_folders, "publish", after=lambda *_: kill()),
    "during_purge": wrap_removal,
    "full_disk": lambda: wrap(step_folders.HashingFile, "__init__", after=fill_disk_once),
    "writer_dies": lambda: wrap(CommittingWriter, "write_data", before=kill_writer_once),
    "none": lambda: None,
}


def arm(point: str, folder: Path) -> None:
    """Prepare the calling rank, and the process that writes for it, for what happens at `point` of the run in
    `folder`."""
    os.environ |= {"TRAINER": str(os.getpid()), "POINT": point, "FOLDER": str(folder)}
    sys.modules["__main__"] = sys.modules[__name__]  # what a process that is spawned imports first
    wrap_point()


def wrap_point() -> None:
    name, _, rank = os.environ["POINT"].partition(":")
    if os.environ["RANK"] == (rank or "0"):
        POINTS[name]()


if __name__ == "__mp_main__":
    wrap_point()
