"""`titanlite watch`: how a run goes, from its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

from titanlite.config.options import Options, PositionalPath, parse
from titanlite.report.run_files import read_status
from titanlite.runtime.logging import is_live_terminal


class Watch(Options):
    """Show how a run goes until it ends: state, progress, loss, speed, last events. Of a run that has ended, once.

    Only its files are read, so it can run on another machine. Ctrl-C ends the watching, not the run.
    """

    dir: PositionalPath
    """The run's output folder."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: no run has written to the folder."""
    from titanlite.report.view import View

    folder, said = parse(Watch, argv, "watch").dir, list[str]()
    with View(auto_refresh=False) if is_live_terminal() else nullcontext() as live:
        while True:
            status = read_status(folder)
            if live is not None:
                live.update(status.text(), refresh=True)
            else:
                lines = status.lines()
                for line in lines:
                    if line not in said:
                        print(line)
                said = lines
            if status.state not in ("running", "stale"):
                return
            time.sleep(1.0)
