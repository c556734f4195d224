"""Estimate how long a training run takes, with an interval based on published measurements.

Invariant: The interval depends only on published measurements. The estimate itself comes from the
roofline model, which is not fitted to these measurements.
"""

from __future__ import annotations

from titanlite.observe.forecast import Forecast, TrainingTime

# 90% interval of the ratio of actual to planned training time. `benchmarks/published.py` computes
# it from the last column of the table in docs/internals/planner.md#time-accuracy.
RATIO_LOW = 0.8912017292082024
RATIO_HIGH = 1.3153074414876675


def estimate_training(plan: Forecast, tokens: int) -> TrainingTime:
    """Estimate the days and GPU-hours that a job needs to train on `tokens` tokens.

    The low and high estimates are the ends of a 90% interval, which is derived from the ratio of
    actual to planned training time in published benchmarks.
    """
    tokens_per_second = plan.tokens_per_second * plan.world_size  # a plan has the speed per rank
    seconds = tokens / tokens_per_second
    days = seconds / 86400
    gpu_hours = seconds / 3600 * plan.world_size
    return TrainingTime(
        tokens=tokens,
        days=days,
        days_low=RATIO_LOW * days,
        days_high=RATIO_HIGH * days,
        gpu_hours=gpu_hours,
        gpu_hours_low=RATIO_LOW * gpu_hours,
        gpu_hours_high=RATIO_HIGH * gpu_hours,
    )
