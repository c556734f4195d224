"""A progress bar for a user at a terminal.

Invariant: it shows what the trainer passes to it and never reads a tensor.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from titanlite.runtime.logging import terminal_console


class ProgressBar:
    """Step, loss, tokens/s and time left, below the log lines; a context manager.

    It does nothing unless standard output is a terminal and `rank` is 0.

    Args:
        total_steps: steps of the whole run.
        resumed_step: steps already done by earlier runs.
    """

    def __init__(self, total_steps: int, resumed_step: int, rank: int) -> None:
        self._progress = None
        if rank == 0 and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[status]}"),
                console=terminal_console(),
                refresh_per_second=4,
                transient=True,
            )
            self._task = self._progress.add_task("step", total=total_steps, completed=resumed_step, status="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, step: int, status: str | None = None) -> None:
        """Move to `step`. `status` (`MetricsRecorder.status()`, on log steps) is shown until the next one."""
        if self._progress is None:
            return
        if status is None:
            self._progress.update(self._task, completed=step)
        else:
            self._progress.update(self._task, completed=step, status=status)
