"""A non-finite loss or gradient stops the run, and says why."""

import math

import pytest

from titanlite.config.errors import GuardError
from titanlite.observe.guards import check_finite


def test_finite_numbers_pass():
    check_finite(2.5, 0.0, step=3)


@pytest.mark.parametrize(
    ("loss", "grad_norm", "named"),
    [
        (math.nan, 1.0, "loss is nan."),
        (2.0, math.inf, "grad_norm is inf."),
        (-math.inf, math.nan, "loss is -inf and grad_norm is nan."),
    ],
)
def test_non_finite_numbers_stop_with_step_cause_and_remedy(loss, grad_norm, named):
    with pytest.raises(GuardError) as caught:
        check_finite(loss, grad_norm, step=70)
    assert str(caught.value).startswith(f"Step 70: {named}")
    assert "optimizer.lr" in str(caught.value)
    assert caught.value.exit_code == 3
