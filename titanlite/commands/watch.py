"""`titanlite watch`: monitor a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from titanlite.config.options import Options, PositionalPath, parse_options
from titanlite.report.run_files import RunStatus, read_status
from titanlite.runtime.logging import is_live_terminal


class Watch(Options):
    """Show the progress of a run until it ends: state, step, loss, speed and recent events.

    The command only reads the files of the run, so it also works on another node. Ctrl-C does not
    stop the run.
    """

    dir: PositionalPath
    """Output folder of the run."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite watch`: print the progress of a run every second until the run ends.

    A terminal shows a live view. Otherwise, only lines that have changed are printed.

    Raises:
        UserError: If the folder contains no run.
    """
    from titanlite.report.view import View

    folder = parse_options(Watch, argv, "watch").dir
    if is_live_terminal():
        with View(auto_refresh=False) as view:
            for status in _follow(folder):
                view.update(status.to_text(), refresh=True)
        return

    previous_lines: list[str] = []
    for status in _follow(folder):
        lines = status.to_lines()
        for line in lines:
            if line not in previous_lines:
                print(line)
        previous_lines = lines


def _follow(folder: Path) -> Iterator[RunStatus]:
    """Yield the status of a run every second, until the run ends.

    The last status shows how the run ended.
    """
    while True:
        status = read_status(folder)
        yield status
        has_ended = status.state not in ("running", "stale")  # a stale run may still continue
        if has_ended:
            return
        time.sleep(1.0)
