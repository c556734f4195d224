"""Handle signals that stop or save a run.

If any rank receives a signal, all ranks react to it after the same step.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from titanlite.hooks.hook import Hook, Request
from titanlite.runtime.process import stop_signals


class StopSignals(Hook):
    """Records the signals that this process receives until the training loop reads them.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 stop the run after a save. SIGUSR2 saves a checkpoint and
    continues the run. After a signal that stops the run, the next SIGINT ends the process
    immediately. A second SIGTERM does not, because both the scheduler and the launcher may send
    one.

    Attributes:
        stop_signal: Number of the last signal that stops the run, or 0.
    """

    def __init__(self) -> None:
        """Initialize the recorder without any signal. `train_begins` installs the handlers."""
        self.stop_signal = 0
        self._has_save_signal = False
        self._previous_handlers: dict[int, Any] = {}

    def train_begins(self, step: int) -> None:
        """Install handlers for all signals that stop the run or save a checkpoint.

        Do nothing outside the main thread, because Python can set handlers only there.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (*stop_signals(), signal.SIGUSR2):
            handler = signal.signal(number, self._receive)
            # If `train` is called again, keep the handlers from before the first call.
            self._previous_handlers.setdefault(number, handler)

    def restore_handlers(self) -> None:
        """Restore the signal handlers that `train_begins` replaced.

        Do nothing outside the main thread, because Python can set handlers only there.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._previous_handlers.items():
            if handler is not None:  # None: C code has set it, and Python cannot restore it
                signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        """Record a signal, so that `wants` can later request a stop or a save.

        After a signal that stops the run, let the next SIGINT end the process immediately.
        """
        if number == signal.SIGUSR2:
            self._has_save_signal = True
            return
        self.stop_signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def wants(self, step: int) -> Request:
        """Return a request to stop or to save, depending on the signals that this process received.

        After a signal that stops the run, such as SIGTERM, every call requests a stop. After
        SIGUSR2, only the first call requests a save.
        """
        request = Request(stop=self.stop_signal, save=self._has_save_signal)
        if request.save:  # otherwise, keep a signal that arrived after the flag was read
            self._has_save_signal = False
        return request

    def saving(self, step: int) -> None:
        """Clear a pending save request from SIGUSR2, because this save fulfills it."""
        self._has_save_signal = False
