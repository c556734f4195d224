"""Estimates how long a training run takes, with an interval from published measurements.

Invariant: The interval depends on nothing but `PLAN_TO_PUBLISHED`. The estimate itself comes from
the roofline model, which is not fitted to these measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist

from titanlite.observe.forecast import Forecast, TrainingTime

# Planned speed divided by published speed: the last column of the table in
# docs/internals/planner.md#time-accuracy. `python benchmarks/published.py` prints this line.
PLAN_TO_PUBLISHED = (
    1.02,
    1.11,
    1.12,
    1.07,
    1.16,
    1.17,
    1.1,
    0.94,
    1.22,
    1.25,
    0.95,
    1.0,
    1.06,
    1.07,
    1.03,
    1.03,
    0.94,
    1.01,
    1.09,
    1.11,
    1.0,
    1.01,
    0.97,
    0.92,
    1.19,
    1.3,
    1.07,
    1.12,
    1.12,
    1.18,
    1.37,
    1.53,
    0.98,
    1.2,
    0.88,
    0.9,
    1.16,
)


def estimate_training(plan: Forecast, tokens: int) -> TrainingTime:
    """Estimate the days and GPU hours that a job needs to train on `tokens` tokens.

    The low and high estimates are the ends of a 90% interval. It follows from measurements that
    others have published: the ratio of the planned speed of a job to the published speed.
    """
    tokens_per_second = plan.tokens_per_second * plan.world_size  # a plan has the speed per rank
    seconds = tokens / tokens_per_second
    days = seconds / 86400
    gpu_hours = seconds / 3600 * plan.world_size
    low, high = ratio_interval(PLAN_TO_PUBLISHED)
    return TrainingTime(
        tokens=tokens,
        days=days,
        days_low=low * days,
        days_high=high * days,
        gpu_hours=gpu_hours,
        gpu_hours_low=low * gpu_hours,
        gpu_hours_high=high * gpu_hours,
    )


def ratio_interval(ratios: Iterable[float]) -> tuple[float, float]:
    """Fit a log-normal distribution to `ratios`, and return its 5% and 95% quantiles.

    Args:
        ratios: Planned speed divided by measured speed of each job, which equals its measured time
            divided by its planned time.
    """
    logs = NormalDist.from_samples([math.log(ratio) for ratio in ratios])
    return math.exp(logs.inv_cdf(0.05)), math.exp(logs.inv_cdf(0.95))
