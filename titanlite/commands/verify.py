"""`titanlite verify`: reads checkpoints and says which ones are good."""

from __future__ import annotations

import json
from collections.abc import Sequence

from titanlite.checkpoint.find import verify
from titanlite.config.errors import CheckpointError, printable
from titanlite.config.options import AsJson, Options, PositionalPath, parse


class Verify(Options):
    """Read every byte of the checkpoints in a folder and say which ones are good."""

    dir: PositionalPath
    """One step folder, the folder of all checkpoints, or a run's output folder."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand.

    Raises:
        CheckpointError: nothing to verify, or a checkpoint is damaged or unreadable; the report is printed before.
    """
    options = parse(Verify, argv, "verify")
    report = verify(options.dir)
    if options.as_json:
        print(json.dumps(report, indent=2))
    else:
        for row in report["checkpoints"]:
            lines = [f"{row['name']}  {row['bytes'] / 1e9:10.3f} GB  {row['state']}", *row["damage"]]
            print(printable("\n    ".join(lines)))
        for name in report["unfinished"]:
            print(printable(f"{name}  unfinished, removed at the next start"))
        for name in report["set_aside"]:
            print(printable(f"{name}  set aside earlier"))
    if bad := [row["name"] for row in report["checkpoints"] if row["state"] != "good"]:
        share = f"{len(bad)} of {len(report['checkpoints'])} checkpoints"
        raise CheckpointError(f"{share} damaged or unreadable: {', '.join(bad)}")
