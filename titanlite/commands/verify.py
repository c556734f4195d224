"""`titanlite verify`: check checkpoints for damage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.checkpoint.find import verify
from titanlite.config.errors import CheckpointError, printable
from titanlite.config.options import AsJson, Options, PositionalPath, parse_options


class Verify(Options):
    """Read every byte of the checkpoints in a folder, and report which ones are damaged."""

    dir: PositionalPath
    """A step folder, the folder of all steps, or the output folder of a run."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite verify`: read all checkpoints in a folder and print which ones are damaged.

    Raises:
        CheckpointError: If there is no checkpoint, or one is damaged or cannot be read. The report
            is printed first.
    """
    # Read the checkpoints, and print what was found.
    options = parse_options(Verify, argv, "verify")
    report = verify(options.dir)
    if options.as_json:
        print(json.dumps(report, indent=2))
    else:
        print(printable("\n".join(_format_report(report))))

    # Exit with an error if any checkpoint is damaged.
    checkpoints = report["checkpoints"]
    bad = [checkpoint["name"] for checkpoint in checkpoints if checkpoint["state"] != "good"]
    if bad:
        count = f"{len(bad)} of {len(checkpoints)} checkpoints"
        raise CheckpointError(f"{count} damaged or unreadable: {', '.join(bad)}")


def _format_report(report: Mapping[str, Any]) -> list[str]:
    """Format each checkpoint as a line with its state, followed by a line for each damaged file.

    The last lines list interrupted saves and removals, and damaged checkpoints that were renamed.

    Args:
        report: Result of `titanlite.checkpoint.find.verify`.
    """
    lines = []
    for checkpoint in report["checkpoints"]:
        size = f"{checkpoint['bytes'] / 1e9:10.3f} GB"
        lines.append(f"{checkpoint['name']}  {size}  {checkpoint['state']}")
        lines += [f"    {damage}" for damage in checkpoint["damage"]]
    lines += [f"{name}  unfinished, removed at the next start" for name in report["unfinished"]]
    lines += [f"{name}  set aside earlier" for name in report["set_aside"]]
    return lines
