"""Wait until the output folder of a run is free, and remove a new folder if nothing was saved.

Invariant: a start removes only files that it has created, and only empty folders.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.launch.ranks import UNSAVED_STOPS
from titanlite.runtime.folder_lock import LOCK_TIMEOUT, lock_file, lock_folder
from titanlite.runtime.logging import EVENTS_FILE, LOG_FILE, LOGGER_NAME, note

# Exit codes after which nothing was saved: the job is invalid, or a signal stopped the run.
UNSAVED_EXITS = (UserError.exit_code, *UNSAVED_STOPS)

FileId = tuple[int, int] | None
"""Device and inode number, which identify a file even after it was renamed. None if there is no
file.
"""


def run_in_output_folder(run: Run, train: Callable[[], int]) -> int:
    """Wait until no other run uses the output folder of a run, then train the run.

    If the job is invalid, or a signal stops the run before a save, remove the output folder again,
    provided that the folder is new and contains only files that this process has created.

    Args:
        run: The run to train.
        train: Function that trains the run and returns its exit code. If it trains in this process
            instead of starting ranks, it can also raise UserError.

    Returns:
        The exit code that `train` returns.

    Raises:
        UserError: If `train` raises it, or another run does not release the folder within
            `LOCK_TIMEOUT` seconds.
    """
    # Find out which folders are new before `_wait_for_other_runs` creates them.
    folders = (run.dump_folder, *run.dump_folder.parents)  # innermost first
    new_folders = [folder for folder in folders if not os.path.lexists(folder)]
    lock_files = _wait_for_other_runs(run)
    if not new_folders:  # an existing folder is never removed
        return train()

    # Create the log files before training does, to know that no other run has created them.
    log_files = _create_logs(run.dump_folder)
    output = NewOutput(run, new_folders, lock_files | log_files)
    try:
        exit_code = train()
    except UserError as error:
        output.remove_if_unsaved(error.exit_code)
        raise
    output.remove_if_unsaved(exit_code)
    return exit_code


def _wait_for_other_runs(run: Run) -> dict[Path, FileId]:
    """Wait until no other run uses the output folder or the checkpoint folder.

    Returns:
        IDs of the lock files of both folders, keyed by path. A later cleanup removes a lock file
        only if its ID is unchanged.
    """
    locked_paths = [_output_lock_path(run)]
    if run.job.checkpoint.enable:
        locked_paths.append(run.checkpoint_folder)

    lock_files: dict[Path, FileId] = {}
    for path in locked_paths:
        with _hold_lock(path, LOCK_TIMEOUT):
            pass  # release the lock at once, because rank 0 of the new run acquires it later
        file = lock_file(path)
        lock_files[file] = _file_id(file)
    return lock_files


def _output_lock_path(run: Run) -> Path:
    """Return the path that `_hold_lock` takes to lock the output folder of a run.

    The lock file is beside this path: .run.lock in the output folder.
    """
    return run.dump_folder / "run"


@contextmanager
def _hold_lock(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock of a path in a `with` block. Create its lock file if needed.

    Raises:
        UserError: If another run still holds the lock after `timeout` seconds, or if the lock file
            is a symbolic link.
    """
    descriptor = lock_folder(path, timeout, note)
    try:
        yield
    finally:
        if descriptor is not None:  # None: the file system does not support locks
            os.close(descriptor)


def _create_logs(folder: Path) -> dict[Path, FileId]:
    """Create the log files in a new output folder.

    Returns:
        The created files and their IDs. Files that another process has created are not included.
    """
    file_ids: dict[Path, FileId] = {}
    for name in (LOG_FILE, EVENTS_FILE):
        file = folder / name
        with suppress(FileExistsError):
            file.touch(exist_ok=False)
            file_ids[file] = _file_id(file)
    return file_ids


class NewOutput(NamedTuple):
    """Output folder that this process has created, and can remove if nothing is saved in it.

    Attributes:
        run: The run that trains in the folder.
        folders: All folders that this process has created, innermost first: the output folder and
            possibly some of its parents.
        file_ids: IDs of the files that this process has created, keyed by path.
    """

    run: Run
    folders: Sequence[Path]
    file_ids: dict[Path, FileId]

    def remove_if_unsaved(self, exit_code: int) -> None:
        """Remove the output folder if the exit code of the run shows that nothing was saved.

        This is the case if the job was invalid, or if a signal stopped the run before a save. Keep
        a folder that another run has locked, or that contains a file of another process.
        """
        if exit_code not in UNSAVED_EXITS:
            return

        lock_path = _output_lock_path(self.run)
        with suppress(UserError), _hold_lock(lock_path, timeout=0.0):  # unless another run holds it
            self._remove_if_unused()

    def _remove_if_unused(self) -> None:
        """Remove the folder, unless it contains a file that another process has created.

        It may contain an empty checkpoint folder, which is removed first.
        """
        created_files = self._list_created_files()
        entries = set(self.run.dump_folder.iterdir())
        other_entries = entries - created_files
        for entry in other_entries:
            if not self._is_empty_checkpoint_folder(entry):
                return

        # Stop logging, because the error that ends this process would create train.log again.
        logging.getLogger(LOGGER_NAME).handlers.clear()
        for file in entries & created_files:  # keep lock files in other folders
            file.unlink(missing_ok=True)

        # Remove folders from the inside out: the empty checkpoint folder, if any, the output
        # folder, and its new parents. Stop if another process has put a file into one of them.
        with suppress(OSError):
            for folder in [*other_entries, *self.folders]:
                folder.rmdir()

    def _list_created_files(self) -> set[Path]:
        """Return the files that this process has created, unless another process replaced them."""
        return {path for path, file_id in self.file_ids.items() if _file_id(path) == file_id}

    def _is_empty_checkpoint_folder(self, path: Path) -> bool:
        """Return whether a path is the checkpoint folder of the run, and contains nothing."""
        return path == self.run.checkpoint_folder and path.is_dir() and not any(path.iterdir())


def _file_id(path: Path) -> FileId:
    """Return the device and inode number of a file, or None if the file does not exist."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
