"""Garbage collection at fixed steps, so that no rank stops for it while the others wait in a collective."""

from __future__ import annotations

import gc

from titanlite.hooks.hook import Hook, StepResult, Training


class GarbageCollection(Hook):
    """Collects every training.gc_freq steps, and at no other time until the trainer is closed."""

    def built(self, training: Training) -> None:
        self._freq = training.run.job.training.gc_freq
        training.opened.callback(gc.enable)

    def train_begins(self, step: int) -> None:
        gc.collect()
        gc.disable()

    def after_step(self, step: int, result: StepResult) -> None:
        if not gc.isenabled() and step % self._freq == 0:
            gc.collect(1)  # the young generations, because they have the garbage of a step
