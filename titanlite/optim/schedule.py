"""Learning rate schedules.

The built-in schedule is warmup-stable-decay (https://arxiv.org/abs/2404.06395). It matches the
torchtitan 0.2.2 schedule at every step. The learning rate is a pure function of the step, so a
resumed run has no schedule state to restore.
"""

from __future__ import annotations

import math

from titanlite.config import schema
from titanlite.config.errors import UserError
from titanlite.config.registry import SCHEDULES


def learning_rate_at(job: schema.JobConfig, step: int) -> float:
    """Return the learning rate of one optimizer step.

    The schedule `lr_scheduler.name` is multiplied by the `lr_factor` of the current data stage. A
    data stage is a part of the run with separate data settings.

    Args:
        job: The validated job.
        step: Optimizer step, counted from 1.

    Raises:
        UserError: If the schedule does not return a finite number of at least 0.
    """
    config = job.lr_scheduler
    peak_lr = job.optimizer.lr
    # Call the registered schedule. `make` adds the section with the options of a plugin schedule.
    scheduled = SCHEDULES.make(config.name, step, peak_lr, config, job.training.steps, job=job)
    try:
        lr = float(scheduled)
    except (TypeError, ValueError):
        lr = math.nan  # rejected below
    if not 0 <= lr < math.inf:
        raise UserError(
            f"The schedule {config.name} returned {scheduled} as the learning rate of step {step}. "
            "Change it to return a finite number of at least 0."
        )
    return lr * job.dataset.get_stage_value("lr_factor", step - 1, 1.0)


def wsd_learning_rate(step: int, peak: float, config: schema.LRScheduler, run_steps: int) -> float:
    """Compute the warmup-stable-decay learning rate of one step.

    The learning rate rises linearly to `peak`, stays there, and then decays towards
    `peak * config.min_lr_factor`. For example, with 10 steps, including 2 warmup steps and 4 decay
    steps, steps 2 to 7 have the learning rate `peak`. Steps 8, 9 and 10 have completed 1/4, 2/4 and
    3/4 of the decay.

    Args:
        step: Optimizer step, counted from 1.
        peak: Learning rate between warmup and decay.
        config: Lengths of warmup and decay, and shape of the decay.
        run_steps: Number of optimizer steps in the run. `config.total_steps` overrides it.
    """
    total_steps = config.total_steps or run_steps
    warmup_steps = config.count_warmup_steps(total_steps)
    decay_steps = _count_decay_steps(config, total_steps, warmup_steps)
    # As in torchtitan, the decay would be complete one step after the last step.
    last_peak_step = total_steps + 1 - decay_steps

    if step <= warmup_steps:
        return peak * (step / warmup_steps)
    if step <= last_peak_step:
        return peak

    # Decay from `peak` to the minimum, as `remaining` falls from 1 to 0.
    progress = (step - last_peak_step) / decay_steps
    remaining = _decay(progress, config.decay_type)
    lr_factor = config.min_lr_factor + (1.0 - config.min_lr_factor) * remaining
    return peak * lr_factor


def _count_decay_steps(config: schema.LRScheduler, total_steps: int, warmup_steps: int) -> int:
    """Return the number of decay steps. The default and maximum are all steps after warmup."""
    steps_after_warmup = total_steps - warmup_steps
    if config.decay_steps is not None:
        return min(config.decay_steps, steps_after_warmup)
    if config.decay_ratio is not None:
        return min(round(total_steps * config.decay_ratio), steps_after_warmup)
    return steps_after_warmup


def _decay(progress: float, decay_type: str) -> float:
    """Return a factor that falls from 1 to 0 while `progress` rises from 0 to 1."""
    if decay_type == "linear":
        return 1.0 - progress
    if decay_type == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - math.sqrt(progress)  # "sqrt": https://arxiv.org/abs/2405.18392
