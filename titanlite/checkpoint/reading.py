"""How the files of a checkpoint are opened: regular files of its folder, and nothing else.

Invariant: no file can make a reader wait, act on a device or leave the folder. A checkpoint that does not hold what it
should is told apart from one that cannot be read just now.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from titanlite.config.errors import CheckpointError


class Damage(CheckpointError):
    """A checkpoint does not hold what it should. The message names the file."""


def open_file(path: Path) -> io.BufferedReader:
    """Open a file of a checkpoint for reading.

    Raises:
        Damage: there is none, or it is no regular file (a pipe, a folder, a device).
        CheckpointError: it cannot be read now, or it is a link, which may lead out of the folder.
    """
    try:
        if not stat.S_ISLNK(mode := os.lstat(path).st_mode) and not stat.S_ISREG(mode):
            raise Damage(f"{path.name}: not a regular file")
        # O_NONBLOCK: a pipe that takes the file's place at this moment does not make open wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Damage(f"{path.name}: missing") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damage(f"{path.name}: not a regular file")
    return open(descriptor, "rb")


def read_file(path: Path, limit: int) -> bytes:
    """All of a file of a checkpoint, which has at most `limit` bytes.

    Raises:
        Damage: as `open_file`, or it is larger.
        CheckpointError: as `open_file`.
    """
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise Damage(f"{path.name}: {size} bytes, more than one can have")
        try:
            return file.read()
        except OSError as error:
            raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that the system does not let us read."""
    reason = "it is a symbolic link" if error.errno == errno.ELOOP else f"{type(error).__name__}: {error.strerror}"
    return CheckpointError(
        f"{path} cannot be read: {reason}. That need not be damage, and nothing is renamed. Mend it and start again, "
        "or move this checkpoint away."
    )


def shown(value: object) -> str:
    """A value from a file for a message: short, and nothing in it acts on a terminal."""
    if not isinstance(value, str | int):
        return f"a {type(value).__name__}"
    text = ascii(value)[1:-1] if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
