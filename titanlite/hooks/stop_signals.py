"""Signals that reach one rank: all ranks stop or save at the same step."""

from __future__ import annotations

from titanlite.hooks.hook import Hook, Request
from titanlite.runtime.signals import Signals


class StopSignals(Hook):
    """Catches signals from when `Trainer.train` begins."""

    def __init__(self) -> None:
        self._signals = Signals()

    def train_begins(self, step: int) -> None:
        self._signals.catch()

    def wants(self, step: int) -> Request:
        return Request(stop=self._signals.stop, save=self._signals.take_save())

    def stopping(self) -> int:
        return self._signals.stop

    def act(self, step: int, asked: Request) -> None:
        if asked.save:  # it also serves ranks that got the signal after they were asked
            self._signals.take_save()
