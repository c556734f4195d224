"""`titanlite report`: write a page about runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from titanlite.config.errors import UserError
from titanlite.config.files import write_output
from titanlite.config.options import OptionPath, Options, parse_options
from titanlite.report.page import make_page


class Report(Options):
    """Write a single HTML page about one or more runs, which can be viewed offline and shared.

    It shows the curves, events, samples, configuration and environment of each run, and their
    differences.
    """

    dirs: Annotated[
        list[OptionPath],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="DIR...", help_behavior_hint="(required)"),
        Field(max_length=50),
    ]
    """Output folders of up to 50 runs."""
    out: OptionPath = Path("report.html")
    """File to write."""
    overwrite: bool = False
    """Replace the file if it exists."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite report`: write an HTML page about one or more runs.

    Raises:
        UserError: If a folder contains no run, or the page cannot be written.
    """
    options = parse_options(Report, argv, "report")
    out = options.out
    if not options.dirs:
        raise UserError(
            "titanlite report DIR ...: pass output folders of runs, which `titanlite runs` lists."
        )
    if os.path.lexists(out) and not options.overwrite:
        raise UserError(f"--out {out}: already exists. Choose another file, or add --overwrite.")

    # A folder that is passed twice, even under different paths, appears only once on the page.
    unique_folders = {path.resolve(): path for path in options.dirs}.values()
    page = make_page(list(unique_folders)).encode()
    write_output(out, page)
    print(f"Wrote {out} ({len(page) / 1e6:.1f} MB). Open it in a browser.")
