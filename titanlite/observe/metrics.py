"""What a run measures: numbers are collected on the device, and go to the writers on a step that is logged.

Invariant (no host sync in the step): `record` keeps device tensors and never reads them. Only `log` reads them, on a
log step and with one transfer. Times are those of the host, so taking them waits for nothing.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from titanlite.config.run import Run
from titanlite.observe.flops import flops_per_token
from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.writers import LOGGER, Writer
from titanlite.runtime.logging import failed_writes

GIB = 2**30

Part = Literal["data", "forward_backward", "optimizer", "checkpoint"]


class MetricsRecorder:
    """Collects on the device, reads on log steps.

    Args:
        writers: where the numbers go. Each is called once for each logged step.
        device: the device of the recorded tensors. Its memory is reported.
        peak_flops: FLOP/s of one device. None if it is unknown; then there is no MFU.
        resumed_step: last step of the checkpoint that was loaded, 0 for a fresh start.
        tokens: number of tokens trained on up to `resumed_step`.

    Attributes:
        latest: numbers of the last logged step, as host floats that can be NaN or infinite.
        memory_peak: GiB, the highest of all logged steps.
        pace: seconds of a step, the mean since the first logged one, whose steps warm up.
    """

    def __init__(
        self,
        run: Run,
        writers: Sequence[Writer],
        device: torch.device,
        peak_flops: float | None,
        resumed_step: int = 0,
        tokens: int = 0,
    ) -> None:
        self._run, self._writers, self._device = run, writers, device
        self._peak_flops = peak_flops
        self._flops_per_token = flops_per_token(run.arch, run.job.training.seq_len)
        self._total_steps = run.job.training.steps
        self._max_norm = run.job.training.max_norm or float("inf")
        self._first_step = resumed_step + 1
        self._tokens_before = tokens  # up to the last logged step
        self.latest: LoggedStep | None = None
        self.memory_peak = 0.0
        self.pace: float | None = None
        self._failed_writes: Counter[str] = Counter()  # name of a writer -> its failed calls

        self._grad_norm: Tensor | None = None
        self._clipped: int | Tensor = 0
        self._window_tokens: int | Tensor = 0
        self._seconds = _no_seconds()
        self._start_time = self._window_start = time.perf_counter()
        self._window_step = resumed_step  # last step of the previous window
        self._warm: tuple[int, float] | None = None  # step and time of the first line

    def is_log_step(self, step: int) -> bool:
        """Whether to log: every `metrics.log_freq` steps, the first step after a start, and the last step of the
        run."""
        return step % self._run.job.metrics.log_freq == 0 or step in (self._first_step, self._total_steps)

    @contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """The host's time in here belongs to a part of the step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - began

    def record(self, grad_norm: Tensor, num_tokens: int | Tensor, seconds: Mapping[str, float]) -> None:
        """Record one step. Nothing is read from the device.

        Args:
            grad_norm: scalar, a plain tensor.
            num_tokens: number of tokens of the global batch, or an integer tensor if it is on the device.
            seconds: times of parts of the step that `timing` has not seen.
        """
        self._grad_norm = grad_norm.detach()
        self._clipped = self._clipped + (self._grad_norm > self._max_norm)
        self._window_tokens = self._window_tokens + num_tokens
        for part, spent in seconds.items():
            self._seconds[part] += spent

    def log(self, step: int, lr: float, losses: Tensor, **more: Any) -> LoggedStep:
        """Read the recorded tensors and give the numbers to the writers.

        Args:
            losses: loss of the global batch, and the largest of those of the data-parallel ranks.
            more: fields of `LoggedStep` from other parts, such as utilization and failed_saves.
        """
        assert self._grad_norm is not None, "log() before any record()"
        assert step > self._window_step, "logged twice"
        counts = [torch.as_tensor(count) for count in (self._clipped, self._window_tokens)]
        scalars = [scalar.to(self._device, torch.float64) for scalar in (*losses.unbind(), self._grad_norm, *counts)]
        loss, loss_max, grad_norm, clipped, tokens = torch.stack(scalars).tolist()  # the only wait for the device
        now = time.perf_counter()
        steps, seconds = step - self._window_step, now - self._window_start
        tps_per_device = tokens / seconds / self._run.world_size
        flops = tps_per_device * self._flops_per_token
        self._tokens_before += int(tokens)
        memory = _memory(self._device)
        self.memory_peak = max(self.memory_peak, memory["memory_peak"])
        self.latest = LoggedStep(
            step=step,
            loss=loss,
            loss_max=loss_max,
            grad_norm=grad_norm,
            clipped=clipped / steps,
            lr=lr,
            tokens=self._tokens_before,
            tps=tokens / seconds,
            tps_per_device=tps_per_device,
            mfu=None if self._peak_flops is None else flops / self._peak_flops,
            tflops=flops / 1e12,
            **memory,
            step_time=seconds / steps,
            data_time=self._seconds["data"] / steps,
            forward_backward_time=self._seconds["forward_backward"] / steps,
            optimizer_time=self._seconds["optimizer"] / steps,
            checkpoint_time=self._seconds["checkpoint"] / steps,
            other_time=max(0.0, seconds - sum(self._seconds.values())) / steps,
            elapsed=now - self._start_time,
            time_left=self._time_left(step, now, seconds / steps),
            time=time.time(),
            failed_writes=self._failed_writes.total() + failed_writes(),
            **more,
        )
        entry = self.latest
        self._tell(lambda writer: writer.logged(entry))
        self._clipped = self._window_tokens = 0
        self._seconds = _no_seconds()
        self._window_step, self._window_start = step, now
        return entry

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        """Give the score of a validation after `step` to the writers."""
        self._tell(lambda writer: writer.validated(step, score))

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Give completions after `step` to the writers: JSON values with the keys `prompt` and `completion`."""
        self._tell(lambda writer: writer.sampled(step, samples))

    def tokens_so_far(self) -> int:
        """Number of tokens trained on since step 1, for a checkpoint. Waits for the device if the number is there."""
        return self._tokens_before + int(self._window_tokens)

    def close(self) -> None:
        """Let the writers finish."""
        self._tell(lambda writer: writer.close())

    def _tell(self, call: Callable[[Writer], None]) -> None:
        """Call each writer. What a full disk costs is counted, and said once for each writer."""
        for writer in self._writers:
            try:
                call(writer)
            except OSError as error:
                name = type(writer).__name__
                if name not in self._failed_writes:
                    LOGGER.warning(f"Training goes on, but its metrics cannot be written by {name}: {error}")
                self._failed_writes[name] += 1

    def _time_left(self, step: int, now: float, step_time: float) -> float:
        """The time left at the mean pace since the first line, whose steps include compilation and warm-up."""
        if self._warm is None:
            self._warm = (step, now)
        warm_step, warm_time = self._warm
        if step > warm_step:
            self.pace = (now - warm_time) / (step - warm_step)
        return (step_time if self.pace is None else self.pace) * (self._total_steps - step)


def _no_seconds() -> dict[str, float]:
    return dict.fromkeys(get_args(Part), 0.0)


def _memory(device: torch.device) -> dict[str, Any]:
    """The fields of `LoggedStep` about memory. On a GPU, this resets the peaks."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {
            "memory": stats["reserved_bytes.all.peak"] / GIB,
            "memory_peak": stats["allocated_bytes.all.peak"] / GIB,
            "memory_active": stats["active_bytes.all.peak"] / GIB,
            "alloc_retries": stats["num_alloc_retries"],
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    resident, statm = peak, Path("/proc/self/statm")
    if statm.exists():  # outside of Linux only the peak is known
        resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = max(peak, resident)  # because the kernel updates its peak a little late
    return {"memory": resident / GIB, "memory_peak": peak / GIB, "memory_active": None, "alloc_retries": 0}
