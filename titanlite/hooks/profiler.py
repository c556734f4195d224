"""torch.profiler in a run, on a schedule: traces for Perfetto, tables for the log, what is in memory.

Invariant: profiling changes no number of a run, and a profile that fails ends no run: that is said, and training goes
on.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import strftime

import torch
from torch.profiler import ProfilerActivity, profile

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
    """

    rank: int
    last_step: int
    trace: str
    table: str
    operators: dict[str, float]


@contextmanager
def _going_on() -> Iterator[None]:
    """Let no failure of a profile end the run."""
    try:
        yield
    except Exception as error:
        _LOGGER.error(f"Training goes on, but a profile failed: {error}")


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
        self._rank, self._device = training.rank, training.device.type
        self._snapshots = self._settings.enable_memory_snapshot and self._device == "cuda"
        training.opened.callback(self._stop)

    @_going_on()
    def started(self, step: int) -> None:
        settings, self._first = self._settings, step
        freq, warmup, active = settings.profile_freq, settings.profiler_warmup, settings.profiler_active
        schedule = torch.profiler.schedule(  # cycles end at the multiples of profile_freq
            skip_first=-step % freq, wait=freq - warmup - active, warmup=warmup, active=active,
            repeat=settings.profiler_repeat,
        )  # fmt: skip
        if self._snapshots:  # on all ranks, because any can run out of memory
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        if not settings.profiler_ranks or self._rank in settings.profiler_ranks:
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # as it should
            self._tracer = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * (self._device == "cuda"))],
                schedule=schedule, on_trace_ready=self._write, record_shapes=True,
                profile_memory=settings.enable_memory_snapshot,
            )  # fmt: skip
            self._tracer.start()

    @_going_on()
    def after_step(self, step: int, result: StepResult) -> None:
        if self._tracer is not None:
            self._tracer.step()

    @_going_on()
    def failed(self, error: BaseException) -> None:
        if self._snapshots and isinstance(error, torch.OutOfMemoryError):
            path = self._file("out-of-memory", "memory.pickle")
            torch.cuda.memory._dump_snapshot(path)
            _LOGGER.info(f"What is in the GPU's memory on rank {self._rank}: {path}")

    @_going_on()
    def _stop(self) -> None:
        if self._tracer is not None:
            self._tracer.on_trace_ready = None  # what is not complete is dropped
            self._tracer.stop()

    def _write(self, tracer: profile) -> None:
        """Write the trace of the steps that have just been profiled, and log their table."""
        step = self._first + tracer.step_num
        path = self._file(f"step-{step:08d}", "trace.json.gz")
        tracer.export_chrome_trace(path)
        averages = tracer.key_averages()
        time = "self_device_time_total" if self._device == "cuda" else "self_cpu_time_total"
        table = averages.table(sort_by=time, row_limit=10, max_name_column_width=50)
        operators = {event.key: getattr(event, time) / 1e6 for event in averages}
        self.profiles.append(StepProfile(self._rank, step, path, table, operators))
        _LOGGER.info(Event(f"Profiled to step {step} on rank {self._rank}: {path}", "profile", step))
        _LOGGER.info(table)
        if self._snapshots:
            torch.cuda.memory._dump_snapshot(self._file(f"step-{step:08d}", "memory.pickle"))

    def _file(self, what: str, ending: str) -> str:
        """A path in the folder, which is made. It has the time, because a later start may profile the same step."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return str(self._folder / f"{what}-rank-{self._rank}-{strftime('%Y%m%d-%H%M%S')}.{ending}")
