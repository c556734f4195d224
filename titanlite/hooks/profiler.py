"""Profile steps of a run with torch.profiler.

Each profile consists of a trace for Perfetto, a table of operators and an optional snapshot of GPU
memory.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from titanlite.config.schema import Profiling
from titanlite.hooks.hook import Hook
from titanlite.observe.outputs import PROFILES
from titanlite.runtime.logging import LOGGER_NAME, Event

if TYPE_CHECKING:
    from titanlite.train.step import StepResult
    from titanlite.train.trainer import Trainer

MAX_ALLOCATIONS = 100_000  # newest entries of the memory history of a GPU
LOGGER = logging.getLogger(LOGGER_NAME)


@dataclass(frozen=True)
class StepProfile:
    """Profile of consecutive steps on one rank.

    Attributes:
        rank: The profiled rank.
        last_step: The last of the profiled steps.
        trace: Path of the trace, which Perfetto displays.
        table: Table of the operators that took the most time.
        operators: Total seconds of each operator over all profiled steps, excluding operators that
            it calls. On a GPU, this is the time of its kernels.
    """

    rank: int
    last_step: int
    trace: str
    table: str
    operators: dict[str, float]


@contextmanager
def _log_failures() -> Iterator[None]:
    """Log exceptions in the `with` block instead of raising them.

    A failed profile must not end the run.
    """
    try:
        yield
    except Exception as error:
        LOGGER.error(f"A profile failed; training continues: {error}")


class Profiler(Hook):
    """Profiles steps on this rank with torch.profiler, as configured in section [profiling].

    Attributes:
        profiles: All profiles completed so far.
    """

    def __init__(self, settings: Profiling, folder: Path) -> None:
        """Create a profiler that writes to the subfolder `profile` of `folder`.

        Args:
            settings: Section [profiling] of the job.
            folder: Output folder of the run.
        """
        self._settings = settings
        self._folder = folder / PROFILES
        self._profiler: profile | None = None
        self.profiles: list[StepProfile] = []

    def built(self, trainer: Trainer) -> None:
        """Read the rank and the device type of the trainer."""
        self._rank = trainer.rank
        self._is_cuda = trainer.device.type == "cuda"
        self._has_snapshots = self._settings.enable_memory_snapshot and self._is_cuda

    @_log_failures()
    def started(self, step: int) -> None:
        """Start the profiler if the job selects this rank (profiling.profiler_ranks).

        With profiling.enable_memory_snapshot, record the GPU memory history on all ranks, because
        any of them may run out of memory.
        """
        self._first_step = step
        if self._has_snapshots:
            # Despite its underscore, this is documented in "Understanding CUDA Memory Usage".
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

        selected_ranks = self._settings.profiler_ranks
        if not selected_ranks or self._rank in selected_ranks:
            # This warning is expected, because each cycle clears the events of the previous one.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._profiler = self._create_profiler(step)
            self._profiler.start()

    def _create_profiler(self, step: int) -> profile:
        """Create a torch profiler that records the end of each cycle of `profile_freq` steps.

        For example, a cycle of 100 steps with 3 warmup and 2 active steps waits for 95 steps, warms
        up for 3, records the last 2, and calls `_finish_profile`.

        Args:
            step: Number of steps completed so far.
        """
        settings = self._settings
        # Cycles end at multiples of profile_freq, so skip the steps until the next multiple. For
        # example, with cycles of 100 steps, a run that resumes after step 130 skips 70 steps.
        num_skipped = -step % settings.profile_freq
        num_waiting = settings.profile_freq - settings.profiler_warmup - settings.profiler_active
        schedule = torch.profiler.schedule(
            skip_first=num_skipped,
            wait=num_waiting,
            warmup=settings.profiler_warmup,
            active=settings.profiler_active,
            repeat=settings.profiler_repeat,
        )

        activities = [ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(ProfilerActivity.CUDA)
        return profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self._finish_profile,
            record_shapes=True,
            profile_memory=settings.enable_memory_snapshot,
        )

    @_log_failures()
    def after_step(self, step: int, result: StepResult) -> None:
        """Advance torch.profiler, which calls `_finish_profile` at the end of each cycle."""
        if self._profiler is not None:
            self._profiler.step()

    @_log_failures()
    def failed(self, error: BaseException) -> None:
        """Write a snapshot of GPU memory if this rank ran out of memory."""
        if self._has_snapshots and isinstance(error, torch.OutOfMemoryError):
            path = self._make_path("out-of-memory", "memory.pickle")
            torch.cuda.memory._dump_snapshot(path)
            LOGGER.info(f"Wrote a GPU memory snapshot of rank {self._rank} to {path}")

    @_log_failures()
    def close(self) -> None:
        """Stop the profiler and discard an incomplete profile."""
        if self._profiler is not None:
            self._profiler.on_trace_ready = None  # called by `stop` otherwise
            self._profiler.stop()

    def _finish_profile(self, profiler: profile) -> None:
        """Write the trace of the profiled steps, log a table of operators, and store the profile.

        If profiling.enable_memory_snapshot is set, also write a snapshot of GPU memory.

        Args:
            profiler: The torch profiler that recorded the steps.
        """
        step = self._first_step + profiler.step_num
        trace = self._make_path(f"step-{step:08d}", "trace.json.gz")
        profiler.export_chrome_trace(trace)
        text = f"Profiled steps up to {step} on rank {self._rank}: {trace}"
        LOGGER.info(Event(text, "profile", step))

        time_field = "self_device_time_total" if self._is_cuda else "self_cpu_time_total"
        averages = profiler.key_averages()
        table = averages.table(sort_by=time_field, row_limit=10, max_name_column_width=50)
        LOGGER.info(table)
        seconds = {event.key: getattr(event, time_field) / 1e6 for event in averages}
        self.profiles.append(StepProfile(self._rank, step, trace, table, operators=seconds))

        if self._has_snapshots:
            snapshot = self._make_path(f"step-{step:08d}", "memory.pickle")
            torch.cuda.memory._dump_snapshot(snapshot)

    def _make_path(self, prefix: str, suffix: str) -> str:
        """Return a new path "<prefix>-rank-<rank>-<time>.<suffix>" in the profile folder.

        The time makes the path unique if the run resumes and profiles the same step again.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        time = strftime("%Y%m%d-%H%M%S")
        return str(self._folder / f"{prefix}-rank-{self._rank}-{time}.{suffix}")
