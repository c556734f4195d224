"""Collect Python garbage at fixed steps.

With automatic collection, each rank would pause at a different time while the other ranks wait for
it in a collective.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from titanlite.hooks.hook import Hook

if TYPE_CHECKING:
    from titanlite.train.step import StepResult


class GarbageCollection(Hook):
    """Runs the Python garbage collector on all ranks at the same steps instead of at random times.

    Automatic collection is disabled, because a pause on one rank makes all other ranks wait.
    """

    def __init__(self, interval: int) -> None:
        """Store the interval between collections, in steps (training.gc_freq)."""
        self._interval = interval

    def train_begins(self, step: int) -> None:
        """Collect garbage once and disable automatic collection."""
        gc.collect()
        gc.disable()

    def after_step(self, step: int, result: StepResult) -> None:
        """Collect garbage every `training.gc_freq` steps, unless automatic collection is enabled.

        It stays enabled if a program calls `Trainer.step` in a loop, because `train_begins` is then
        not called. Skip objects in the oldest generation, because they are rarely garbage.
        """
        if not gc.isenabled() and step % self._interval == 0:
            gc.collect(1)

    def close(self) -> None:
        """Re-enable automatic collection."""
        gc.enable()
