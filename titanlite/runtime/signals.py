"""Signals that reach one rank, obeyed by all ranks at the same step.

Invariant: every rank sees the same requests at the same step, and none waits for them: a step reads what the ranks
said during the step before.
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
    """What is asked of the run: to save and stop (the name of the signal that did), to save and go on, or to end
    because some rank cannot read its data further."""

    stop: str | None = None
    save: bool = False
    data_fails: bool = False


def end_at_once(say: Callable[[str], None]) -> None:
    """Let a signal that stops a run end this process with 128 plus its number, once `say` was told its name. For the
    time before `Signals` takes them, because there is nothing to save yet."""

    def end(number: int) -> None:
        say(signal.Signals(number).name)
        leave(128 + number)

    def receive(number: int, _frame: FrameType | None) -> None:
        _catch(STOP_SIGNALS, signal.SIG_IGN)
        # Not in this thread: the signal may have interrupted it in the middle of a line.
        threading.Thread(target=end, args=(number,)).start()

    _catch(STOP_SIGNALS, receive)


def _catch(numbers: Iterable[signal.Signals], handler: Handler) -> None:
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, handler)


class Signals:
    """Catches SIGINT, SIGTERM, SIGHUP and SIGUSR1 (stop) and SIGUSR2 (save). A SIGINT after one of the first ends at
    once. A further SIGTERM does not, because a scheduler's comes twice: once passed on by the launcher."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Install the handlers; `group` must carry CPU tensors."""
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

    def agreed(self, data_fails: bool) -> Requests:
        """What some rank had been asked, or had said by `data_fails`, at the last call; on all ranks alike.

        A collective: call it once a step. The CPU all-reduce overlaps with the step that follows.
        """
        answer = self.wait()
        if answer.save:  # about to happen: it serves whoever was asked since, such as a rank that heard a step later
            self._save = 0
        flags = torch.tensor([self._stop, self._save, data_fails], dtype=torch.int32)
        self._save = 0
        self._pending = (flags, dist.all_reduce(flags, dist.ReduceOp.MAX, self._group, async_op=True))
        return answer

    def wait(self) -> Requests:
        """Finish the exchange that is under way and give its answer."""
        if self._pending is None:
            return Requests()
        (flags, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        stop, save, data_fails = flags.tolist()
        return Requests(signal.Signals(stop).name if stop else None, bool(save), bool(data_fails))
