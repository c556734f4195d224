"""`titanlite report`: one page about one or several runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from titanlite.config.errors import UserError
from titanlite.config.files import write_whole
from titanlite.config.options import OptionPath, Options, parse
from titanlite.report.page import make_page


class Report(Options):
    """Write one HTML page about one or several runs, which needs no network and can be sent to others.

    It has the curves, events, samples, configuration and environment of each run, and what differs.
    """

    dirs: Annotated[list[OptionPath], tyro.conf.Positional, Field(max_length=50)]
    """Output folders of runs, 50 at most."""
    out: OptionPath = Path("report.html")
    """The page."""
    overwrite: bool = False
    """Replace the file --out if it exists."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: no run has written to a folder, or the page cannot be written."""
    options = parse(Report, argv, "report")
    if not options.dirs:
        raise UserError("titanlite report DIR ...: name the output folders of runs, which `titanlite runs` lists.")
    if os.path.lexists(options.out) and not options.overwrite:
        raise UserError(f"--out {options.out}: is there already. Name another file, or add --overwrite.")
    page = make_page([*{path.resolve(): path for path in options.dirs}.values()]).encode()  # each once
    write_whole(options.out, page)
    print(f"{options.out}: {len(page) / 1e6:.1f} MB. Open it in a browser.")
