"""Learning rates equal the ones of torchtitan in all steps."""

import pytest
from ranks import run_small
from small_runs import job_tables, list_saved_steps

from titanlite.config import schema
from titanlite.optim.schedule import wsd_learning_rate

PEAK = 2.0

# Learning rates of ten steps with the scheduler of torchtitan 0.2.2, as shares of the peak.
TORCHTITAN = [
    (
        "warmup_steps = 2",
        [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
    ),
    (
        "warmup_steps = 2 ; min_lr_factor = 0.1",
        [0.5, 1, 1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125],
    ),
    (
        "warmup_steps = 3 ; decay_ratio = 0.5 ; decay_type = 'cosine' ; min_lr_factor = 0.1",
        [1 / 3, 2 / 3, 1, 1, 1, 1, 0.914058, 0.689058, 0.410942, 0.185942],
    ),
    (
        "warmup_steps = 0 ; decay_ratio = 0.4 ; decay_type = 'sqrt'",
        [1, 1, 1, 1, 1, 1, 1, 0.5, 0.292893, 0.133975],
    ),
    (
        "warmup_steps = 4 ; decay_ratio = 0.0",
        [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1],
    ),
    (
        "warmup_steps = 8 ; decay_ratio = 1.0",
        [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1, 0.5],
    ),
    (
        "warmup_steps = 10",
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1],
    ),
]


def learning_rates(total: int, options: str = "") -> list[float]:
    config = schema.LRScheduler.model_validate(job_tables(options))
    return [wsd_learning_rate(step, PEAK, config, total) for step in range(1, total + 1)]


@pytest.mark.parametrize(("options", "shares"), TORCHTITAN)
def test_learning_rates_equal_those_of_torchtitan(options, shares):
    expected = [PEAK * share for share in shares]

    assert learning_rates(10, options) == pytest.approx(expected, abs=1e-6)


def test_a_run_can_train_only_the_first_steps_of_a_schedule():
    whole = learning_rates(10, "warmup_steps = 4")

    assert learning_rates(3, "total_steps = 10 ; warmup_steps = 4") == whole[:3]


@pytest.mark.parametrize(
    ("total", "warmup"),
    [(10000, 200), (100, 10), (5, 0)],
)
def test_default_warmup_fits_the_length_of_the_run(total, warmup):
    assert learning_rates(total) == learning_rates(total, f"warmup_steps = {warmup}")


SCHEDULE = """
from titanlite import register

@register("schedule", "broken_schedule")
def broken_schedule(step, peak, config, steps):
    return {RATE} if step == 5 else peak
"""


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["float('nan')", "-1.0", "None"])
def test_an_invalid_learning_rate_ends_the_run_before_the_update(rate, tmp_path, write_plugin):
    write_plugin("broken_plugin", SCHEDULE.replace("{RATE}", rate))
    plugin = "--job.plugins broken_plugin --lr_scheduler.name broken_schedule"
    options = "--training.steps 6 --checkpoint.interval 2"

    output = run_small(tmp_path / "out", plugin, options, code=2)

    assert "broken_schedule" in output
    assert list_saved_steps(tmp_path / "out") == [2, 4]
