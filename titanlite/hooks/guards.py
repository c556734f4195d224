"""Guards that stop a run which cannot recover by itself.

Invariant: a guard uses numbers that the host has read for the log or is about to save, so it costs nothing. All ranks
have the same reduced numbers, so they decide the same.
"""

from __future__ import annotations

import math

from torch import Tensor

from titanlite.config.errors import GuardError
from titanlite.hooks.hook import Hook, StepResult
from titanlite.observe.logged_step import LoggedStep


class NonFiniteGuard(Hook):
    """Stops a run whose loss or gradient norm is NaN or infinite, and lets nothing after it be saved."""

    _grad_norm: Tensor | None = None

    def after_step(self, step: int, result: StepResult) -> None:
        self._grad_norm = result.grad_norm

    def logged(self, entry: LoggedStep) -> None:
        self._check(entry.step, loss=entry.loss, grad_norm=entry.grad_norm)

    def saving(self, step: int) -> None:
        if self._grad_norm is not None:
            self._check(step, grad_norm=self._grad_norm.item())

    def _check(self, step: int, **numbers: float) -> None:
        """Stop if a number is NaN or infinite. One such gradient makes every weight NaN through clipping and the
        optimizer, and no later step can repair that.

        Raises:
            GuardError: names the step, what was not finite, and what to do.
        """
        if wrong := [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]:
            raise GuardError(
                f"Step {step}: {' and '.join(wrong)}. The weights are useless now and were not saved. Before you start "
                "again, lower optimizer.lr or training.max_norm, or raise lr_scheduler.warmup_steps. If it happens at "
                "the same step whatever you set, look at the data of that step."
            )
