"""Wait until the output folder of a run is free, and remove it after a start that trained nothing.

Invariant: a start removes only files that it has created, and only empty folders.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path

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
    folders = (run.dump_folder, *run.dump_folder.parents)  # innermost first
    new_folders = [folder for folder in folders if not os.path.lexists(folder)]
    lock_files = _wait_for_other_runs(run)
    if not new_folders:  # an existing folder is never removed
        return train()

    # Create the log files before training does, to know that no other run has created them.
    created_files = lock_files | _create_logs(run.dump_folder)
    exit_code = 1  # any error except UserError keeps the folder
    try:
        exit_code = train()
    except UserError as error:
        exit_code = error.exit_code
        raise
    finally:
        if exit_code in UNSAVED_EXITS:
            _remove_unused(run, new_folders, created_files)
    return exit_code


def _wait_for_other_runs(run: Run) -> dict[Path, FileId]:
    """Wait until no other run uses the output folder or the checkpoint folder.

    Returns:
        IDs of the lock files of both folders, keyed by path. A later cleanup removes a lock file
        only if its ID is unchanged.
    """
    locked_paths = [run.dump_folder / "run"]  # its lock file is .run.lock in the output folder
    if run.job.checkpoint.enable:
        locked_paths.append(run.checkpoint_folder)

    lock_files: dict[Path, FileId] = {}
    for path in locked_paths:
        _wait_for_lock(path)
        file = lock_file(path)
        lock_files[file] = _file_id(file)
    return lock_files


def _wait_for_lock(path: Path) -> None:
    """Wait until no other run holds the lock of a path, and create its lock file if needed.

    Acquire the lock and release it again, because rank 0 of the new run acquires it later.
    """
    descriptor = lock_folder(path, LOCK_TIMEOUT, note)
    _release_lock(descriptor)


def _release_lock(descriptor: int | None) -> None:
    """Release the lock of a folder by closing the file descriptor that `lock_folder` returned."""
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


def _remove_unused(
    run: Run, new_folders: Sequence[Path], created_files: dict[Path, FileId]
) -> None:
    """Remove the new output folder of a run that has trained nothing.

    The folder is kept if another run has locked it, or if it contains any file that this process
    has not created.

    Args:
        run: The run that has ended.
        new_folders: Folders that this process has created, innermost first.
        created_files: IDs of the files that this process has created, keyed by path.
    """
    try:
        descriptor = lock_folder(run.dump_folder / "run", timeout=0.0, log=note)
    except UserError:  # another run has started to use the folder
        return

    try:
        # If the ID of a file has changed, another process has replaced it.
        files = {path for path, file_id in created_files.items() if _file_id(path) == file_id}
        _remove_created(run, files, new_folders)
    finally:
        _release_lock(descriptor)


def _remove_created(run: Run, created_files: Set[Path], new_folders: Sequence[Path]) -> None:
    """Remove the new output folder of a run, unless it contains a file of another process.

    It may contain an empty checkpoint folder, which is removed first.

    Args:
        run: The run that has ended.
        created_files: Files that this process has created, in the output folder or elsewhere.
        new_folders: Folders that this process has created, innermost first.
    """
    entries = set(run.dump_folder.iterdir())
    folders = list(new_folders)
    if run.checkpoint_folder in entries and _is_empty_folder(run.checkpoint_folder):
        folders.insert(0, run.checkpoint_folder)
    unknown_entries = entries.difference(created_files, folders)
    if unknown_entries:
        return

    # Stop logging, because the error that ends this process would create train.log again.
    logging.getLogger(LOGGER_NAME).handlers.clear()
    for file in entries & created_files:
        file.unlink(missing_ok=True)
    with suppress(OSError):  # another process may have put a file into one of the folders
        for folder in folders:
            folder.rmdir()


def _is_empty_folder(path: Path) -> bool:
    """Return whether a path is an empty folder."""
    return path.is_dir() and not any(path.iterdir())


def _file_id(path: Path) -> FileId:
    """Return the device and inode number of a file, or None if the file does not exist."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
