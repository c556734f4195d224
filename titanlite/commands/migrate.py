"""`titanlite migrate`: a job file of torchtitan's as one of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from titanlite.config.errors import UserError, printable
from titanlite.config.files import read_file, write_whole
from titanlite.config.options import OptionPath, Options, PositionalPath, parse
from titanlite.torchtitan.migrate import Migration
from titanlite.torchtitan.tables import Version

_MOST_BYTES = 1 << 16  # torchtitan's own have 2,000


class Migrate(Options):
    """Turn a job file of torchtitan 0.1 or 0.2, for a Llama, into one of titanlite's. Each key is carried over, or
    named with the reason why it is not. Comments stay in the old file."""

    file: PositionalPath
    """torchtitan's job file (TOML)."""
    out: OptionPath | None = None
    """File to write. Left out: the new file is printed, and the report goes to standard error."""
    overwrite: bool = False
    """Replace the file --out if it exists."""
    torchtitan_version: Version | None = None
    """The version that the file is for. Left out: the keys tell it. Models of 0.2 scale their rotary frequencies, those
    of 0.1 do not."""


def main(argv: Sequence[str]) -> None:
    """`titanlite migrate OLD.toml [--out NEW.toml]`.

    Raises:
        UserError: the file is no job of torchtitan's for a Llama, it has wrong values, or the
            new one exists.
    """
    options = parse(Migrate, argv, "migrate")
    if options.out is not None and os.path.lexists(options.out) and not options.overwrite:
        raise UserError(f"{options.out} exists already. Name another file, or add --overwrite.")
    raw = read_file(options.file, _MOST_BYTES)
    try:
        result = Migration(raw, options.torchtitan_version)
    except UserError as error:
        raise UserError(f"{options.file}: {error}") from None
    if options.out is None:
        print(printable(result.text), end="")  # an escape means the same in TOML
    else:
        write_whole(options.out, result.text.encode())
    print(printable(_report(result, options)), file=sys.stderr if options.out is None else sys.stdout)


def _report(result: Migration, options: Migrate) -> str:
    """What became of each key."""
    where = f"Wrote {options.out}" if options.out else "This job"
    scaled = "are scaled as in Llama 3.1" if result.version == "0.2" else "are not scaled"
    lines = [
        f"{where}: {result.carried} keys as they were; comments stay in {options.file}. It is read as a job of "
        f"torchtitan {result.version}, where rotary frequencies {scaled}."
    ]
    for heading, rows in (
        ("Under another name:", [f"{old} -> {new}" for old, new in result.renamed.items()]),
        ("Added, so that the run stays the same:", [f"{key}  ({why})" for key, why in result.added.items()]),
        ("Left out:", [f"{', '.join(keys)}\n      {reason}" for reason, keys in result.lost.items()]),
    ):
        lines += ["", heading, *(f"  {row}" for row in rows)] if rows else []
    return "\n".join([*lines, "", f"Now: titanlite check --job.config_file {options.out or 'NEW.toml'} --world-size N"])
