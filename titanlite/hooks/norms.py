"""Norms by group of parameters in the steps that are logged (metrics.details)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlite.hooks.hook import Hook, Training
from titanlite.optim.norms import ParameterNorms


class Norms(Hook):
    """Of the gradients, of the updates, or of both."""

    def built(self, training: Training) -> None:
        self._is_logged, details = training.meter.is_log_step, training.run.job.metrics.details
        asked = {name: name in details for name in ("gradients", "updates")}
        self._norms = ParameterNorms(training.model, training.optimizer, training.run.arch, **asked)

    def gradients(self, step: int) -> None:
        if self._is_logged(step):
            self._norms.add_gradients()

    def updated(self, step: int) -> None:
        if self._is_logged(step):
            self._norms.add_updates()

    def numbers(self, step: int) -> Mapping[str, Any]:
        return self._norms.describe(self._norms.total().tolist())
