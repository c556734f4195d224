"""`titanlite verify DIR`: read every byte of the checkpoints in a folder and say which ones are good.

Invariant: it changes nothing on the disk, and needs neither torch nor the job file. May import commit and config.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.checkpoint import commit
from titanlite.config.errors import CheckpointError
from titanlite.config.load import path_name


def main(argv: Sequence[str]) -> None:
    """Run the subcommand.

    Raises:
        CheckpointError: nothing to verify, or a checkpoint is damaged or unreadable; the report is printed before.
    """
    parser = argparse.ArgumentParser(prog="titanlite verify", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dir", type=path_name, metavar="DIR", help="one step folder, or the folder of all checkpoints")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    report = verify(options.dir)
    print(json.dumps(report, indent=2) if options.json else as_text(report))
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
        CheckpointError: there is no checkpoint.
    """
    paths = commit.checkpoints_at(folder)
    single = paths == [folder.resolve()]
    if not paths:
        raise CheckpointError(f"{folder}: no checkpoint here; expected step-... folders, or one such folder")
    rows = []
    for path in paths:
        try:
            damage = commit.verify_folder(path)
            state = "damaged" if damage else "good"
        except CheckpointError as error:
            damage, state = [str(error)], "unreadable"
        size = commit.folder_size(path)
        if not path.exists():  # the run goes on, and has removed it meanwhile
            continue
        rows.append({"name": path.name, "step": commit.step_of(path), "bytes": size, "state": state, "damage": damage})
    return {
        "folder": str(folder),
        "checkpoints": rows,
        "unfinished": [] if single else [path.name for path in commit.list_unfinished(folder)],
        "set_aside": [] if single else [path.name for path in commit.list_set_aside(folder)],
    }


def as_text(report: dict[str, Any]) -> str:
    """The report as lines for a person."""
    lines = []
    for row in report["checkpoints"]:
        lines.append(f"{row['name']}  {row['bytes'] / 1e9:10.3f} GB  {row['state']}")
        lines += [f"    {damage}" for damage in row["damage"]]
    lines += [f"{name}  unfinished, removed at the next start" for name in report["unfinished"]]
    lines += [f"{name}  set aside earlier" for name in report["set_aside"]]
    return "\n".join(lines)
