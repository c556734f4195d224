"""Warmup, plateau, decay."""

from typing import Any

import pytest

from titanlite.config import schema
from titanlite.optim.schedule import learning_rate

PEAK = 2.0


def rates(total: int = 100, **keys: Any) -> list[float]:
    config = schema.LRScheduler.model_validate(keys)
    return [learning_rate(step, PEAK, config, total) for step in range(1, total + 1)]


def test_warmup_rises_in_equal_steps_to_the_peak() -> None:
    assert rates(warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_no_warmup_starts_at_the_peak() -> None:
    assert rates(warmup_steps=0, decay_ratio=0.5)[0] == PEAK


def test_stable_until_decay_and_no_step_at_zero() -> None:
    values = rates(warmup_steps=10, decay_ratio=0.25)
    assert values[9:75] == [PEAK] * 66
    assert values[75] < PEAK
    assert values[-1] == pytest.approx(PEAK / 26)  # 25 steps of decay end right after the last step


def test_without_a_ratio_decay_follows_warmup() -> None:
    values = rates(warmup_steps=10)
    assert values[10] < values[9] == PEAK


def test_decay_never_cuts_warmup_short() -> None:
    assert rates(warmup_steps=50, decay_ratio=1.0)[:50] == rates(warmup_steps=50)[:50]


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_shapes_at_half_time(kind: str, middle: float) -> None:
    values = rates(total=99, warmup_steps=0, decay_type=kind, decay_ratio=1.0)
    assert values[49] == pytest.approx(PEAK * middle)


@pytest.mark.parametrize("kind", ["linear", "cosine", "sqrt"])
def test_ends_at_the_floor(kind: str) -> None:
    values = rates(total=10000, warmup_steps=0, decay_type=kind, min_lr_factor=0.1)
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(0.1 * PEAK, rel=0.01)


def test_whole_run_of_warmup() -> None:
    assert rates(total=5, warmup_steps=5)[-1] == PEAK


@pytest.mark.parametrize(("total", "warmup"), [(10000, 200), (100, 10), (5, 0)])
def test_warmup_left_out_fits_the_run(total: int, warmup: int) -> None:
    assert rates(total) == rates(total, warmup_steps=warmup)
