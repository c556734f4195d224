"""What a run measures: numbers are collected on the device, and read on a step that is logged.

Invariant (no host sync in the step): `record` keeps device tensors and never reads them. Only `read` reads them, on a
log step and with one transfer. Times are those of the host, so taking them waits for nothing.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from titanlite.config.run import Run
from titanlite.observe.flops import flops_per_token
from titanlite.observe.gpus import GIB, peak_flops
from titanlite.observe.logged_step import LoggedStep

Part = Literal["data", "forward_backward", "optimizer", "checkpoint"]


class Meter:
    """Collects on the device, reads on log steps.

    Attributes:
        tokens: Number of tokens trained on up to the last logged step. Who resumes a run sets it before `start`.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._device = run, device
        self._peak_flops = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._flops_per_token = flops_per_token(run.arch, run.job.training.seq_len)
        self._total_steps = run.job.training.steps
        self._max_norm = run.job.training.max_norm or float("inf")
        self.tokens = 0
        self.start(0)

    def start(self, step: int) -> None:
        """Begin to measure after `step`, the last one of the checkpoint that was loaded, or 0."""
        self._start_time = time.perf_counter()
        self._first_step = step + 1
        self._warm: tuple[int, float] | None = None  # step and time of the first line, whose steps warm up
        self._begin_window(step, self._start_time)

    def _begin_window(self, step: int, now: float) -> None:
        self._window_step, self._window_start = step, now  # the last step before the window, and its end
        self._grad_norm: Tensor | None = None
        self._clipped: int | Tensor = 0
        self._window_tokens: int | Tensor = 0
        self._seconds = dict.fromkeys(get_args(Part), 0.0)

    def is_log_step(self, step: int) -> bool:
        """Whether to log: every `metrics.log_freq` steps, the first step after a start, and the last step of the
        run."""
        return step % self._run.job.metrics.log_freq == 0 or step in (self._first_step, self._total_steps)

    @property
    def data_seconds(self) -> float:
        """This rank's wait for its data since the last line."""
        return self._seconds["data"]

    @contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """The host's time in here belongs to a part of the step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - began

    def record(self, grad_norm: Tensor, num_tokens: Tensor, seconds: Mapping[Part, float]) -> None:
        """Record one step. Nothing is read from the device.

        Args:
            grad_norm: Scalar, a plain tensor.
            num_tokens: Number of tokens of the global batch.
            seconds: Times of parts of the step that `timing` has not seen.
        """
        self._grad_norm = grad_norm.detach()
        self._clipped = self._clipped + (self._grad_norm > self._max_norm)
        self._window_tokens = self._window_tokens + num_tokens
        for part, spent in seconds.items():
            self._seconds[part] += spent

    def read(self, step: int, lr: float, losses: Tensor, **more: Any) -> LoggedStep:
        """The numbers of the steps since the last call. Waits for the device.

        Args:
            losses: Loss of the global batch, and the largest of those of the data-parallel ranks.
            more: Fields of `LoggedStep` from other parts, such as utilization and failed_saves.
        """
        assert self._grad_norm is not None, "read() before any record()"
        counts = [torch.as_tensor(count) for count in (self._clipped, self._window_tokens)]
        scalars = [scalar.to(self._device, torch.float64) for scalar in (*losses.unbind(), self._grad_norm, *counts)]
        loss, loss_max, grad_norm, clipped, tokens = torch.stack(scalars).tolist()  # the only wait for the device
        now = time.perf_counter()
        steps, seconds = step - self._window_step, now - self._window_start
        tps_per_device = tokens / seconds / self._run.world_size
        flops = tps_per_device * self._flops_per_token
        self.tokens += int(tokens)
        warm_step, warm_time = self._warm = self._warm or (step, now)
        pace = (now - warm_time) / (step - warm_step) if step > warm_step else seconds / steps
        entry = LoggedStep(
            step=step, loss=loss, loss_max=loss_max, grad_norm=grad_norm, clipped=clipped / steps, lr=lr,
            tokens=self.tokens, tps=tokens / seconds, tps_per_device=tps_per_device, tflops=flops / 1e12,
            mfu=None if self._peak_flops is None else flops / self._peak_flops, step_time=seconds / steps,
            **{f"{part}_time": spent / steps for part, spent in self._seconds.items()},
            other_time=max(0.0, seconds - sum(self._seconds.values())) / steps, elapsed=now - self._start_time,
            time_left=pace * (self._total_steps - step), time=time.time(), **_memory(self._device), **more,
        )  # fmt: skip
        self._begin_window(step, now)
        return entry

    def tokens_so_far(self) -> int:
        """Number of tokens trained on since step 1, for a checkpoint. Waits for the device if the number is there."""
        return self.tokens + int(self._window_tokens)


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
