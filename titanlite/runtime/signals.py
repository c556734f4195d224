"""Signals that reach one rank. The hook `StopSignals` lets all ranks obey them at the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from titanlite.runtime.process import STOP_SIGNALS, leave

SAVE = signal.SIGUSR2
Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def end_at_once(say: Callable[[str], None]) -> None:
    """Let a signal that stops a run end this process with 128 plus its number, after calling `say` with its name.

    This is for the time before `Signals` handles them, because there is nothing to save yet.
    """

    def end(number: int) -> None:
        say(signal.Signals(number).name)
        leave(128 + number)

    def receive(number: int, _frame: FrameType | None) -> None:
        _catch(STOP_SIGNALS, signal.SIG_IGN)
        # In another thread, because the signal may have interrupted this one while it was writing a line.
        threading.Thread(target=end, args=(number,)).start()

    _catch(STOP_SIGNALS, receive)


def _catch(numbers: Iterable[signal.Signals], handler: Handler) -> None:
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, handler)


class Signals:
    """SIGINT, SIGTERM, SIGHUP and SIGUSR1, which stop the run, and SIGUSR2, which saves it.

    A SIGINT after one of the first four ends the process at once. A further SIGTERM does not, because a scheduler's
    SIGTERM comes twice: the launcher passes it on.

    Attributes:
        stop: Number of the last signal that stops the run; 0: none has come.
    """

    def __init__(self) -> None:
        self.stop, self._save = 0, False

    def catch(self) -> None:
        """Install the handlers."""
        _catch((*STOP_SIGNALS, SAVE), self._receive)

    def take_save(self) -> bool:
        """Whether a signal to save has come since the last call."""
        asked, self._save = self._save, False
        return asked

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == SAVE:
            self._save = True
            return
        self.stop = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
