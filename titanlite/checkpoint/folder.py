"""The folder of a run's checkpoints while the run has it, and how its ranks agree on what they see there.

Invariant: one run at a time has the folder, all of its ranks see the same one, and nothing in it is left over from a
save that was cut short. Each method of `Ranks` is called by all ranks together and gives the same on each.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from titanlite.checkpoint import step_folders
from titanlite.config import schema
from titanlite.config.errors import CheckpointError, Damage, UserError

LOCK_PATIENCE = 120  # seconds; the workers of a launcher that was killed save before they end

T = TypeVar("T")


class Ranks:
    """A gloo group over all ranks, beside the one that training uses, so that nothing travels through a GPU."""

    def __init__(self, timeout_seconds: int) -> None:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.group = cast(dist.ProcessGroup, group)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def close(self) -> None:
        """Destroy the group. Its threads must not outlive the interpreter, or the process may abort at exit."""
        dist.barrier(self.group)
        dist.destroy_process_group(self.group)
        del self.group

    def distinct(self, value: T) -> list[T]:
        """The different JSON values that the ranks hold. Equal ones travel once: at thousands of ranks, lists of
        names would add up to gigabytes."""
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
        digests: list[Any] = [None] * self.size
        dist.all_gather_object(digests, digest, group=self.group)
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, (value,) if digests.index(digest) == self.rank else None, group=self.group)
        return [entry[0] for entry in values if entry is not None]

    def together(self, function: Callable[[], T]) -> T:
        """Call it on every rank; each gets its own value.

        Raises:
            Damage: on every rank, if some ranks raised it, and no rank another CheckpointError.
            CheckpointError: on every rank, if one raised it: what could not be read now is not called damaged.
        """
        value, failure = None, None
        try:
            value = function()
        except CheckpointError as error:
            failure = isinstance(error, Damage), str(error)
        if failures := [failure for failure in self.distinct(failure) if failure is not None]:
            kind = Damage if all(is_damage for is_damage, _ in failures) else CheckpointError
            raise kind("; ".join(sorted(text for _, text in failures)))
        return cast(T, value)

    def check(self, path: Path) -> None:
        """`step_folders.check_folder`; the ranks share the reading. Raises as `together`."""
        self.together(lambda: step_folders.check_folder(path, lambda names: names[self.rank :: self.size]))

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Call it on rank 0; its value comes back on every rank.

        Raises:
            UserError: on every rank, if the function raised one, an OSError or a ValueError.
        """
        value, failure = None, None
        if self.rank == 0:
            try:
                value = function()
            except UserError as error:
                failure = error
            except (OSError, ValueError) as error:
                failure = UserError(f"Checkpoints: {type(error).__name__}: {error}")
        result = [value, failure]
        dist.broadcast_object_list(result, src=0, group=self.group)
        if isinstance(result[1], UserError):
            raise result[1]
        return cast(T, result[0])


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
        self.config, self.path, self.log = config, path, log
        self.ranks = Ranks(config.timeout_seconds)
        self._lock: int | None = None  # on rank 0
        self.token = self.ranks.on_rank0(self._take)
        patience = time.monotonic() + 10  # network storage shows another node's file with a delay
        while not (seen := self._probe(self.token).exists()) and time.monotonic() < patience:
            time.sleep(0.5)
        if not all(self.ranks.distinct(seen)):
            raise UserError(f"{path} is not the same folder on all nodes. Put it on storage that they share.")
        self.ranks.on_rank0(lambda: self._probe(self.token).unlink())

    def say(self, line: str) -> None:
        """Log a line that all ranks know; rank 0 writes it."""
        if self.ranks.rank == 0:
            self.log(line)

    def check_room(self, size: int) -> None:
        """Raise a UserError on all ranks if a checkpoint of so many bytes, over all ranks, does not fit on the disk."""
        free = self.ranks.on_rank0(lambda: shutil.disk_usage(self.path).free)
        if free < size:
            needed = f"{self.path}: a checkpoint takes about {size / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
            raise UserError(f"{needed}. Free some space, or choose another checkpoint.folder.")

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
        beside, gone = self.path.parent, []
        for at, end in ((self.path, ""), (beside / "final", ""), (beside, "final_hf-")):
            gone += step_folders.remove_unfinished(at, self.log, step_folders.UNFINISHED + end)
        if gone:
            self.log(f"removed {len(gone)} unfinished checkpoint folders: {', '.join(gone)}")
        token = secrets.token_hex(8)
        self._probe(token).touch(exist_ok=False)
        return token

    def _probe(self, token: str) -> Path:
        return self.path / f"{step_folders.UNFINISHED}probe-{token}"
