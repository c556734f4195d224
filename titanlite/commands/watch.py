"""`titanlite watch`: how a run goes, from its files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
    with ExitStack() as stack:
        show = _live(files, stack) if is_live_terminal() else _PlainLines()
        while True:
            status = files.read()
            show(status)
            if status.state not in ("running", "stale"):
                break
            time.sleep(options.interval)


def _live(files: RunFiles, stack: ExitStack) -> Callable[[RunStatus], None]:
    """Draws the view of a terminal anew; it shows the status object that `files` returns each time."""
    from rich.live import Live

    live = stack.enter_context(Live(View(files.read()), console=terminal_console(), auto_refresh=False))
    return lambda _status: live.refresh()


class _PlainLines:
    """Prints a line for each change: events, numbers, and what cannot be read."""

    def __init__(self) -> None:
        self._last_event, self._said = 0.0, set[str]()

    def __call__(self, status: RunStatus) -> None:
        for at, text in status.events:
            if at > self._last_event:
                self._last_event, clock = at, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
                print(f"{clock}  {one_line(text.partition(chr(10))[0])}")
        lines = {plain_line(status): None, **dict.fromkeys(map(one_line, status.problems))}
        for line in lines:
            if line not in self._said:
                print(line)
        self._said = set(lines)
