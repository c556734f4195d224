"""`titanlite watch`: how a run goes, from its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import tyro
from pydantic import Field

from titanlite.config.errors import one_line
from titanlite.config.options import OptionPath, Options, parse
from titanlite.observe.live import RunStatus, View, plain_line
from titanlite.report.run_files import RunFiles
from titanlite.runtime.logging import is_live_terminal, terminal_console


class Watch(Options):
    """Show how a run goes until it ends: state, progress, loss, speed, last events. Of a run that has ended, once.

    Only its files are read, so it can run on another machine. Ctrl-C ends the watching, not the run.
    """

    dir: Annotated[OptionPath, tyro.conf.Positional]
    """The run's output folder."""
    interval: Annotated[float, Field(gt=0, le=86400)] = 1.0
    """Seconds between two looks at the files, a day at most."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: no run has written to the folder."""
    options = parse(Watch, argv, "watch")
    files = RunFiles(options.dir)
    if is_live_terminal():
        _watch_live(files, options.interval)
    else:
        _watch_plainly(files, options.interval)


def _goes_on(status: RunStatus) -> bool:
    return status.state in ("running", "stale")


def _watch_live(files: RunFiles, interval: float) -> None:
    from rich.live import Live

    with Live(View(files.read()), console=terminal_console(), auto_refresh=False) as live:
        live.refresh()
        while _goes_on(files.read()):
            live.refresh()
            time.sleep(interval)
        live.refresh()


def _watch_plainly(files: RunFiles, interval: float) -> None:
    """A line for each change."""
    said, told = "", 0.0
    named: set[str] = set()  # problems
    while True:
        status = files.read()
        for at, text in status.events:
            if at > told:
                told = at
                clock, first_line = time.localtime(at), text.partition("\n")[0]
                print(f"{time.strftime('%Y-%m-%d %H:%M:%S', clock)}  {one_line(first_line)}")
        if (line := plain_line(status)) != said:
            print(line)
            said = line
        for problem in status.problems:
            if problem not in named:
                print(one_line(problem))
        named.update(status.problems)
        if not _goes_on(status):
            break
        time.sleep(interval)
