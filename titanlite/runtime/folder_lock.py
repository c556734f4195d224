"""Locks that keep two runs from using the same folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from titanlite.config.errors import UserError

LOCK_TIMEOUT = 120
"""Longest time in seconds to wait for the lock of another run. A run whose launcher was killed
holds its lock until its ranks have saved a checkpoint and exited."""


def lock_file(folder: Path) -> Path:
    """Return the path of the lock file of `folder`, which is in the parent folder."""
    return folder.with_name(f".{folder.name}.lock")


def lock_folder(folder: Path, timeout: float, log: Callable[[str], None]) -> int | None:
    """Lock a folder for this process, so that no other run writes to it.

    The lock is held until this process exits or closes the returned descriptor. Child processes do
    not inherit the lock. On NFS, the lock also excludes runs on other nodes.

    Args:
        folder: Part of an output folder, such as its checkpoints. The folder need not exist yet.
            Its parent is created.
        timeout: Longest time to wait for a run that holds the lock, in seconds.
        log: Function that logs a line. It is called if this process must wait, or if the file
            system does not support locks.

    Returns:
        The file descriptor that holds the lock, or None if the file system does not support locks.

    Raises:
        UserError: If another run still holds the lock, or the lock file is a symbolic link.
    """
    path = lock_file(folder)
    deadline = time.monotonic() + timeout
    is_waiting = False
    while True:
        descriptor = _open_lock_file(path)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 300, 0).decode(errors="replace") or "another run"
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                log(
                    f"Cannot lock {folder}: {error.strerror}. "
                    "A second run in this folder would not be noticed"
                )
                return None
        else:
            # A run that ends without a save removes its new output folder, with the lock file. The
            # lock of a removed file excludes no other run, so open or create the file again.
            is_removed = os.fstat(descriptor).st_nlink == 0
            if not is_removed:
                _write_owner(descriptor)
                return descriptor
            os.close(descriptor)
            continue

        if time.monotonic() > deadline:
            raise UserError(
                f"{folder.parent} is in use by {owner}. "
                "Stop that run, or choose another job.dump_folder."
            )
        if not is_waiting:
            log(f"{folder.parent} is in use by {owner}; waiting up to {timeout:.0f} s for its end")
            is_waiting = True
        time.sleep(0.1)


def _open_lock_file(path: Path) -> int:
    """Open a lock file and return its file descriptor. Create the file and its folder if needed.

    Raises:
        UserError: If the lock file is a symbolic link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, so a run cannot lock it. Remove the link.")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def _write_owner(descriptor: int) -> None:
    """Write the name of this process, such as "process 123 on node1", to a lock file.

    Other runs read it to report which process holds the lock.
    """
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
