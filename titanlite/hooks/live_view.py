"""Show a live view of the run below its log on terminals that can move the cursor.

Invariant: A thread creates the view from the output files of the run, so it adds no time to a
training step.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from titanlite.hooks.hook import Hook
from titanlite.report.run_files import read_status
from titanlite.runtime.logging import describe_stop, is_live_terminal

if TYPE_CHECKING:
    from rich.text import Text

    from titanlite.report.view import View
    from titanlite.train.trainer import Trainer


class LiveRun(Hook):
    """Shows the status of the run below the log of rank 0, like `titanlite watch`.

    The status is shown only on terminals that can move the cursor.
    """

    _view: View | None = None

    def built(self, trainer: Trainer) -> None:
        """Keep a reference to the trainer."""
        self._trainer = trainer

    def train_begins(self, step: int) -> None:
        """Start a thread that draws the status every two seconds, on rank 0 only."""
        if self._trainer.rank != 0 or not is_live_terminal():
            return
        from titanlite.report.view import View

        self._view = View(get_renderable=self._render, refresh_per_second=0.5, transient=True)
        self._view.start(refresh=True)

    def _render(self) -> Text:
        """Return the text to show: the status of the run and the received stop signal, if any."""
        text = read_status(self._trainer.run.dump_folder).to_text()
        number = self._trainer.stop_signals.stop_signal
        if number:
            text.append(f"\n{describe_stop(number)}")
        return text

    def ended(self, step: int, stopped: str) -> None:
        """Remove the status from the terminal."""
        self._remove()

    def failed(self, error: BaseException) -> None:
        """Remove the status from the terminal, so that it does not cover the error message."""
        self._remove()

    def _remove(self) -> None:
        """Stop the thread and remove the status from the terminal, if it is shown."""
        if self._view is not None:
            with contextlib.suppress(OSError):  # the terminal may have been closed
                self._view.stop()
