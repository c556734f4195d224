"""The folder of a run's checkpoints, while the run has it.

Invariant: one run at a time has the folder, all of its ranks see the same one, and nothing in it is left over from a
save that was cut short.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.rank_agreement import Ranks
from titanlite.config import schema
from titanlite.config.errors import UserError

LOCK_PATIENCE = 120  # seconds; the workers of a launcher that was killed save before they end


class CheckpointFolder:
    """All ranks open one together, before the first save or load, and close it after the last.

    Args:
        path: where the step folders lie; all nodes must share it.
        log: called on rank 0 with one line of text for each event that a person should know.

    Attributes:
        token: equal on all ranks and used by no other run; temporary folders are named after it.

    Raises:
        UserError: on all ranks: another run has the folder, it cannot be written to, or the nodes do not share it.
    """

    def __init__(self, config: schema.Checkpoint, path: Path, log: Callable[[str], None]) -> None:
        self.config = config
        self.path = path
        self.log = log
        self.ranks = Ranks(config.timeout_seconds)
        self._lock: int | None = None  # on rank 0
        self.token = self.ranks.on_rank0(self._take)
        self._check_shared()

    def say(self, line: str) -> None:
        """Log a line that all ranks know; rank 0 writes it."""
        if self.ranks.rank == 0:
            self.log(line)

    def check_room(self, size: int) -> None:
        """Warn if the checkpoints that retention keeps do not fit on the disk.

        Args:
            size: bytes of one checkpoint, over all ranks.

        Raises:
            UserError: on all ranks: not even one fits.
        """
        free = self.ranks.on_rank0(lambda: shutil.disk_usage(self.path).free)
        needed = f"{self.path}: a checkpoint takes about {size / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        if free < size:
            raise UserError(f"{needed}. Free some space, or choose another checkpoint.folder.")
        present = len(self.ranks.on_rank0(lambda: step_folders.list_checkpoints(self.path)))
        if size * max(1, self.config.keep_latest_k + self.config.keep_best + 1 - present) > free:
            self.say(f"{needed}: not enough for checkpoint.keep_latest_k = {self.config.keep_latest_k}")

    def close(self) -> None:
        """Let other runs have the folder."""
        self.ranks.close()
        if self._lock is not None:
            os.close(self._lock)

    def _take(self) -> str:
        """On rank 0: lock the folder, remove what is left over, and make a file whose name no earlier run has used."""
        self.path.mkdir(parents=True, exist_ok=True)
        # The other ranks wait, too, and no longer than for a save.
        self._lock = step_folders.lock(self.path, min(LOCK_PATIENCE, self.config.timeout_seconds / 2), self.log)
        beside = self.path.parent
        places = [(self.path, ""), (beside / "final", ""), (beside, "final_hf-")]
        found = [step_folders.remove_unfinished(folder, step_folders.UNFINISHED + prefix) for folder, prefix in places]
        for line in (line for _, kept in found for line in kept):
            self.log(line)
        if gone := [name for names, _ in found for name in names]:
            self.log(f"removed {len(gone)} unfinished checkpoint folders: {', '.join(gone)}")
        token = secrets.token_hex(8)
        self._probe(token).touch(exist_ok=False)
        return token

    def _probe(self, token: str) -> Path:
        return self.path / f"{step_folders.PROBE}{token}"

    def _check_shared(self) -> None:
        """Raises UserError, on all ranks, if one of them does not see the file that rank 0 made."""
        probe = self._probe(self.token)
        patience = time.monotonic() + 10  # network storage shows another node's file with a delay
        while not (seen := probe.exists()) and time.monotonic() < patience:
            time.sleep(0.5)
        if not all(self.ranks.distinct(seen)):
            raise UserError(f"{self.path} is not the same folder on all nodes. Put it on storage that they share.")
        self.ranks.on_rank0(probe.unlink)
