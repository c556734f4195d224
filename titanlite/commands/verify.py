"""`titanlite verify`: reads checkpoints and says which ones are good."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from titanlite.checkpoint.find import verify
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
        share = f"{len(bad)} of {len(report['checkpoints'])} checkpoints"
        raise CheckpointError(f"{share} damaged or unreadable: {', '.join(bad)}")


def as_text(report: dict[str, Any]) -> str:
    """The report as lines for a person."""
    lines = []
    for row in report["checkpoints"]:
        lines.append(f"{row['name']}  {row['bytes'] / 1e9:10.3f} GB  {row['state']}")
        lines += [f"    {damage}" for damage in row["damage"]]
    lines += [f"{name}  unfinished, removed at the next start" for name in report["unfinished"]]
    lines += [f"{name}  set aside earlier" for name in report["set_aside"]]
    return printable("\n".join(lines))
