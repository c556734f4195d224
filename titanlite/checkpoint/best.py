"""The checkpoint with the best validation loss, which `checkpoint.keep_best` keeps.

Invariant: the loss of a checkpoint is in its manifest, so that the files alone say which one is the best. The link
`best` beside the step folders follows them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlite.checkpoint import step_folders
from titanlite.config.errors import CheckpointError

BEST = "best"


class BestCheckpoint:
    """Knows the best checkpoint of a run. For one process.

    Args:
        folder: That of all checkpoints.
        beside: Another folder with checkpoints of the run, that of its last weights.
        job: The job as a JSON value. A loss counts only if it was computed on the same rows as this job's.
        log: Is told when another one has become the best.
    """

    def __init__(self, folder: Path, beside: Path, job: dict[str, Any] | None, log: Callable[[str], None]) -> None:
        self._log = log
        self._link, self._folders, self._rows = folder / BEST, (folder, beside), _rows(job)
        self._losses: dict[Path, float | None] = {}  # of manifests that were read, because none ever changes

    def find(self, run: str | None) -> tuple[Path, float] | None:
        """The checkpoint of the run with the lowest loss, the earlier one of two that are equal; and its loss."""
        there = [path for folder in self._folders for path in step_folders.list_checkpoints(folder)]
        losses = {path: loss for path in there if (loss := self._loss(path, run)) is not None}
        return min(losses.items(), key=lambda item: (item[1], step_folders.step_of(item[0])), default=None)

    def keep(self, run: str | None) -> Path | None:
        """`find`, and let the link lead there, by one rename. Without a best one there is no link."""
        found = self.find(run)
        if found is None:
            self._link.unlink(missing_ok=True)
            return None
        best, loss = found
        target = os.path.relpath(best, self._link.parent)
        if not self._link.is_symlink() or os.readlink(self._link) != target:
            new = self._link.with_name(f".{BEST}.new")
            new.unlink(missing_ok=True)
            new.symlink_to(target)
            new.replace(self._link)
            self._log(f"{best.name} has the lowest validation loss so far, {loss:.4f}: {self._link} leads to it")
        return best

    def _loss(self, path: Path, run: str | None) -> float | None:
        if path not in self._losses:
            self._losses[path] = None
            with contextlib.suppress(CheckpointError):  # a damaged one is no candidate
                info = step_folders.read_manifest(path)["info"]
                if info["train_state"].get("run") == run and _rows(info["job"]) == self._rows:
                    self._losses[path] = info["train_state"].get("validation_loss")
        return self._losses[path]


def _rows(job: dict[str, Any] | None) -> object:
    """What decides on which rows a job validates."""
    if job is None:
        return None
    own = {key: value for key, value in job["validation"].items() if key != "freq"}
    return own, job["dataset"] if own["holdout"] else None, job["training"]["seq_len"]
