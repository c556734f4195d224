"""What the ranks tell each other about files: small JSON values, between hosts.

Invariant: every method is called by all ranks together and returns the same on each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from titanlite.checkpoint import step_folders
from titanlite.config.errors import CheckpointError, Damage, UserError

T = TypeVar("T")


class Ranks:
    """A gloo group over all ranks, beside the one that training uses, so that nothing travels through a GPU."""

    def __init__(self, timeout_seconds: int) -> None:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

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
        value: list[T] = []
        failures: list[tuple[bool, str]] = []
        try:
            value = [function()]
        except CheckpointError as error:
            failures = [(isinstance(error, Damage), str(error))]
        failures = [failure for of_rank in self.distinct(failures) for failure in of_rank]
        if reasons := sorted(reason for is_damage, reason in failures if not is_damage):
            raise CheckpointError("\n".join(reasons))
        if failures:
            raise Damage("; ".join(sorted(reason for _, reason in failures)))
        return value[0]

    def union(self, lines: list[str]) -> list[str]:
        """Every line that some rank holds, once, sorted."""
        return sorted({line for of_rank in self.distinct(lines) for line in of_rank})

    def check(self, path: Path) -> None:
        """`step_folders.check_folder`; the ranks share the reading. Raises as `together`."""
        self.together(lambda: step_folders.check_folder(path, lambda names: names[self.rank :: self.size]))

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Call it on rank 0; its value comes back on every rank.

        Raises:
            UserError: on every rank, if the function raised one, an OSError or a ValueError.
        """
        result: list[Any] = [None, None]
        if self.rank == 0:
            try:
                result[0] = function()
            except UserError as error:
                result[1] = error
            except (OSError, ValueError) as error:
                result[1] = UserError(f"Checkpoints: {type(error).__name__}: {error}")
        dist.broadcast_object_list(result, src=0, group=self.group)
        if result[1] is not None:
            raise result[1]
        return result[0]
