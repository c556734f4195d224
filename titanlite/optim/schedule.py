"""Learning rate schedules.

The built-in schedule is warmup-stable-decay (https://arxiv.org/abs/2404.06395). Its value at each
step equals that of torchtitan 0.2.2. The learning rate is a pure function of the step, so a resumed
run has no schedule state to restore.
"""

from __future__ import annotations

import math

from titanlite.config import schema
from titanlite.config.registry import SCHEDULES


def learning_rate_at(job: schema.JobConfig, step: int) -> float:
    """Return the learning rate of one optimizer step.

    It is the value of the schedule `lr_scheduler.name`, multiplied by the `lr_factor` of the
    current data stage. A data stage is a part of the run with separate data settings.

    Args:
        job: The validated job.
        step: Optimizer step, counted from 1.
    """
    config = job.lr_scheduler
    steps = job.training.steps
    scheduled = SCHEDULES.make(config.name, job, step, job.optimizer.lr, config, steps)
    stage_factor = job.dataset.get_stage_value("lr_factor", step - 1, 1.0)
    return scheduled * stage_factor


def wsd_learning_rate(step: int, peak: float, config: schema.LRScheduler, steps: int) -> float:
    """Compute the warmup-stable-decay learning rate of one step.

    The learning rate rises linearly to `peak`, stays there, and then decays toward
    `peak * config.min_lr_factor`. The first step after warmup uses `peak`. The minimum would be
    reached one step after the last step, so no step has a learning rate of zero.

    Args:
        step: Optimizer step, counted from 1.
        peak: Learning rate between warmup and decay.
        config: Section [lr_scheduler] of the job: lengths of warmup and decay, and shape of the
            decay.
        steps: Number of optimizer steps in the run. `config.total_steps` overrides it.
    """
    total_steps = config.total_steps or steps
    warmup_steps = config.warmup_steps
    if warmup_steps is None:
        warmup_steps = min(200, total_steps // 10)

    # Warmup: rise linearly to the peak.
    if step <= warmup_steps:
        return peak * (step / warmup_steps)

    # Stable part: stay at the peak. By default, decay follows directly after warmup.
    decay_steps = total_steps - warmup_steps
    if config.decay_steps is not None:
        decay_steps = min(config.decay_steps, decay_steps)
    elif config.decay_ratio is not None:
        decay_steps = min(round(total_steps * config.decay_ratio), decay_steps)
    last_peak_step = total_steps + 1 - decay_steps
    if step <= last_peak_step:
        return peak

    # Decay: `remaining` falls from 1 to 0.
    progress = (step - last_peak_step) / decay_steps
    if config.decay_type == "linear":
        remaining = 1.0 - progress
    elif config.decay_type == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:  # "sqrt": https://arxiv.org/abs/2405.18392
        remaining = 1.0 - math.sqrt(progress)
    lr_factor = config.min_lr_factor + (1.0 - config.min_lr_factor) * remaining
    return peak * lr_factor
