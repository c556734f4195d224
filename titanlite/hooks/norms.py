"""Norms by group of parameters in the steps that are logged (metrics.details)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from titanlite.hooks.hook import Hook, Training
from titanlite.optim.norms import ParameterNorms


class Norms(Hook):
    """`details` has "gradients", "updates" or both."""

    def __init__(self, details: Collection[str]) -> None:
        self._details = details

    def built(self, training: Training) -> None:
        self._is_logged = training.meter.is_log_step
        asked = {name: name in self._details for name in ("gradients", "updates")}
        self._norms = ParameterNorms(training.model, training.optimizer, training.run.arch, **asked)

    def gradients(self, step: int) -> None:
        if self._is_logged(step):
            self._norms.add_gradients()

    def updated(self, step: int) -> None:
        if self._is_logged(step):
            self._norms.add_updates()

    def numbers(self, step: int) -> Mapping[str, Any]:
        return self._norms.describe(self._norms.total().tolist())
