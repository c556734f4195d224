"""A report of a rank whose step takes too long, and the longest wait for collectives.

Invariant: the first step has the time of a start, because kernels are compiled in it. Later ones have less.
"""

from __future__ import annotations

import os

from titanlite.config.errors import ERROR_FOLDER
from titanlite.hooks.hook import Hook, StepResult, Training
from titanlite.runtime.hang_report import HangWatch, set_timeout


class HangReport(Hook):
    """Watches from when it is made, which is before the model is built."""

    def __init__(self, training: Training) -> None:
        comm = training.run.job.comm
        self._groups, self._timeout = training.mesh.groups, comm.train_timeout_seconds
        self._limit = min(comm.train_timeout_seconds, training.run.job.checkpoint.timeout_seconds)
        set_timeout(self._groups, comm.init_timeout_seconds)
        folder = os.environ.get(ERROR_FOLDER)
        self._watch = HangWatch(folder, training.rank, comm.init_timeout_seconds, training.hosts)
        training.opened.callback(self._watch.close)
        self._step = 0

    def after_step(self, step: int, result: StepResult) -> None:
        if self._step == 0:
            set_timeout(self._groups, self._timeout)
        self._step = step
        self.alive()

    def alive(self) -> None:
        """Note that this rank is at work beside its steps."""
        self._watch.passed(self._step, self._limit)
