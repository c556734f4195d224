"""A CPU process group through which ranks agree on files that they share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

from titanlite.config.errors import Damage, UserError
from titanlite.runtime.world import gathered

T = TypeVar("T")
# Errors from gloo do not name the option that sets the timeout.
_TIMEOUT_HINT = (
    "Another rank has failed, or was too slow. "
    "If it was slow to save or to load, increase checkpoint.timeout_seconds."
)


class RankGroup:
    """A gloo process group of all ranks, used to coordinate file access, such as saves.

    The group is separate from the groups of the training step, so a background thread can use it
    while training continues. All ranks must call each method together.

    Args:
        timeout_seconds: Longest time to wait for another rank. If None, create no process group:
            `gather` and `run_together` then consider only this process, and the other methods must
            not be called.

    Attributes:
        group: The process group, or None.
        rank: Number of this rank; 0 without a process group.
        size: Number of ranks; 1 without a process group.
    """

    def __init__(self, timeout_seconds: int | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank = 0
        self.size = 1
        if timeout_seconds is not None:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            self.group = cast(dist.ProcessGroup, group)
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()

    def close(self) -> None:
        """Wait for all ranks, and destroy the process group.

        Call this method before Python exits, because the threads of the group must end first.
        """
        dist.barrier(self.group)
        dist.destroy_process_group(self.group)
        del self.group

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order. Values are pickled, so keep them small."""
        if self.group is None:
            return [value]
        try:
            return gathered(value, self.group)
        except RuntimeError as error:
            error.add_note(_TIMEOUT_HINT)
            raise

    def run_together(self, function: Callable[[], T]) -> T:
        """Call `function` on every rank, and return this rank's result if no rank fails.

        An error on one rank is raised on all of them, so no rank continues alone and waits forever.

        Raises:
            UserError: On all ranks, if `function` raised a UserError, OSError or ValueError on any
                rank. The error is `Damage` (a file with wrong content) only if all failing ranks
                raised `Damage`.
        """
        # Keep the error of this rank until all ranks have called the function.
        result = None
        error_here = None
        try:
            result = function()
        except UserError as error:
            error_here = error
        except (OSError, ValueError) as error:
            error_here = UserError(f"{type(error).__name__}: {error}")

        errors = [error for error in self.gather(error_here) if error is not None]
        if errors:
            raise _choose_error(errors)
        return cast(T, result)

    def run_on_rank0(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 only, and return its result on every rank.

        The result is pickled, so keep it small.

        Raises:
            UserError: On all ranks, if `function` raised a UserError, OSError or ValueError on rank
                0.
        """
        result = self.run_together(lambda: function() if self.rank == 0 else None)
        objects = [result]
        dist.broadcast_object_list(objects, src=0, group=self.group)
        return cast(T, objects[0])


def _choose_error(errors: list[UserError]) -> UserError:
    """Choose the error to raise on all ranks: the first that is not `Damage`, or else the first.

    `Damage` makes callers treat a file as damaged. If any rank failed for another reason, the file
    may be intact, so the other error is raised.
    """
    other_errors = (error for error in errors if not isinstance(error, Damage))
    return next(other_errors, errors[0])
