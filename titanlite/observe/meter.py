"""Measure a training run: loss, throughput, time and memory.

Invariant: Measuring a step never waits for the GPU. Only log steps and saves do: `Meter.read`
copies all its values from the GPU with a single host sync, and `Meter.tokens_so_far` reads one
number. All times are measured with the CPU clock.
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
"""Parts of the training loop whose CPU time is measured."""


class Meter:
    """Measures the steps since the previous log step, and returns the metrics as a `LoggedStep`.

    Call `record` after each step, and `read` after each step whose metrics are logged (log step).
    Step times and speeds are means over these steps. Loss, gradient norm and learning rate belong
    to the last step.

    Args:
        run: Run to measure.
        device: Device of this rank.

    Attributes:
        tokens: Number of tokens trained on since step 1, up to the last log step. To resume, set
            it to the value in the checkpoint before you call `start`.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run = run
        self._device = device
        self._peak_flops = None
        if device.type == "cuda":
            self._peak_flops = peak_flops(torch.cuda.get_device_name(device))
        self._flops_per_token = flops_per_token(run.arch, run.job.training.seq_len)
        self._total_steps = run.job.training.steps
        self._max_norm = run.job.training.max_norm or float("inf")
        self.tokens = 0
        self.start(0)

    def start(self, step: int) -> None:
        """Start the clock. All time after this call counts toward the first log step.

        Args:
            step: Step of the loaded checkpoint, or 0 if training starts from scratch.
        """
        self._start_time = time.perf_counter()
        self._first_step = step + 1
        # Step and time of the first log step. The ETA is based on the speed since then, because the
        # steps before it are slower: they compile and allocate.
        self._first_log: tuple[int, float] | None = None
        self._begin_window(step, self._start_time)

    def _begin_window(self, step: int, now: float) -> None:
        """Reset all sums, and start to measure the steps up to the next log step.

        Args:
            step: The previous log step. At the start, the step of the loaded checkpoint, or 0.
            now: Current time, from `time.perf_counter`.
        """
        self._window_step = step
        self._window_start = now
        self._grad_norm: Tensor | None = None
        # These become tensors on the device when the first step is recorded.
        self._num_clipped: int | Tensor = 0
        self._window_tokens: int | Tensor = 0
        self._seconds = dict.fromkeys(get_args(Part), 0.0)

    def is_log_step(self, step: int) -> bool:
        """Return whether the metrics of `step` are logged.

        These are the first step after a start or resume, every `metrics.log_freq` steps, and the
        last step of the run.
        """
        is_first_or_last = step in (self._first_step, self._total_steps)
        return is_first_or_last or step % self._run.job.metrics.log_freq == 0

    @property
    def data_seconds(self) -> float:
        """Seconds that this rank has waited for data since the previous log step."""
        return self._seconds["data"]

    @contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """Measure the time of a `with` block, and add it to the time of `part`, such as "data"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - start

    def record(
        self, grad_norm: Tensor, global_tokens: Tensor, seconds: Mapping[Part, float]
    ) -> None:
        """Add the measurements of an optimizer step, without a host sync.

        Args:
            grad_norm: L2 norm of the gradient before clipping, a scalar tensor.
            global_tokens: Number of valid labels in the global batch, a scalar tensor.
            seconds: CPU seconds of the parts of the step that were not measured with `timing`.
        """
        self._grad_norm = grad_norm.detach()
        self._num_clipped = self._num_clipped + (self._grad_norm > self._max_norm)
        self._window_tokens = self._window_tokens + global_tokens
        for part, part_seconds in seconds.items():
            self._seconds[part] += part_seconds

    def read(self, step: int, lr: float, losses: Tensor, /, **fields: Any) -> LoggedStep:
        """Return the metrics of all steps since the previous log step, and reset the sums.

        This reads all values from the GPU in a single host sync.

        Args:
            step: Number of completed optimizer steps.
            lr: Learning rate of this step.
            losses: Loss of the global batch, and highest loss of any data-parallel rank, shape
                (2,).
            fields: Further fields of `LoggedStep`, measured by the caller, such as
                `token_utilization`.
        """
        loss, loss_max_rank, grad_norm, num_clipped, num_tokens = self._read_scalars(losses)
        now = time.perf_counter()
        num_steps = step - self._window_step
        seconds = now - self._window_start
        tps = num_tokens / seconds
        tps_per_device = tps / self._run.world_size
        flops = tps_per_device * self._flops_per_token
        self.tokens += int(num_tokens)

        if self._first_log is None:
            self._first_log = (step, now)
        first_log_step, first_log_time = self._first_log
        seconds_per_step = seconds / num_steps
        if step > first_log_step:
            seconds_per_step = (now - first_log_time) / (step - first_log_step)

        part_times = {f"{part}_time": total / num_steps for part, total in self._seconds.items()}
        entry = LoggedStep(
            step=step,
            loss=loss,
            loss_max_rank=loss_max_rank,
            grad_norm=grad_norm,
            clip_fraction=num_clipped / num_steps,
            lr=lr,
            tokens=self.tokens,
            tps=tps,
            tps_per_device=tps_per_device,
            tflops=flops / 1e12,
            mfu=None if self._peak_flops is None else flops / self._peak_flops,
            step_time=seconds / num_steps,
            **part_times,
            other_time=max(0.0, seconds - sum(self._seconds.values())) / num_steps,
            elapsed=now - self._start_time,
            eta=seconds_per_step * (self._total_steps - step),
            time=time.time(),
            **_read_memory(self._device),
            **fields,
        )
        self._begin_window(step, now)
        return entry

    def _read_scalars(self, losses: Tensor) -> list[float]:
        """Copy the losses and all recorded tensors from the GPU with a single host sync.

        Args:
            losses: Loss of the global batch, and highest loss of any data-parallel rank, shape
                (2,).

        Returns:
            Both losses, the gradient norm of the last step, the number of steps with a clipped
            gradient, and the number of tokens. The last two count from the previous log step.
        """
        assert self._grad_norm is not None, "read() before any record()"
        values = [*losses.unbind(), self._grad_norm, self._num_clipped, self._window_tokens]
        scalars = [torch.as_tensor(value).to(self._device, torch.float64) for value in values]
        return torch.stack(scalars).tolist()

    def tokens_so_far(self) -> int:
        """Return the number of tokens trained on since step 1, across restarts.

        This waits for the GPU.
        """
        return self.tokens + int(self._window_tokens)


def _read_memory(device: torch.device) -> dict[str, Any]:
    """Measure the memory use of this rank, and reset the peak counters if it uses a GPU.

    Returns:
        The fields of `LoggedStep` that describe memory. Sizes are in GiB.
    """
    if device.type != "cuda":
        return _read_process_memory()

    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory": stats["reserved_bytes.all.peak"] / GIB,
        "memory_peak": stats["allocated_bytes.all.peak"] / GIB,
        "memory_active": stats["active_bytes.all.peak"] / GIB,
        "alloc_retries": stats["num_alloc_retries"],
    }


def _read_process_memory() -> dict[str, Any]:
    """Measure the CPU memory of this process.

    Returns:
        The fields of `LoggedStep` that describe memory. Sizes are in GiB.
    """
    # macOS reports the peak in bytes, Linux in KiB.
    peak_unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * peak_unit
    resident = peak
    statm = Path("/proc/self/statm")
    if statm.exists():  # only Linux reports the current size
        num_pages = int(statm.read_text().split()[1])
        resident = num_pages * os.sysconf("SC_PAGE_SIZE")
        peak = max(peak, resident)  # the kernel updates the peak with a delay

    return {
        "memory": resident / GIB,
        "memory_peak": peak / GIB,
        "memory_active": None,
        "alloc_retries": 0,
    }
