"""`titanlite watch`: how a run goes, from its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

import tyro
from pydantic import Field

from titanlite.config.errors import one_line
from titanlite.config.options import OptionPath, Options, parse
from titanlite.observe.live import RunStatus, View, plain_line
from titanlite.report.run_files import read_status
from titanlite.runtime.logging import is_live_terminal


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
    from rich.live import Live

    options, said = parse(Watch, argv, "watch"), list[str]()
    status = read_status(options.dir)
    with Live(auto_refresh=False) if is_live_terminal() else nullcontext() as live:
        while True:
            if live is not None:
                live.update(View(status), refresh=True)
            else:
                lines = _lines(status)
                for line in lines:
                    if line not in said:
                        print(line)
                said = lines
            if status.state not in ("running", "stale"):
                break
            time.sleep(options.interval)
            status = read_status(options.dir)


def _lines(status: RunStatus) -> list[str]:
    """The last events, the numbers, and what cannot be read."""
    clocks = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at, _ in status.events]
    events = [one_line(text.partition("\n")[0]) for _, text in status.events]
    told = [f"{clock}  {event}" for clock, event in zip(clocks, events, strict=True)]
    return [*told, plain_line(status), *map(one_line, status.problems)]
