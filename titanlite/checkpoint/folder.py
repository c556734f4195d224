"""The folder of a run's checkpoints while the run has it, and how its ranks agree on what they see there.

Invariant: all ranks of the run see the same folder, and nothing in it is left over from a save that was cut short. Each
method of `Ranks` is called by all ranks together. The lock of the run keeps other runs out.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.config import schema
from titanlite.config.errors import Damage, UserError
from titanlite.runtime.world import gathered

T = TypeVar("T")


class Ranks:
    """A gloo group over all ranks, beside the one that training uses, so that nothing travels through a GPU.

    Args:
        timeout_seconds: the longest wait for another rank; None: this process is alone, and there is no group.
    """

    def __init__(self, timeout_seconds: int | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if timeout_seconds is not None:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            self.group, self.rank, self.size = cast(dist.ProcessGroup, group), dist.get_rank(), dist.get_world_size()

    def close(self) -> None:
        """Destroy the group. Its threads must not outlive the interpreter, or the process may abort at exit."""
        dist.barrier(self.group)
        dist.destroy_process_group(self.group)
        del self.group

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, which should be small: at thousands of ranks they add up."""
        return [value] if self.group is None else gathered(value, self.group)

    def together(self, function: Callable[[], T]) -> T:
        """Call it on every rank; each gets its own value.

        Raises:
            UserError: on every rank, if the function raised one, an OSError or a ValueError on any. It is Damage only
                if no rank raised anything else: what could not be read now is not called damaged.
        """
        value, failure = None, None
        try:
            value = function()
        except UserError as error:
            failure = error
        except (OSError, ValueError) as error:
            failure = UserError(f"{type(error).__name__}: {error}")
        if failures := [failure for failure in self.gather(failure) if failure is not None]:
            raise min(failures, key=lambda failure: isinstance(failure, Damage))
        return cast(T, value)

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Call it on rank 0; its value comes back on every rank. Raises as `together`."""
        value = [self.together(lambda: function() if self.rank == 0 else None)]
        dist.broadcast_object_list(value, src=0, group=self.group)
        return cast(T, value[0])

    def check(self, path: Path) -> dict[str, Any]:
        """`step_folders.check_folder`; the ranks share the reading. Raises as `together`."""
        return self.together(lambda: step_folders.check_folder(path, lambda names: names[self.rank :: self.size]))


@dataclass
class CheckpointFolder:
    """All ranks open one together, before the first save or load, and close its `ranks` after the last.

    Args:
        path: where the step folders lie; all nodes must share it.
        live: what is saved from there and loaded into.
        log: called with one line of text for each event that a person should know, also from other threads.
        job: the resolved job file as a JSON value, kept in the manifests and compared with theirs.
        changes: False: nothing is saved there, and no file is touched, because the folder is another process's.

    Attributes:
        token: equal on all ranks and used by no other run; temporary folders are named after it.

    Raises:
        UserError: on all ranks: the folder cannot be written to, or the nodes do not share it.
    """

    config: schema.Checkpoint
    path: Path
    live: LiveState
    log: Callable[[str], None]
    job: dict[str, Any] | None = None
    changes: bool = True

    def __post_init__(self) -> None:
        self.ranks = Ranks(self.config.timeout_seconds)
        if not self.changes:
            return
        self.token = self.ranks.on_rank0(self._clean)
        probe = self.path / f"{step_folders.UNFINISHED}{self.token}"
        patience = time.monotonic() + 10  # network storage shows another node's file with a delay
        while not (seen := probe.exists()) and time.monotonic() < patience:
            time.sleep(0.5)
        if not all(self.ranks.gather(seen)):
            raise UserError(f"{self.path} is not the same folder on all nodes. Put it on storage that they share.")
        self.ranks.on_rank0(probe.unlink)

    def check_room(self, size: int) -> None:
        """Raise a UserError on all ranks if a checkpoint of so many bytes, over all ranks, does not fit on the disk."""
        free = self.ranks.on_rank0(lambda: shutil.disk_usage(self.path).free)
        if free < size:
            needed = f"{self.path}: a checkpoint takes about {size / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
            raise UserError(f"{needed}. Free some space, or choose another checkpoint.folder.")

    def _clean(self) -> str:
        """On rank 0: remove what is left over, and make a file whose name no earlier run has used."""
        self.path.mkdir(parents=True, exist_ok=True)
        for at, end in ((self.path, ""), (self.path.parent / "final", ""), (self.path.parent, "final_hf-")):
            step_folders.remove_unfinished(at, self.log, step_folders.UNFINISHED + end)
        token = secrets.token_hex(8)
        (self.path / f"{step_folders.UNFINISHED}{token}").touch(exist_ok=False)
        return token
