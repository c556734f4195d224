"""The view of a run below its log, on a terminal that can move its cursor.

Invariant: a thread makes it from the files of the run, so that no step does.
"""

from __future__ import annotations

import contextlib
from typing import Any

from titanlite.hooks.hook import Hook, Training
from titanlite.report.run_files import read_status
from titanlite.runtime.logging import STOPPING, is_live_terminal


class LiveRun(Hook):
    """Shows what `titanlite watch` shows, while the run goes on. On rank 0."""

    _live = None

    def __init__(self, training: Training) -> None:
        self._training, self._shows = training, training.rank == 0 and is_live_terminal()

    def train_begins(self, step: int) -> None:
        if self._shows:
            from titanlite.report.view import View

            self._live = View(get_renderable=self._view, refresh_per_second=0.5, transient=True)
            self._live.start(refresh=True)

    def _view(self) -> Any:
        text = read_status(self._training.run.dump_folder).text()
        return text.append(f"\n{STOPPING}") if any(hook.stopping() for hook in self._training.hooks) else text

    def ended(self, step: int, stopped: str) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                self._live.stop()

    def failed(self, error: BaseException) -> None:
        self.ended(0, "")
