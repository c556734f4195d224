"""Stragglers: a rank for which all others wait, found by what each rank does alone.

Invariant: nobody waits for this. The times of all ranks travel while training goes on, and are read one line later.

The time of a whole step is the same on all ranks, because each waits for the slowest in the collectives of its forward
and backward passes. So three times are compared in which a rank waits for no other: that for its data, that of the
optimizer's update, which is long where memory is slow or the host is busy, and that of a matrix product, which is long
where the device computes slowly, as a hot one does. Each rank computes it by itself at each line, when its device has
nothing else to do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.hooks.hook import Hook, Training
from titanlite.optim.clip import StepSums
from titanlite.runtime.logging import Event

SLOW = 1.2  # times the median of the ranks
LINES = 3  # in a row, because any rank is late now and then
LEAST = (1e-3, 1e-3, 0.0)  # seconds that it must be slower in each step: below that, nobody waits long
PARTS = "waits for its data {:.3g} s a step", "needs for updates {:.3g} s a step", "takes {:.3g} s for a product"


class Stragglers(Hook):
    """Names a rank that is the slowest, and by far, in several logged steps in a row."""

    def built(self, training: Training) -> None:
        self._training, self._cuda = training, training.device.type == "cuda"
        self._work: dist.Work | None = None
        self._times = torch.zeros(training.run.world_size, len(PARTS))
        self._updates: list[tuple[Any, Any]] = []  # begin and end of each since the last line
        self._in_row = [(-1, 0)] * len(PARTS)  # slowest rank, and in how many lines

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        self._began = self._now()

    def updated(self, step: int) -> None:
        self._updates.append((self._began, self._now()))

    def numbers(self, step: int) -> Mapping[str, Any]:
        """Read what the ranks sent with the line before, and send the times since then."""
        if self._work is not None:
            self._work.wait()
            self._compare(step)
        if self._cuda:
            torch.cuda.synchronize()
        side, dtype = (2048, torch.bfloat16) if self._cuda else (256, torch.float32)
        matrix = torch.zeros(side, side, dtype=dtype, device=self._training.device)  # not kept: a step needs the memory
        products = [(self._now(), torch.mm(matrix, matrix), self._now()) for _ in range(5)]
        if self._cuda:
            torch.cuda.synchronize()
        product = min(self._between(a, b) for a, _, b in products)  # others may use the processor for a moment
        spent = sum(self._between(*update) for update in self._updates) / len(self._updates)
        own = torch.tensor([self._training.meter.data_seconds / len(self._updates), spent, product])
        self._updates = []
        group = self._training.mesh.world_group
        self._work = dist.all_gather(list(self._times), own, group, async_op=True)
        return {}

    def ended(self, step: int, stopped: str) -> None:
        if self._work is not None:
            self._work.wait()  # before the group is closed

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._cuda else end - begin

    def _compare(self, step: int) -> None:
        for part, times in enumerate(self._times.unbind(1)):
            slowest, median = int(times.argmax()), times.quantile(0.5).item()
            took = times[slowest].item()
            rank, count = self._in_row[part]
            is_slow = took > SLOW * median and took > median + LEAST[part]
            self._in_row[part] = (slowest, count + 1 if rank == slowest else 1) if is_slow else (-1, 0)
            if self._in_row[part][1] == LINES:
                line = f"Rank {slowest} ({self._training.hosts[slowest]}) {PARTS[part].format(took)}; the median of "
                line += f"the ranks is {median:.3g} s: it makes the others wait."
                self._training.log(Event(line, "straggler", step))
