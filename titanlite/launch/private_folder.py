"""A temporary folder that belongs to one run.

Invariant: only this user can enter it. It is in use as long as one process of the run lives, because all processes hold
its lock. The next start removes the folder of a launcher that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.config.errors import UserError
from titanlite.runtime.logging import LOG_FILE

PREFIX = "titanlite-run-"
OF_A_RUN = ("*.json", "store-*", LOG_FILE)  # the files in it; any other file is left alone


@contextmanager
def private_folder() -> Iterator[tuple[Path, int]]:
    """A new folder, and the descriptor that locks it. Removes the folders of runs that were killed.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        place = Path(tempfile.gettempdir())
    except OSError as error:
        raise _no_folder("The folder for temporary files", error) from None
    for left in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it belongs to another user, is in use, or another launcher removes it
            _remove_leftover(left)
    folder, lock = _locked_folder(place)
    try:
        yield folder, lock
    finally:
        with contextlib.suppress(OSError):
            _remove(folder)
        os.close(lock)


def _remove_leftover(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
    finally:
        os.close(lock)


def _locked_folder(place: Path) -> tuple[Path, int]:
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError as error:
            raise _no_folder(str(place), error) from None
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):  # another launcher removed it before it was locked
            continue
        except OSError as error:  # for example a file system without locks
            folder.rmdir()
            raise _no_folder(str(place), error) from None
        if folder.exists():
            return folder, lock
        os.close(lock)


def _no_folder(place: str, error: OSError) -> UserError:
    return UserError(f"{place}: a run needs a folder there: {error.strerror}. Set TMPDIR to a folder on a local disk.")


def _remove(folder: Path) -> None:
    for pattern in OF_A_RUN:
        for file in folder.glob(pattern):
            file.unlink()
    folder.rmdir()
