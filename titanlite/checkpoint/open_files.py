"""How the files of a checkpoint are opened: regular files of its folder, and nothing else.

Invariant: no file can make a reader wait, act on a device or leave the folder. Damage is one kind of error; a file that
cannot be read at the moment is another.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

from titanlite.config.errors import CheckpointError, Damage

_NO_SUCH_FILE = (errno.ENOENT, errno.ENAMETOOLONG)


def open_file(path: Path) -> io.BufferedReader:
    """Open a file of a checkpoint for reading.

    Raises:
        Damage: there is none, or it is no regular file (a link, a pipe, a folder, a device).
        CheckpointError: it cannot be read now.
    """
    try:
        _check_regular(path, os.lstat(path).st_mode)
        # O_NONBLOCK: a pipe that takes the file's place at this moment does not make open wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_SUCH_FILE:
            raise Damage(f"{shown(path.name)}: missing") from None
        raise unreadable(path, error) from None
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
        raise Damage(f"{shown(path.name)}: {what}")


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
    return CheckpointError(
        f"{path} cannot be read: {type(error).__name__}: {error.strerror}. That need not be damage, and nothing is "
        "renamed. Mend it and start again, or move this checkpoint away."
    )


def shown(value: object) -> str:
    """A value from a file for a message: short, and without characters that act on a terminal."""
    if not isinstance(value, str | int):
        return f"a {type(value).__name__}"
    text = ascii(value)[1:-1] if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
