"""`titanlite verify DIR`: read every byte of the checkpoints in a folder and say which ones are good.

Invariant: it changes nothing on the disk, and needs neither torch nor the job file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.find import checkpoints_at
from titanlite.config.errors import CheckpointError, printable
from titanlite.config.options import OptionPath, Options, parse


class Verify(Options):
    """Read every byte of the checkpoints in a folder and say which ones are good."""

    dir: Annotated[OptionPath, tyro.conf.Positional]
    """One step folder, the folder of all checkpoints, or a run's output folder."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand.

    Raises:
        CheckpointError: nothing to verify, or a checkpoint is damaged or unreadable; the report is printed before.
    """
    options = parse(Verify, argv, "verify")
    report = verify(options.dir)
    print(json.dumps(report, indent=2) if options.as_json else as_text(report))
    bad = [row["name"] for row in report["checkpoints"] if row["state"] != "good"]
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(report['checkpoints'])} checkpoints damaged or unreadable: {', '.join(bad)}"
        )


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
            damage = step_folders.verify_folder(path)
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


def as_text(report: dict[str, Any]) -> str:
    """The report as lines for a person."""
    lines = []
    for row in report["checkpoints"]:
        lines.append(f"{row['name']}  {row['bytes'] / 1e9:10.3f} GB  {row['state']}")
        lines += [f"    {damage}" for damage in row["damage"]]
    lines += [f"{name}  unfinished, removed at the next start" for name in report["unfinished"]]
    lines += [f"{name}  set aside earlier" for name in report["set_aside"]]
    return printable("\n".join(lines))
