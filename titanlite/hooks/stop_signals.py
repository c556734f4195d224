"""Signals that reach one rank: all ranks stop or save at the same step.

SIGINT, SIGTERM, SIGHUP and SIGUSR1 stop the run, SIGUSR2 saves it. A SIGINT after one of the first four ends the
process at once. A further SIGTERM does not, because a scheduler says it twice: the launcher passes it on.
"""

from __future__ import annotations

import signal
from types import FrameType

from titanlite.hooks.hook import Hook, Request
from titanlite.runtime.process import stop_signals


class StopSignals(Hook):
    """Catches signals from when `Trainer.train` begins."""

    def __init__(self) -> None:
        self._stop, self._save = 0, False  # number of the last signal that stops the run; whether one asks for a save

    def train_begins(self, step: int) -> None:
        for number in (*stop_signals(), signal.SIGUSR2):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self._save = True
            return
        self._stop = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def wants(self, step: int) -> Request:
        asked, self._save = self._save, False
        return Request(stop=self._stop, save=asked)

    def stopping(self) -> int:
        return self._stop

    def act(self, step: int, asked: Request) -> None:
        if asked.save:  # it also serves ranks that got the signal after they were asked
            self._save = False
