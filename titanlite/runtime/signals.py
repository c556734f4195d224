"""Signals that reach one rank. All ranks obey them at the same step.

Invariant: every rank sees the same requests at the same step. No rank waits for them, because a step reads what the
ranks sent during the step before.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from titanlite.runtime.process import STOP_SIGNALS, leave

SAVE = signal.SIGUSR2
Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@dataclass(frozen=True)
class Requests:
    """What the run is asked to do.

    `stop` is the name of a signal: save and stop. `save`: save and go on. `data_fails`: end, because some rank cannot
    read its data. `profile`: profile the next steps.
    """

    stop: str | None = None
    save: bool = False
    data_fails: bool = False
    profile: bool = False


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
    """Catches SIGINT, SIGTERM, SIGHUP and SIGUSR1, which stop the run, and SIGUSR2, which saves it.

    A SIGINT after one of the first four ends the process at once. A further SIGTERM does not, because a scheduler's
    SIGTERM comes twice: the launcher passes it on.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Install the handlers. `group` must support CPU tensors."""
        self._group = group
        self._stop, self._save = 0, 0
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None
        _catch((*STOP_SIGNALS, SAVE), self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == SAVE:
            self._save = 1
            return
        self._stop = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def agreed(self, data_fails: bool, profile: bool = False) -> Requests:
        """What signals, `data_fails` and `profile` of all ranks asked for at the previous call. All ranks get the same
        answer.

        This is a collective: call it once per step. Its all-reduce on the CPU overlaps with the step that follows.
        """
        answer = self.wait()
        if answer.save:  # the save that follows also serves ranks that got the signal after the previous call
            self._save = 0
        flags = torch.tensor([self._stop, self._save, data_fails, profile], dtype=torch.int32)
        self._save = 0
        self._pending = (flags, dist.all_reduce(flags, dist.ReduceOp.MAX, self._group, async_op=True))
        return answer

    def wait(self) -> Requests:
        """Finish the exchange that is in progress and return its answer."""
        if self._pending is None:
            return Requests()
        (flags, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        stop, save, data_fails, profile = flags.tolist()
        return Requests(signal.Signals(stop).name if stop else None, bool(save), bool(data_fails), bool(profile))
