"""Wait until the output folder of a run is free, and remove it after a start that trained nothing.

Invariant: a start removes only files that it has created, and only empty folders.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.launch.ranks import UNSAVED_STOPS
from titanlite.runtime.folder_lock import LOCK_TIMEOUT, lock_file, lock_folder
from titanlite.runtime.logging import EVENTS_FILE, LOG_FILE, LOGGER_NAME, note

FileId = tuple[int, int] | None
"""Device and inode number, which identify a file even after it was renamed. None: there is no
file.
"""


def run_in_output_folder(run: Run, train: Callable[[], int]) -> int:
    """Call `train` as soon as no other run uses the output folder of `run`.

    If this start creates the output folder, and then fails validation or is stopped before there is
    anything to keep, the files and folders that it has created are removed again.

    Args:
        run: The run to train.
        train: Trains the run, and returns the exit code.

    Returns:
        The exit code that `train` returns.

    Raises:
        UserError: If `train` raises it, or another run does not release the folder in time.
    """
    folder = run.dump_folder
    new_folders = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    created_files = _wait_for_locks(run)
    if not new_folders:
        return train()

    created_files |= _create_logs(folder)
    try:
        exit_code = train()
    except UserError as error:
        is_invalid_job = error.exit_code == UserError.exit_code
        if is_invalid_job:
            _remove_unused(run, new_folders, created_files)
        raise
    if exit_code in (UserError.exit_code, *UNSAVED_STOPS):
        _remove_unused(run, new_folders, created_files)
    return exit_code


def _wait_for_locks(run: Run) -> dict[Path, FileId]:
    """Wait until rank 0 can lock the output folder and the checkpoint folder.

    The function releases the locks again, because rank 0 takes them itself.

    Returns:
        The lock files and their IDs, so that the files can be removed later.
    """
    lock_targets = [run.dump_folder / "run"]
    if run.job.checkpoint.enable:
        lock_targets.append(run.checkpoint_folder)

    files: dict[Path, FileId] = {}
    for target in lock_targets:
        descriptor = lock_folder(target, LOCK_TIMEOUT, note)
        if descriptor is not None:
            os.close(descriptor)  # releases the lock
        file = lock_file(target)
        files[file] = _file_id(file)
    return files


def _create_logs(folder: Path) -> dict[Path, FileId]:
    """Create the log files in a new output folder.

    Returns:
        The created files and their IDs. Files that another process has created are left out.
    """
    files: dict[Path, FileId] = {}
    for name in (LOG_FILE, EVENTS_FILE):
        with suppress(FileExistsError):
            (folder / name).touch(exist_ok=False)
            files[folder / name] = _file_id(folder / name)
    return files


def _remove_unused(run: Run, new_folders: Sequence[Path], created: dict[Path, FileId]) -> None:
    """Remove the output folder of a start that has trained nothing, unless something else uses it.

    The folder is kept if another run holds its lock, or if it contains any file that this start has
    not created.

    Args:
        run: The run that this process has started.
        new_folders: Folders that did not exist before the start, innermost first. They are removed
            if they are empty.
        created: Files that this start has created -> their IDs. A file is only removed if its ID is
            unchanged.
    """
    try:
        descriptor = lock_folder(run.dump_folder / "run", 0.0, note)
    except UserError:  # another run has started to use the folder
        return

    try:
        files = [path for path, file_id in created.items() if _file_id(path) == file_id]
        _remove_created(run, files, new_folders)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _remove_created(run: Run, files: Sequence[Path], new_folders: Sequence[Path]) -> None:
    """Remove `files` and the new folders, unless the output folder contains anything else."""
    folder = run.dump_folder
    removable_paths = set(files)
    checkpoints = run.checkpoint_folder
    has_empty_checkpoints = checkpoints.is_dir() and not any(checkpoints.iterdir())
    if has_empty_checkpoints:
        removable_paths.add(checkpoints)
    if not removable_paths.issuperset(folder.iterdir()):
        return

    # Otherwise the error that ends this process would create the log again.
    logging.getLogger(LOGGER_NAME).handlers.clear()
    for path in files:
        if path.parent == folder:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # another process may have put a file into one of the folders
        if has_empty_checkpoints and checkpoints.parent == folder:
            checkpoints.rmdir()
        for path in new_folders:
            path.rmdir()


def _file_id(path: Path) -> FileId:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
