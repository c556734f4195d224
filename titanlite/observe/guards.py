"""Guards that stop a run which cannot recover by itself.

Invariant: a guard uses numbers that the host has read for the log, so it costs nothing. All ranks have the same reduced
numbers, so they decide the same.
"""

from __future__ import annotations

import math

from titanlite.config.errors import GuardError


def check_finite(loss: float, grad_norm: float, step: int) -> None:
    """Stop if the loss or the gradient norm of `step` is NaN or infinite.

    One non-finite gradient makes every weight NaN through clipping and the optimizer. No later step can repair that.

    Raises:
        GuardError: names the step, what was not finite, and what to do.
    """
    wrong = [
        f"{name} is {value}" for name, value in (("loss", loss), ("grad_norm", grad_norm)) if not math.isfinite(value)
    ]
    if not wrong:
        return
    raise GuardError(
        f"Step {step}: {' and '.join(wrong)}. The weights are useless now and were not saved. "
        "Before you start again, lower optimizer.lr, raise lr_scheduler.warmup_steps, or set a lower "
        "training.max_norm (0 turns clipping off). "
        "If it happens at the same step whatever you set, look at the data of that step."
    )
