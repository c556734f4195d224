"""Report ranks that make no progress for too long and the collectives that they wait in.

The launcher prints the reports of all ranks on its node when the run fails. It prints them earlier
if no rank of the node can continue, because each one waits in a collective, or SIGSTOP or a
debugger has stopped it. A rank whose report names no pending collective is late: the other ranks
wait for it.

Invariant: The hook only observes the run and writes a file. It does not end the run; the timeout of
a collective does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titanlite.config.errors import ERROR_FOLDER
from titanlite.config.files import write_atomically
from titanlite.hooks.hook import Hook
from titanlite.runtime.world import set_timeout

if TYPE_CHECKING:
    from titanlite.train.step import StepResult
    from titanlite.train.trainer import Trainer

REPORT_FRACTION = 0.8
"""Fraction of the collective timeout after which a rank writes a report. The report then exists
before a collective on another rank times out."""


class HangReport(Hook):
    """Writes a report if this rank makes no progress for 80% of the collective timeout.

    A background thread checks the progress, from before the model is built until the run ends. It
    writes `<rank>.hang.json` to the error folder of the launcher and deletes the file if the rank
    makes progress again. Without a launcher, no thread is started.

    The time limit is 80% of comm.init_timeout_seconds until the end of the first step, then 80% of
    the smaller of comm.train_timeout_seconds and checkpoint.timeout_seconds. A save does not
    restart the limit, so a long synchronous save can exceed it. The report does not end the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Set the timeout of all process groups for the first step and start the thread.

        Args:
            trainer: Trainer of this rank. Its process groups must exist, but not yet its model.
        """
        comm = trainer.job.comm
        self._trainer = trainer
        set_timeout(trainer.mesh.groups, comm.init_timeout_seconds)

        self._limit = REPORT_FRACTION * comm.init_timeout_seconds
        self._progress_time = time.monotonic()
        self._step = 0
        self._main_thread = threading.get_ident()
        self._is_closed = threading.Event()
        error_folder = os.environ.get(ERROR_FOLDER)
        if error_folder:
            path = Path(error_folder, f"{trainer.rank}.hang.json")
            thread = threading.Thread(
                target=self._watch, args=(path,), daemon=True, name="hang-watch"
            )
            thread.start()

    def after_step(self, step: int, result: StepResult) -> None:
        """Restart the time limit. After the first step, switch to the shorter timeout."""
        if self._step == 0:
            job = self._trainer.job
            set_timeout(self._trainer.mesh.groups, job.comm.train_timeout_seconds)
            # During a save, the ranks wait for each other in a process group with its own timeout.
            timeout = min(job.comm.train_timeout_seconds, job.checkpoint.timeout_seconds)
            self._limit = REPORT_FRACTION * timeout
        self._step = step
        self.restart()

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed.set()

    def restart(self) -> None:
        """Restart the time limit. Call this whenever this rank makes progress."""
        self._progress_time = time.monotonic()

    def _watch(self, path: Path) -> None:
        """Write a report when this rank exceeds the time limit, and delete it after new progress.

        Run this in a background thread. It returns when the hook is closed.

        Args:
            path: Path of the report.
        """
        while not self._is_closed.wait(min(1.0, self._limit / 10)):
            is_late = time.monotonic() - self._progress_time >= self._limit
            if not is_late:
                path.unlink(missing_ok=True)
            elif not path.exists():
                report = json.dumps(self._describe())
                # The launcher may read the file at any time, so write it atomically.
                write_atomically(path, report.encode())

    def _describe(self) -> tuple[bool, int, str]:
        """Return the content of the report, which describes what this rank is currently doing.

        Returns:
            - Whether this rank waits in a collective.
            - The number of this rank.
            - A line of text with the node, the step, the collective, and the line of code that
              the main thread is executing.
        """
        last, pending = last_collectives()
        if pending is not None:
            activity = f"waits in {pending}"
        else:  # the other ranks wait for this one
            activity = f"is LATE: its last collective was {last}"
        rank = self._trainer.rank
        text = (
            f"Rank {rank} ({self._trainer.hosts[rank]}), step {self._step + 1}, {activity}, "
            f"at {self._describe_code()}"
        )
        return pending is not None, rank, text

    def _describe_code(self) -> str:
        """Describe the line that the main thread executes and the titanlite line that led to it.

        For example, "/a/titanlite/train/trainer.py:310 in step, inside of /b/linear.py:134 in
        forward".
        """
        stack = traceback.extract_stack(sys._current_frames()[self._main_thread])
        package = f"{os.sep}titanlite{os.sep}"
        package_frames = [frame for frame in stack if package in frame.filename]
        package_frame = package_frames[-1] if package_frames else stack[-1]
        return f"{_describe_frame(package_frame)}, inside of {_describe_frame(stack[-1])}"


def _describe_frame(frame: traceback.FrameSummary) -> str:
    """Return the file, line and function of a stack frame, such as "a.py:12 in main"."""
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def last_collectives() -> tuple[str, str | None]:
    """Return the last collective that this rank started, and the last one that is not complete.

    Both come from the torch flight recorder, which records recent collectives.

    Returns:
        - The last collective, for example "gloo:all_reduce number 12", or "none".
        - The last collective that is not complete, in the same format, or None.
    """
    last = "none"
    pending = None
    for entry in _read_flight_recorder():
        last = f"{entry['profiling_name']} number {entry['collective_seq_id']}"
        is_completed = entry["retired"]
        if not is_completed:
            pending = last
    return last, pending


def _read_flight_recorder() -> list[dict[str, Any]]:
    """Return the newest collectives of all process groups, in order of their creation.

    torch has no public function for this, so use private ones. Gloo and NCCL have separate tables.
    """
    from torch._C import _distributed_c10d

    recorder: Any = _distributed_c10d  # its type stubs lack these functions
    tables = [recorder._dump_fr_trace_json()]
    if dist.is_nccl_available():
        tables.append(recorder._dump_nccl_trace_json())

    entries: list[dict[str, Any]] = []
    for table in tables:
        entries += json.loads(table).get("entries", [])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])
