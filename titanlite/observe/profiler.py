"""torch.profiler in a run: on a schedule, and when a file asks for it.

Invariant: profiling changes no number of a run, and a profile that fails ends no run: that is said once for each
profile, and training goes on. All ranks know when a profile begins and ends, though only some of them are traced.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.profiler

from titanlite.config.files import put
from titanlite.config.schema import Profiling
from titanlite.observe.byte_timeline import chrome_trace, describe_peak
from titanlite.observe.counter import Counter
from titanlite.observe.outputs import PROFILES
from titanlite.observe.step_profile import SUMMARY, StepProfile, read_profile
from titanlite.runtime.events import Event
from titanlite.runtime.logging import LOGGER_NAME

ASK = "profile.now"
_TRACE = ".trace.json.gz"
_MOST_ALLOCATIONS = 100_000  # of the history of a GPU's memory, the newest ones


@dataclass(frozen=True)
class _Window:
    """Steps that are profiled, those of the warm-up included.

    Attributes:
        tracer: None where this rank is not traced, or has failed.
        counted: The step whose bytes are counted on this rank, if they are.
    """

    first: int
    last: int
    tracer: torch.profiler.profile | None
    counted: int | None


class Profiler:
    """Profiles steps of this rank. `step` is around each of them.

    Args:
        folder: Output folder of the run.
        log: Is called with lines about what was profiled.
        count: Counts the bytes of the step within, on a CPU. It may raise after the step.

    Attributes:
        latest: The last profile of this rank.
    """

    def __init__(
        self,
        settings: Profiling,
        folder: Path,
        rank: int,
        device: torch.device,
        log: Callable[[str], None],
        count: Callable[[], AbstractContextManager[Counter]],
    ) -> None:
        self._settings, self._run_folder, self._folder = settings, folder, folder / PROFILES
        self._rank, self._device, self._log, self._count = rank, device, log, count
        self._traced = not settings.profiler_ranks or rank in settings.profiler_ranks
        self._window: _Window | None = None
        self._asked, self._cycles = False, 0
        self._promised = False  # profile.now has been removed, and its profile has not begun
        self._said = ""  # the last failure of the latest profile
        self.latest: StepProfile | None = None
        if settings.enable_memory_snapshot and device.type == "cuda":
            with self._going_on():
                torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)

    def is_asked(self) -> bool:
        """Whether someone asks for a profile by the file profile.now, which is removed. Only rank 0 looks for it."""
        if self._rank != 0 or self._window is not None or self._asked:
            return False
        try:
            (self._run_folder / ASK).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._say_once(f"{self._run_folder / ASK} cannot be removed, so nothing is profiled: {error}")
            return False
        self._promised = True
        return True

    def ask(self) -> None:
        """Profile the next steps. All ranks call it after the same step."""
        self._asked = True

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the step `number`."""
        if self._window is None:
            self._window = self._begin(number)
        if self._window is not None and self._window.counted == number:
            with self._counted(number):
                yield
        else:
            yield
        if self._window is not None:
            self._end_step(number, self._window)

    def close(self) -> None:
        """Drop a profile that is not complete, because the run ends before."""
        window, self._window = self._window, None
        if window is None and self._promised:
            self._log(f"{ASK}: the run ends before a step can be profiled.")
        if window is not None and window.tracer is not None:
            self._log(f"The run ends before the profile of steps {window.first} to {window.last} is complete.")
            with self._going_on():
                window.tracer.stop()

    def _begin(self, number: int) -> _Window | None:
        """The window that begins with the step `number`, if one does."""
        settings = self._settings
        warmup, active = settings.profiler_warmup, settings.profiler_active
        last = number + warmup + active - 1
        asked, self._asked = self._asked, False
        scheduled = settings.enable_profiling or settings.enable_memory_snapshot
        scheduled = scheduled and last % settings.profile_freq == 0
        scheduled = scheduled and (not settings.profiler_repeat or self._cycles < settings.profiler_repeat)
        if not asked and not scheduled:
            return None
        self._cycles += scheduled
        self._said = ""
        if asked:
            self._promised = False
            self._log(f"{ASK}: {_steps(last - active + 1, last)} will be profiled.")
        tracer = None
        if self._traced and (asked or settings.enable_profiling):
            with self._going_on():
                tracer = torch.profiler.profile(
                    activities=[
                        torch.profiler.ProfilerActivity.CPU,
                        *([torch.profiler.ProfilerActivity.CUDA] * (self._device.type == "cuda")),
                    ],
                    schedule=torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1),
                    record_shapes=True,
                    acc_events=True,  # without it torch warns that it keeps one cycle, and there is one
                )
                tracer.start()
        counts = self._traced and settings.enable_memory_snapshot and self._device.type == "cpu"
        return _Window(number, last, tracer, number + max(0, warmup - 1) if counts else None)

    def _end_step(self, number: int, window: _Window) -> None:
        if window.tracer is not None:
            with self._going_on():
                window.tracer.step()
        if number < window.last:
            return
        self._window = None
        if self._traced and self._settings.enable_memory_snapshot and self._device.type == "cuda":
            self._write_snapshot(f"step-{number:08d}-rank-{self._rank}", number)
        if window.tracer is not None:
            with self._going_on():
                self.latest = profile = self._write(window.tracer, number)
                where = f"trace in {self._folder / profile.trace}"
                self._say(f"Profiled {profile.steps()} on rank {self._rank}: {where}", number)
                self._log(profile.table())
        elif not self._traced and self._rank == 0:
            ranks = ", ".join(map(str, self._settings.profiler_ranks))
            steps = _steps(number - self._settings.profiler_active + 1, number)
            self._say(f"Profiled {steps} on ranks {ranks}: files in {self._folder}", number)

    @contextmanager
    def _counted(self, number: int) -> Iterator[None]:
        """Count the bytes of the step `number`, and write their timeline."""
        with ExitStack() as counting:
            counter = None
            with self._going_on():
                counter = counting.enter_context(self._count())
            yield
            with self._going_on():
                counting.close()
                if counter is not None:
                    path = self._new_file(f"step-{number:08d}-rank-{self._rank}", ".memory.json.gz")
                    put(path, gzip.compress(json.dumps(chrome_trace(counter)).encode()))
                    peak = f"bytes of step {number} on rank {self._rank}, {describe_peak(counter)}"
                    self._say(f"Counted the {peak}. Timeline in {path}", number)

    def _write_snapshot(self, stem: str, step: int | None) -> None:
        with self._going_on():
            path = self._new_file(stem, ".memory.pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            self._say(f"What is in the GPU's memory on rank {self._rank}: {path}", step)

    def _say(self, line: str, step: int | None) -> None:
        self._log(Event(line, "profile", step) if self._rank == 0 else line)

    def out_of_memory(self) -> None:
        """Write what is in the GPU's memory, after it was not enough for a step."""
        if self._settings.enable_memory_snapshot and self._device.type == "cuda":
            self._write_snapshot(f"out-of-memory-rank-{self._rank}", None)

    def _write(self, tracer: torch.profiler.profile, last_step: int) -> StepProfile:
        """Write the trace and its summary. Raises OSError or ValueError: they cannot be written."""
        trace = self._new_file(f"step-{last_step:08d}-rank-{self._rank}", _TRACE)
        stem = trace.name.removesuffix(_TRACE)
        # A folder, because torch leaves a part of the trace under another name where the disk is full.
        with TemporaryDirectory(prefix=f".{stem}-", dir=self._folder) as unfinished:
            raw = Path(unfinished, "trace.json")
            raw.touch()  # because torch says nothing where it cannot write
            tracer.export_chrome_trace(str(raw))
            try:
                profile = read_profile(raw, self._device.type, rank=self._rank, last_step=last_step, name=trace.name)
            except json.JSONDecodeError as error:
                raise OSError(f"{raw} is not whole: {error}. The disk may be full.") from None
            put(trace, gzip.compress(raw.read_bytes(), compresslevel=5))
            put(self._folder / f"{stem}{SUMMARY}", f"{json.dumps(asdict(profile), indent=1)}\n".encode())
        return profile

    def _new_file(self, stem: str, ending: str) -> Path:
        """A name in the folder, which is made. It has a number if there is such a file of the same step."""
        self._folder.mkdir(parents=True, exist_ok=True)
        names = (f"{stem}{number}{ending}" for number in ("", *(f"-{n}" for n in range(2, 10_000))))
        return next(path for name in names if not (path := self._folder / name).exists())

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Let no failure of a profile end the run."""
        try:
            yield
        except Exception as error:
            self._say_once(f"Training goes on, but a profile failed: {error}")

    def _say_once(self, message: str) -> None:
        if message != self._said:
            logging.getLogger(LOGGER_NAME).error(message)
        self._said = message


def _steps(first: int, last: int) -> str:
    return f"steps {first} to {last}" if first < last else f"step {last}"
