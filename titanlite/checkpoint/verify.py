"""Read every byte of the checkpoints in a folder and say which ones are good.

Invariant: it changes nothing on the disk, and needs neither torch nor the job file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.archive import check_archives
from titanlite.checkpoint.find import checkpoints_at
from titanlite.checkpoint.index import read_index
from titanlite.config.errors import CheckpointError, Damage


def verify(folder: Path) -> dict[str, Any]:
    """Check a checkpoint, or all in a folder.

    Returns:
        {"folder", "checkpoints": [{"name", "step", "bytes", "state": "good" | "damaged" | "unreadable", "damage":
        [...]}], "unfinished": [names], "set_aside": [names]}

    Raises:
        UserError: there is no such folder.
        CheckpointError: there is no checkpoint.
    """
    paths = checkpoints_at(folder)
    home = Path(os.path.expanduser(folder)).resolve()
    folders = [] if paths == [home] else sorted({path.parent for path in paths})
    rows = []
    for path in paths:
        try:
            damage = step_folders.verify_folder(path) or _damaged_archives(path)
            state = "damaged" if damage else "good"
        except CheckpointError as error:
            damage, state = [str(error)], "unreadable"
        size = step_folders.folder_size(path)
        if not path.exists():  # the run goes on, and has removed it meanwhile
            continue
        name = os.path.relpath(path, home) if folders else path.name
        rows.append({"name": name, "step": step_folders.step_of(path), "bytes": size, "state": state, "damage": damage})
    return {
        "folder": str(folder),
        "checkpoints": rows,
        "unfinished": [path.name for parent in folders for path in step_folders.list_unfinished(parent)],
        "set_aside": [path.name for parent in folders for path in step_folders.list_set_aside(parent)],
    }


def _damaged_archives(path: Path) -> list[str]:
    """A line if a file does not hold the tensors of the index, although its checksum is right."""
    try:
        check_archives(path, read_index(path))
    except Damage as damage:
        return [str(damage)]
    return []
