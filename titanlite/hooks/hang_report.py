"""A report of a rank whose step takes too long, and the longest wait for collectives.

Invariant: the first step has the time of a start, because kernels are compiled in it. Later ones have less. The report
only observes and writes a file. The time-out of a collective ends the run. The launcher reads the files of all ranks of
its machine and prints them. A rank that waits in no collective is late: the others wait for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from titanlite.config.errors import ERROR_FOLDER
from titanlite.hooks.hook import Hook, StepResult, Training
from titanlite.runtime.world import set_timeout

SHARE = 0.8  # of the time-out, so that the file exists before the first rank gives up


class HangReport(Hook):
    """Watches from when it is made, which is before the model is built: a thread writes `<rank>.hang.json` into the
    launcher's folder, if there is one, when the rank was not `alive` for most of the time-out."""

    def __init__(self, training: Training) -> None:
        comm = training.run.job.comm
        self._rank, self._groups = training.rank, training.mesh.groups
        self._host = training.hosts[self._rank]
        self._timeout, self._limit = comm.train_timeout_seconds, SHARE * comm.init_timeout_seconds
        self._later_limit = SHARE * min(comm.train_timeout_seconds, training.run.job.checkpoint.timeout_seconds)
        set_timeout(self._groups, comm.init_timeout_seconds)
        self._since, self._main, self._ended = time.monotonic(), threading.get_ident(), threading.Event()
        self._step = 0
        if folder := os.environ.get(ERROR_FOLDER):
            file = Path(folder, f"{self._rank}.hang.json")
            threading.Thread(target=self._watch, args=(file,), daemon=True, name="hang-watch").start()
            training.opened.callback(self._ended.set)

    def after_step(self, step: int, result: StepResult) -> None:
        if self._step == 0:
            set_timeout(self._groups, self._timeout)
        self._step = step
        self.alive()

    def alive(self) -> None:
        """Note that this rank is at work beside its steps."""
        self._limit, self._since = self._later_limit, time.monotonic()

    def _watch(self, file: Path) -> None:
        while not self._ended.wait(min(1.0, self._limit / 10)):
            if time.monotonic() - self._since < self._limit:
                file.unlink(missing_ok=True)  # of a step that has ended after all
            elif not file.exists():
                file.write_text(json.dumps(self._describe()), encoding="utf-8")

    def _describe(self) -> tuple[bool, int, str]:
        """Whether this rank waits for others, its number, and words for where it is."""
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        ours = [frame for frame in frames if f"{os.sep}titanlite{os.sep}" in frame.filename]
        at, inside = (
            f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in ((ours or frames)[-1], frames[-1])
        )
        last, pending = last_collectives() if dist.is_initialized() else ("none", [])
        does = f"waits in {pending[-1]}" if pending else f"is LATE: its last collective was {last}"
        text = f"Rank {self._rank} ({self._host}), step {self._step + 1}, {does}, at {at}, inside of {inside}"
        return bool(pending), self._rank, text


def last_collectives() -> tuple[str, list[str]]:
    """The last collective that this rank has started, and all in which it still waits, by their time.

    torch's flight recorder has gloo's in one table, NCCL's in another.
    """
    recorder: Any = _distributed_c10d
    tables = [recorder._dump_fr_trace_json(True, False)]
    if dist.is_nccl_available():
        tables.append(recorder._dump_nccl_trace_json(True, False))
    entries = [entry for table in tables for entry in json.loads(table).get("entries", [])]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    names = [f"{entry['profiling_name']} number {entry['collective_seq_id']}" for entry in entries]
    waiting = [name for name, entry in zip(names, entries, strict=True) if not entry["retired"]]
    return names[-1] if names else "none", waiting
