"""`titanlite report`: one page about one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from titanlite.config.errors import UserError
from titanlite.config.options import OptionPath, Options, parse
from titanlite.report.page import make_page
from titanlite.report.recorded import read_run


class Report(Options):
    """Write one HTML page about one or several runs, which needs no network and can be sent to others.

    It has the curves, events, checkpoints, configuration, environment and data of each run, and what differs.
    """

    dirs: Annotated[list[OptionPath], tyro.conf.Positional, Field(min_length=1, max_length=50)]
    """Output folders of runs, 50 at most."""
    out: OptionPath = Path("report.html")
    """The page. A file of this name is replaced."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: no run has written to a folder, or the page cannot be written."""
    options = parse(Report, argv, "report")
    page = make_page([read_run(folder) for folder in options.dirs]).encode()
    try:
        options.out.expanduser().write_bytes(page)
    except OSError as error:
        raise UserError(f"--out {options.out}: cannot be written: {error.strerror}. Name another file.") from None
    print(f"{options.out}: {len(page) / 1e6:.1f} MB. Open it in a browser.")
