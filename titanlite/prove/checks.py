"""Compare values of a run with expected values, within tolerances for rounding errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.config.run import Run
from titanlite.prove.record import NamedTensors

EPS32 = torch.finfo(torch.float32).eps
ERROR_FACTOR = 4
"""Allowed error of a run on several ranks, as a multiple of the error of one rank in the same
precision."""
FLOOR_ROUNDINGS = 32
"""Relative error, as a multiple of EPS32, that is always allowed in a sum or a gradient."""
LOSS_ROUNDING = 1 / 64
"""Relative error of the loss, as a multiple of the machine epsilon of the compute dtype, that is
always allowed."""
UPDATE_ROUNDINGS = 64
"""Relative error, as a multiple of EPS32, that is allowed in an optimizer update or its state."""
SMALL_GRADIENT = 1e-3
"""The error of a gradient is divided by the root mean square (RMS) of the gradient, but at least by
this fraction of the RMS of all gradients."""
CAPS = {"float32": 1e-4, "bfloat16": 0.05, "float8": 0.2}
"""Cap on the relative error of one rank in the formula of a tolerance, by precision. Without this
cap, a mistake that the rank shares with the tested run would go unnoticed."""


class Check(NamedTuple):
    """Comparison of one value of the tested run with its expected value.

    `titanlite prove` makes hundreds of these comparisons. The check passes if `error` is at most
    `tolerance`.

    Attributes:
        name: Kind of comparison, such as "gradient".
        step: Number of the training step, or 0 for the state before the first step.
        subject: Name of the compared parameter or rank, such as "rank 3".
        error: Measured error. In a bitwise comparison, the fraction of elements that differ.
        tolerance: Largest allowed error. 0 in a bitwise comparison.
        hint: Likely cause of a failure, as text for the user, or "".
    """

    name: str
    step: int
    subject: str
    error: float
    tolerance: float
    hint: str = ""

    @property
    def has_passed(self) -> bool:
        """Return whether the error is within the tolerance. A NaN error never passes."""
        return self.error <= self.tolerance


def relative_error(value: Tensor, expected: Tensor, minimum: float = 0.0) -> float:
    """Return the norm of `value - expected` divided by the norm of `expected`.

    NaN in both tensors counts as equal. The result is infinite if the shapes differ.

    Args:
        value: Tensor to check.
        expected: Expected tensor of the same shape.
        minimum: Lower bound of the divisor, for expected values that are nearly zero.
    """
    if value.shape != expected.shape:
        return math.inf

    value = value.double()
    expected = expected.double()
    are_nan = value.isnan() & expected.isnan()  # such as the unused part of a guard's history
    value = value.masked_fill(are_nan, 0.0)
    expected = expected.masked_fill(are_nan, 0.0)

    difference = (value - expected).norm().item()
    divisor = max(expected.norm().item(), minimum)
    if difference == 0:
        return 0.0
    if divisor == 0:
        return math.inf
    return difference / divisor


def fraction_of_different(value: Tensor, expected: Tensor) -> float:
    """Return the fraction of elements that are not bitwise equal.

    NaN in both tensors counts as equal. The result is 1 if the shapes or dtypes differ.
    """
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return 1.0
    if torch.equal(value, expected):  # also if both are empty
        return 0.0
    are_nan = value.isnan() & expected.isnan()
    return ((value != expected) & ~are_nan).double().mean().item()


def compare_bitwise(
    name: str,
    step: int,
    values: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    subject: str = "",
) -> list[Check]:
    """Check that two sets of named tensors are bitwise equal.

    Args:
        name: Name of the returned checks, such as "initial weights".
        step: Number of the training step.
        values: Tensors to check, by name.
        expected: Expected tensors, by name.
        subject: Subject of all returned checks. By default, the subject is the name of the tensor.

    Returns:
        One check for each tensor. It fails for a tensor that only one set contains.
    """
    checks = []
    for key in sorted(values.keys() | expected.keys()):
        if key in values and key in expected:
            error = fraction_of_different(values[key], expected[key])
            hint = ""
        else:
            error = 1.0
            owner = "the layout" if key in values else "the reference"
            hint = f"only {owner} has {key}"
        checks.append(Check(name, step, subject or key, error, tolerance=0.0, hint=hint))
    return checks


def compute_precision(run: Run) -> str:
    """Return the lowest precision in which a run computes: "float32", "bfloat16" or "float8"."""
    if run.job.float8.enable:
        return "float8"
    if run.job.training.dtype == "bfloat16":  # gradients have the dtype of the weights
        return "bfloat16"
    return run.job.training.mixed_precision_param


def total_norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all elements of several tensors together, in float64."""
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def gradient_tolerance(run: Run, error_of_one_rank: float) -> float:
    """Return the largest relative error that a gradient of a run on several ranks may have.

    The tolerance is four times the error that a single rank makes in the same precision, plus a
    small constant for rounding in fp32. The error of the single rank is capped, so that a mistake
    that it shares with the run does not go unnoticed.

    Args:
        run: The run, which determines the precision.
        error_of_one_rank: Relative error of the same gradient computed on one rank.
    """
    cap = CAPS[compute_precision(run)]
    return ERROR_FACTOR * min(error_of_one_rank, cap) + FLOOR_ROUNDINGS * EPS32


def loss_tolerance(run: Run, error_of_one_rank: float) -> float:
    """Return the largest relative error that the loss of a run on several ranks may have.

    The tolerance is `gradient_tolerance` plus 1/64 of the machine epsilon of the compute dtype. The
    extra term is needed because the loss is a single number, whose error on one rank can be zero by
    chance.

    Args:
        run: The run, which determines the precision.
        error_of_one_rank: Relative error of the same loss computed on one rank.
    """
    is_float32 = compute_precision(run) == "float32"
    eps = EPS32 if is_float32 else torch.finfo(torch.bfloat16).eps
    return gradient_tolerance(run, error_of_one_rank) + LOSS_ROUNDING * eps


def compare_gradients(
    step: int,
    run: Run,
    gradients: NamedTensors,
    reference: NamedTensors,
    one_rank: NamedTensors,
) -> list[Check]:
    """Compare the gradients of one step with gradients computed in float64.

    Args:
        step: Number of the step.
        run: The run, which determines the precision.
        gradients: Gradients of the run, by parameter name.
        reference: Float64 gradients, by parameter name.
        one_rank: Gradients that one rank computes in the precision of the run. Their rounding error
            determines the tolerance.

    Returns:
        One check for each parameter.
    """
    minimum_norms = _minimum_norms(reference)
    checks = []
    for name, expected in reference.items():
        if name not in gradients:
            hint = "the layout computes no gradient"
            missing = Check("gradient", step, name, error=math.inf, tolerance=0.0, hint=hint)
            checks.append(missing)
            continue

        # Divide by at least this norm, because any error is large relative to a gradient near zero.
        minimum = minimum_norms[name]
        error = relative_error(gradients[name], expected, minimum)
        error_of_one_rank = relative_error(one_rank[name], expected, minimum)
        tolerance = gradient_tolerance(run, error_of_one_rank)
        checks.append(Check("gradient", step, name, error, tolerance))
    return checks


def _minimum_norms(gradients: NamedTensors) -> dict[str, float]:
    """Return the minimum divisor for the relative error of each gradient, by parameter name.

    Without a minimum, any error of a gradient near zero would count as large. The minimum is the
    norm of a gradient whose elements are all 0.1% (`SMALL_GRADIENT`) of the root mean square of the
    elements of all gradients.

    Args:
        gradients: Expected gradients of all parameters.
    """
    norm_of_all = total_norm(gradients.values())
    num_elements = sum(gradient.numel() for gradient in gradients.values())
    return {
        name: SMALL_GRADIENT * norm_of_all * math.sqrt(gradient.numel() / num_elements)
        for name, gradient in gradients.items()
    }
