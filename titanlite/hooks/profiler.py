"""torch.profiler in a run, on a schedule: traces for Perfetto, tables for the log, what is in memory.

Invariant: profiling changes no number of a run, and a profile that fails ends no run: that is said, and training goes
on.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from titanlite.config.schema import Profiling
from titanlite.hooks.hook import Hook, StepResult, Training
from titanlite.observe.outputs import PROFILES
from titanlite.runtime.logging import LOGGER_NAME, Event

_MOST_ALLOCATIONS = 100_000  # of the history of a GPU's memory, the newest ones
_LOGGER = logging.getLogger(LOGGER_NAME)


@dataclass(frozen=True)
class StepProfile:
    """Some profiled steps of a rank.

    Attributes:
        last_step: The last of them.
        trace: File of the trace, for Perfetto.
        table: torch's table of the operators that took the most time.
        operators: Name -> seconds of all these steps without what the operator calls. On a GPU: of its kernels.
        measured: Of `profile_steps`: step_time, tps and memory_peak, as `LoggedStep` explains them, from step 2 on.
    """

    rank: int
    last_step: int
    trace: str
    table: str
    operators: dict[str, float]
    measured: dict[str, float] = field(default_factory=dict)


class Profiler(Hook):
    """Profiles steps of this rank.

    Args:
        folder: Output folder of the run.

    Attributes:
        profiles: Those of this start.
    """

    def __init__(self, settings: Profiling, folder: Path) -> None:
        self._settings, self._folder = settings, folder / PROFILES
        self._tracer: profile | None = None
        self.profiles: list[StepProfile] = []

    def built(self, training: Training) -> None:
        settings, self._rank, self._device = self._settings, training.rank, training.device.type
        self._chosen = not settings.profiler_ranks or self._rank in settings.profiler_ranks
        self._snapshots = settings.enable_memory_snapshot and self._device == "cuda"
        training.opened.callback(self._stop)

    def started(self, step: int) -> None:
        settings, self._first, on_gpu = self._settings, step, self._device == "cuda"
        freq, warmup, active = settings.profile_freq, settings.profiler_warmup, settings.profiler_active
        self._schedule = torch.profiler.schedule(  # cycles end at the multiples of profile_freq
            skip_first=-step % freq, wait=freq - warmup - active, warmup=warmup, active=active,
            repeat=settings.profiler_repeat,
        )  # fmt: skip
        with _going_on():
            if self._snapshots:  # on all ranks, because any can run out of memory
                torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
            allocations = settings.enable_memory_snapshot and not on_gpu
            if self._chosen and (settings.enable_profiling or allocations):
                warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # as it should
                self._tracer = profile(
                    activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * on_gpu)], schedule=self._schedule,
                    on_trace_ready=self._write, record_shapes=True, profile_memory=allocations,
                )  # fmt: skip
                self._tracer.start()

    def after_step(self, step: int, result: StepResult) -> None:
        if self._tracer is not None:
            with _going_on():
                self._tracer.step()
        ends = self._schedule(step - self._first - 1) is ProfilerAction.RECORD_AND_SAVE
        if ends and self._snapshots and self._chosen:
            self._write_snapshot(f"step-{step:08d}-rank-{self._rank}")

    def failed(self, error: BaseException) -> None:
        if self._snapshots and isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot(f"out-of-memory-rank-{self._rank}")

    def _stop(self) -> None:
        if self._tracer is not None:
            with _going_on():
                self._tracer.on_trace_ready = None  # what is not complete is dropped
                self._tracer.stop()

    def _write(self, tracer: profile) -> None:
        """Write the trace of the steps that have just been profiled, and log their table."""
        step = self._first + tracer.step_num
        path = self._new_file(f"step-{step:08d}-rank-{self._rank}", ".trace.json.gz")
        tracer.export_chrome_trace(str(path))
        averages = tracer.key_averages()
        time = "self_device_time_total" if self._device == "cuda" else "self_cpu_time_total"
        table = averages.table(sort_by=time, row_limit=10, max_name_column_width=50)
        operators = {event.key: getattr(event, time) / 1e6 for event in averages}
        self.profiles.append(StepProfile(self._rank, step, str(path), table, operators))
        line = f"Profiled to step {step} on rank {self._rank}: trace in {path}"
        for text in (Event(line, "profile", step) if self._rank == 0 else line, table):
            _LOGGER.info(text)

    def _write_snapshot(self, stem: str) -> None:
        with _going_on():
            path = self._new_file(stem, ".memory.pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            _LOGGER.info(f"What is in the GPU's memory on rank {self._rank}: {path}")

    def _new_file(self, stem: str, ending: str) -> Path:
        """A name in the folder, which is made. It has a number if an earlier start has written the same."""
        self._folder.mkdir(parents=True, exist_ok=True)
        names = (f"{stem}{number}{ending}" for number in ("", *(f"-{n}" for n in range(2, 10_000))))
        return next(path for name in names if not (path := self._folder / name).exists())


@contextmanager
def _going_on() -> Iterator[None]:
    """Let no failure of a profile end the run."""
    try:
        yield
    except Exception as error:
        _LOGGER.error(f"Training goes on, but a profile failed: {error}")
