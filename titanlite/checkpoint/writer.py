"""Write checkpoints, in the step loop or beside it, and remove old ones.

Invariant: one save is under way at a time; one that fails costs nothing but itself.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.dcp import CommittingWriter, cause
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.staging import Stager
from titanlite.checkpoint.writer_process import RemoteWriter, WriterProcess
from titanlite.config import schema
from titanlite.runtime.events import Event


@dataclass(frozen=True)
class _PendingSave:
    """A save that may still be under way. Times in seconds."""

    step: int
    writer: CommittingWriter
    started: float
    blocked: float


class CheckpointWriter:
    """Writes to one folder, for all ranks together. It logs from other threads, too.

    Args:
        keep: called on rank 0 after each save: one more checkpoint that retention keeps, or None.

    Attributes:
        failed: saves that failed.
        waits: saves that found the one before still under way.
        last_step: of the newest save that is known to be complete.
        failed_step: of the newest save, if it failed.

    Raises:
        UserError: the async mode needs a GPU.
    """

    def __init__(self, folder: CheckpointFolder, keep: Callable[[], Path | None]) -> None:
        self._keep = keep
        self.failed = self.waits = 0
        self.last_step: int | None = None
        self.failed_step: int | None = None
        self._config: schema.Checkpoint = folder.config
        self._folder, self._ranks, self._token, self._log = folder.path, folder.ranks, folder.token, folder.log
        self._count = 0
        self._unfinished: list[Path] = []  # on rank 0: folders of failed saves
        self._pending: tuple[_PendingSave, Future[Any]] | None = None
        self._purger = ThreadPoolExecutor(1, "purge")
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        mode = self._config.async_mode
        self._process = WriterProcess() if mode == "process" else None
        self._stager = (
            None if mode == "disabled" else Stager(pinned=mode == "async_with_pinned_mem", shared=mode == "process")
        )

    def save(self, step: int, tensors: dict[str, Tensor], info: dict[str, Any], folder: Path | None = None) -> None:
        """Write a checkpoint, or stage it and leave the writing to the background. Call `settle` before.

        Args:
            folder: another one than that of all checkpoints, in which nothing is purged.
        """
        assert self._pending is None
        self._count += 1
        started = time.perf_counter()
        target = folder or self._folder, step, f"{self._token}-{self._count}", info
        writer = CommittingWriter(*target) if self._process is None else RemoteWriter(*target, self._process)
        future = self._write(tensors, writer)
        pending = _PendingSave(step, writer, started, blocked=time.perf_counter() - started)
        self._pending = pending, future
        if self._ranks.rank == 0:
            future.add_done_callback(functools.partial(self._conclude, pending))
        if self._stager is None:
            self.settle()

    def settle(self) -> None:
        """Wait for the save under way, if there is one, and agree with all ranks on how it ended."""
        if self._pending is None:
            return
        (pending, future), self._pending = self._pending, None
        if not future.done():
            self.waits += 1
            if self._ranks.rank == 0:
                self._log(f"waiting for the save of step {pending.step}, which is still under way")
        failed = future.exception() is not None
        if any(self._ranks.distinct(failed)):
            self.fail(pending.step)
        else:
            self.last_step, self.failed_step = pending.step, None

    def fail(self, step: int) -> None:
        """Count a failure, on all ranks."""
        self.failed += 1
        self.failed_step = step

    def before_update(self) -> None:
        """Call before the live tensors change: with pinned memory they may still be copied."""
        if self._stager is not None:
            self._stager.before_update()

    def close(self) -> None:
        """Wait for the save and the removals under way."""
        self.settle()
        self._writer.shutdown(wait=True)
        self._purger.shutdown(wait=True)
        self._remove_unfinished()
        if self._process is not None:
            self._process.close()

    def _write(self, tensors: dict[str, Tensor], writer: CommittingWriter) -> Future[Any]:
        """Start writing, or write; the future fails if any rank failed."""
        future: Future[Any] = Future()
        if self._stager is not None:
            errors: list[str] = []
            staged: Callable[[], dict[str, Tensor]] = dict
            try:
                staged = self._stager.stage(tensors)
            except (OSError, RuntimeError) as error:
                errors = [f"staging: {error}"]
            if errors := self._ranks.union(errors):  # no rank writes then, because it would wait for the others
                future.set_exception(OSError("; ".join(errors)))
                return future
            if isinstance(writer, RemoteWriter):
                writer.memory = self._stager.memory
            return self._writer.submit(lambda: self._save(staged(), writer))
        try:
            future.set_result(self._save(tensors, writer))
        except CheckpointException as error:
            future.set_exception(error)
        return future

    def _save(self, tensors: dict[str, Tensor], writer: CommittingWriter) -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp_save(tensors, storage_writer=writer, planner=planner, process_group=self._ranks.group)

    def _conclude(self, pending: _PendingSave, future: Future[Any]) -> None:
        """On rank 0, in whichever thread the save ended: say so, and clean up."""
        if error := future.exception():
            self._log(Event(f"save of step {pending.step} FAILED ({cause(error)})", "failed save", pending.step))
            self._unfinished.append(pending.writer.unfinished)
        self._remove_unfinished()
        if error:
            return
        took = f"{time.perf_counter() - pending.started:.1f} s"
        if self._stager is not None:
            took += f", of which training waited {pending.blocked:.2f} s"
        self._log(Event(f"saved step {pending.step} to {pending.writer.target} in {took}", "save", pending.step))
        if pending.writer.target.parent == self._folder:
            self.purge()

    def _remove_unfinished(self) -> None:
        """Remove what failed saves have left. The same fault can stop this, too, so it is tried again later."""
        for path in self._unfinished:
            shutil.rmtree(path, ignore_errors=True)
        self._unfinished = [path for path in self._unfinished if path.exists()]

    def purge(self) -> None:
        """Remove, on rank 0 and in the background, what retention does not keep."""
        if self._ranks.rank == 0:
            self._purger.submit(self._purge)

    def _purge(self) -> None:
        """Remove the oldest checkpoints beyond keep_latest_k. The newest, known to be good, is never among them."""
        try:
            kept = self._keep()
        except OSError as error:  # then nothing is removed, because the best one could be among it
            self._log(f"no old checkpoint is removed, because the best one is not known: {error}")
            return
        for path in expendable(self._folder, self._config.keep_latest_k, self._config.keep_every_n_steps):
            try:
                if path != kept:
                    step_folders.remove(path)
            except OSError as error:
                self._log(f"could not remove the old checkpoint {path.name}: {error}")


def expendable(folder: Path, keep_latest_k: int, keep_every_n_steps: int) -> list[Path]:
    """Checkpoints that retention does not keep.

    A folder without a manifest was not saved by a run, so it is not counted.
    """
    if keep_latest_k == 0:
        return []
    complete = [path for path in step_folders.list_checkpoints(folder) if (path / step_folders.MANIFEST).is_file()]
    every = keep_every_n_steps
    return [path for path in complete[:-keep_latest_k] if not every or (step_folders.step_of(path) or 0) % every != 0]
