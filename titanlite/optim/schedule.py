"""Warmup-stable-decay learning rates (https://arxiv.org/abs/2404.06395), with torchtitan 0.2.2's value at each step.

Invariant: the rate is a pure function of the step, so a resume has nothing to restore.
"""

from __future__ import annotations

import math

from titanlite.config import schema
from titanlite.config.registry import SCHEDULES


def rate_of(job: schema.JobConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 1, with the factor of its stage (dataset.stages)."""
    schedule = job.lr_scheduler
    rate = SCHEDULES.make(schedule.name, job, step, job.optimizer.lr, schedule, job.training.steps)
    return rate * job.dataset.staged(lambda stage: stage.lr_factor, step - 1, 1.0)


def learning_rate(step: int, peak: float, config: schema.LRScheduler, steps: int) -> float:
    """The rate of optimizer step `step`, counted from 1, in a run of `steps` steps.

    The first step after warmup has the peak rate. Decay ends at `peak * min_lr_factor` one step after the last step, so
    that no step has a rate of zero.
    """
    total_steps = config.total_steps or steps
    warmup_steps = min(200, total_steps // 10) if config.warmup_steps is None else config.warmup_steps
    if step <= warmup_steps:
        return peak * (step / warmup_steps)
    decay_steps = total_steps - warmup_steps
    if config.decay_ratio is not None:
        decay_steps = min(round(total_steps * config.decay_ratio), decay_steps)
    decayed = step - (total_steps + 1 - decay_steps)
    if decayed <= 0:
        return peak
    progress = decayed / decay_steps
    if config.decay_type == "linear":
        shape = 1.0 - progress
    elif config.decay_type == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:  # https://arxiv.org/abs/2405.18392
        shape = 1.0 - math.sqrt(progress)
    return peak * (config.min_lr_factor + (1.0 - config.min_lr_factor) * shape)
