"""Stopping all ranks at the same step when a signal reaches any of them.

Invariant: every rank sees the same answer at the same step, and none waits for it: a step reads what the ranks said
during the step before. May import torch.
"""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopSignal:
    """Catches SIGINT and SIGTERM. A second one has its usual effect at once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Install the handlers; `group` must carry CPU tensors."""
        self._group = group
        self._received = 0
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def agreed(self) -> str | None:
        """The name of a signal that some rank had received at the last call, on all ranks alike; else None.

        A collective: call it once a step. The CPU all-reduce overlaps with the step that follows.
        """
        answer = self.wait()
        flag = torch.tensor(self._received, dtype=torch.int32)
        self._pending = (flag, dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True))
        return answer

    def wait(self) -> str | None:
        """Finish the exchange that is under way and give its answer."""
        if self._pending is None:
            return None
        (flag, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        return signal.Signals(int(flag)).name if int(flag) else None
