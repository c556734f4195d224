"""`titanlite migrate`: convert a torchtitan job file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from titanlite.config.errors import UserError, printable
from titanlite.config.files import read_file, write_output
from titanlite.config.options import OptionPath, Options, PositionalPath, parse_options
from titanlite.torchtitan.migrate import Migration
from titanlite.torchtitan.tables import Version

_MAX_BYTES = 1 << 19  # job files have about 2,000 bytes, the config of Llama 3 70B has 203,175


class Migrate(Options):
    """Convert a torchtitan job file for Llama 3 or Qwen3.

    Each key is kept, renamed, or left out. The report gives the reason for each omission. Comments
    are not copied.
    """

    file: PositionalPath
    """torchtitan job file (TOML), or resolved config of torchtitan 0.3 (JSON)."""
    out: OptionPath | None = None
    """File to write. Default: print the new file, and print the report to standard error."""
    overwrite: bool = False
    """Replace the file --out if it exists."""
    torchtitan_version: Version | None = None
    """torchtitan version that the file is for. Default: detect it from the keys. Version 0.1 does
    not scale the rotary frequencies of Llama 3, but later versions do."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite migrate`: convert a torchtitan job file, and report what has changed.

    Raises:
        UserError: If the file is not a torchtitan job for a supported model or has invalid values,
            or if the file --out exists.
    """
    options = parse_options(Migrate, argv, "migrate")
    out = options.out
    if out is not None and os.path.lexists(out) and not options.overwrite:
        raise UserError(f"{out} already exists. Choose another file, or add --overwrite.")

    content = read_file(options.file, _MAX_BYTES)
    try:
        migration = Migration(content, options.torchtitan_version)
    except UserError as error:
        raise UserError(f"{options.file}: {error}") from None

    # Without --out, standard output gets the new job file alone, so that it can be redirected.
    report = printable(_format_report(migration, options))
    if out is None:
        print(printable(migration.text), end="")  # escaped characters mean the same in TOML
        print(report, file=sys.stderr)
    else:
        write_output(out, migration.text.encode())
        print(report)


def _format_report(migration: Migration, options: Migrate) -> str:
    """Format the report of a conversion: which keys were renamed, added and left out, and why."""
    name = f"Wrote {options.out}" if options.out else "This job"
    is_scaled = migration.rope_scaling_factor != 1.0
    scaling = "are scaled as in Llama 3.1" if is_scaled else "are not scaled"
    summary = (
        f"{name}: {migration.carried} keys unchanged; comments stay in {options.file}. The file "
        f"was read as a job for torchtitan {migration.version}, where rotary frequencies {scaling}."
    )
    job_file = options.out or "NEW.toml"
    next_step = f"Next: titanlite check --job.config_file {job_file} --world-size N"
    return "\n".join([summary, *_format_changes(migration), "", next_step])


def _format_changes(migration: Migration) -> list[str]:
    """Format the renamed, added and omitted keys, with one section per category."""
    renamed = [f"{old} -> {new}" for old, new in migration.renamed.items()]
    added = [f"{key}  ({reason})" for key, reason in migration.added.items()]
    omitted = [f"{', '.join(keys)}\n      {reason}" for reason, keys in migration.lost.items()]
    return [
        *_format_section("Renamed:", renamed),
        *_format_section("Added to keep the run the same:", added),
        *_format_section("Left out:", omitted),
    ]


def _format_section(heading: str, items: Sequence[str]) -> list[str]:
    """Format a section of a report as an empty line, the heading and one indented line per item.

    If there are no items, return an empty list.
    """
    if not items:
        return []
    return ["", heading, *(f"  {item}" for item in items)]
