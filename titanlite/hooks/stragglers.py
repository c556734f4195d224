"""Find stragglers: ranks that are slower than the others and make them wait.

Invariant: Detection never delays training. The times of all ranks are exchanged asynchronously and
read at the next log step.

The time of a whole step is the same on all ranks, because each rank waits for the slowest one in
the collectives of the forward and backward passes. Therefore, the ranks compare three times in
which a rank does not wait for any other rank:

- the time spent waiting for data,
- the time of the optimizer update, which is long if memory is slow or the CPU is busy,
- the time of a matrix product, which is long if the device computes slowly, for example because it
  is hot. Each rank measures it at each log step, when its device is idle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.hooks.hook import Hook
from titanlite.optim.clip import StepSums
from titanlite.runtime.logging import Event

if TYPE_CHECKING:
    from titanlite.train.trainer import Trainer

SLOW_FACTOR = 1.2
"""A rank is slow if its time exceeds this multiple of the median over all ranks."""
STEPS_UNTIL_REPORT = 3
"""Number of consecutive log steps until a slow rank is reported. Any rank can be slow once."""
NUM_PRODUCTS = 5


class TimedPart(NamedTuple):
    """An operation whose duration is compared between ranks, such as waiting for data."""

    description: str
    """Text for the log, with a placeholder for the seconds."""
    min_difference: float
    """Smallest difference from the median, in seconds, that noticeably delays training."""


PARTS = (
    TimedPart("waits for its data {:.3g} s a step", 1e-3),
    TimedPart("needs {:.3g} s a step for updates", 1e-3),
    TimedPart("takes {:.3g} s for a matrix product", 0.0),
)


class Stragglers(Hook):
    """Logs stragglers: ranks that are by far the slowest in three consecutive log steps.

    The ranks compare times that exclude waiting for other ranks: waiting for data, the optimizer
    update, and a matrix product.
    """

    def built(self, trainer: Trainer) -> None:
        """Allocate the tensor that receives the times of all ranks."""
        self._trainer = trainer
        self._device = trainer.device
        self._is_cuda = trainer.device.type == "cuda"
        self._all_gather: dist.Work | None = None  # the newest one
        # Row r receives the times of rank r.
        self._times_of_ranks = torch.zeros(
            trainer.run.world_size, len(PARTS), device=trainer.device
        )
        # Start and end times of each optimizer update since the last log step.
        self._updates: list[tuple[Any, Any]] = []
        # By part and rank: in how many consecutive log steps, up to the last one, the rank was
        # slow in this part. Ranks that were not slow at the last log step are omitted.
        self._streaks: dict[tuple[TimedPart, int], int] = {}

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Record the start of the optimizer update."""
        self._update_start = self._now()

    def updated(self, step: int) -> None:
        """Record the end of the optimizer update."""
        self._updates.append((self._update_start, self._now()))

    def numbers(self, step: int) -> Mapping[str, Any]:
        """Log stragglers up to the previous log step, and start to gather times of all ranks.

        All ranks must call this together. The all-gather runs in the background. The next call, at
        the next log step, evaluates its result.

        Returns:
            An empty dictionary, because this hook adds no metrics.
        """
        if self._all_gather is not None:
            self._all_gather.wait()
            self._log_stragglers(step)

        times = torch.tensor(self._measure_times(), device=self._device)
        self._all_gather = dist.all_gather(list(self._times_of_ranks), times, async_op=True)
        return {}

    def _measure_times(self) -> list[float]:
        """Return three times in seconds that show how fast this rank is.

        Returns:
            - Waiting for data, mean per step since the previous log step.
            - Optimizer update, mean per step since the previous log step.
            - One matrix product, measured now.
        """
        num_steps = len(self._updates)
        product_seconds = self._time_product()
        data_seconds = self._trainer.meter.data_seconds / num_steps
        update_times = [self._seconds_between(start, end) for start, end in self._updates]
        update_seconds = sum(update_times) / num_steps
        self._updates = []
        return [data_seconds, update_seconds, product_seconds]  # in the order of PARTS

    def ended(self, step: int, stopped: str) -> None:
        """Wait for the last all-gather before its process group is destroyed."""
        if self._all_gather is not None:
            self._all_gather.wait()

    def _time_product(self) -> float:
        """Return the time of a matrix product on the idle device of this rank, in seconds.

        This is the minimum over several products, because other processes may delay some of them.
        """
        # Allocate the matrix each time, because training needs the memory between log steps.
        size = 2048 if self._is_cuda else 256
        dtype = torch.bfloat16 if self._is_cuda else torch.float32
        self._synchronize()
        matrix = torch.zeros(size, size, dtype=dtype, device=self._device)

        intervals = []
        for _ in range(NUM_PRODUCTS):
            start = self._now()
            torch.mm(matrix, matrix)
            intervals.append((start, self._now()))
        self._synchronize()  # on a GPU, `_now` records events, which can be read only now
        return min(self._seconds_between(start, end) for start, end in intervals)

    def _synchronize(self) -> None:
        """Wait until the GPU has completed all launched work."""
        if self._is_cuda:
            torch.cuda.synchronize()

    def _now(self) -> Any:
        """Return the current time without a host sync: seconds on a CPU, a CUDA event on a GPU."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two results of `_now`.

        On a GPU, both events must already have completed.
        """
        return start.elapsed_time(end) / 1e3 if self._is_cuda else end - start

    def _log_stragglers(self, step: int) -> None:
        """Compare the received times of all ranks and log stragglers.

        Log a rank when it has been by far the slowest in the same part, such as the update, for
        three consecutive log steps.
        """
        streaks = {}
        times_by_part = self._times_of_ranks.cpu().T  # (parts, ranks)
        for part, times in zip(PARTS, times_by_part, strict=True):
            # Compare the slowest rank with the median. Only this rank can be a straggler.
            slowest_rank = int(times.argmax())
            seconds = times[slowest_rank].item()
            median = times.quantile(0.5).item()
            is_slow = seconds > SLOW_FACTOR * median and seconds > median + part.min_difference
            if not is_slow:
                continue

            # Count for how many consecutive log steps it has been slow.
            streak = self._streaks.get((part, slowest_rank), 0) + 1
            streaks[part, slowest_rank] = streak
            if streak == STEPS_UNTIL_REPORT:  # log a longer streak only once
                text = self._describe_straggler(slowest_rank, part, seconds, median)
                self._trainer.log(Event(text, "straggler", step))
        self._streaks = streaks  # all other streaks have ended

    def _describe_straggler(self, rank: int, part: TimedPart, seconds: float, median: float) -> str:
        """Return the log line for a slow rank, with its time and the median time of all ranks.

        Args:
            rank: The slow rank.
            part: Part of the step in which it is slow.
            seconds: Time of this rank in seconds.
            median: Median time of all ranks in seconds.
        """
        return (
            f"Rank {rank} ({self._trainer.hosts[rank]}) {part.description.format(seconds)} "
            f"and makes the other ranks wait. The median of all ranks is {median:.3g} s."
        )
