"""Warmup-stable-decay learning rates (https://arxiv.org/abs/2404.06395).

Invariant: the rate is a pure function of the step, so a resume has nothing to restore.
"""

from __future__ import annotations

import math

from titanlite.config import schema


def learning_rate(step: int, peak: float, config: schema.LRScheduler, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 1.

    Decay reaches `peak * min_lr_factor` one step after the last step, so that no step has a rate of zero.
    """
    warmup_steps = min(200, total_steps // 10) if config.warmup_steps is None else config.warmup_steps
    if step <= warmup_steps:
        return peak * step / warmup_steps
    after_warmup = total_steps - warmup_steps
    decay_steps = (
        after_warmup if config.decay_ratio is None else min(round(total_steps * config.decay_ratio), after_warmup)
    )
    steps_left = total_steps - step
    if steps_left >= decay_steps:
        return peak
    left = (steps_left + 1) / (decay_steps + 1)  # 1 at the last stable step, 0 one step after the last step
    if config.decay_type == "linear":
        shape = left
    elif config.decay_type == "cosine":
        shape = 0.5 * (1.0 - math.cos(math.pi * left))
    else:  # 1 - sqrt(progress): https://arxiv.org/abs/2405.18392
        shape = 1.0 - math.sqrt(1.0 - left)
    return peak * (config.min_lr_factor + (1.0 - config.min_lr_factor) * shape)
