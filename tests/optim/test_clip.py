"""The gradient norm is as exact as in float64, and clipping scales gradients to it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from titanlite.optim.clip import reduce_step_sums, scale_gradients_

DEVICES: list[Any] = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


def grad_norm(*gradients: Tensor, compiled: bool = False) -> Tensor:
    loss = torch.zeros((), device=gradients[0].device)
    return reduce_step_sums(gradients, loss, compiled=compiled).grad_norm


def exact_norm(*gradients: Tensor) -> float:
    """Compute the norm in float64, in parts to save memory."""
    parts: list[Tensor] = []
    for gradient in gradients:
        parts += gradient.flatten().split(2**22)
    squares = [part.double().square().sum().item() for part in parts]
    return math.sqrt(sum(squares))


@pytest.mark.parametrize(
    "shape",
    [(4_000_000,), (2500, 32_000)],
    ids=["4e6", "8e7"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_equals_that_in_float64(device, shape):
    """The sequential sums of torch.linalg.vector_norm have errors of 7e-5 and 8e-3 on a CPU."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    # The factor 1e4 tests small values that are added to a large sum.
    for factor in (1.0, 1e4):
        gradient.view(-1)[:1000] *= factor
        norm = grad_norm(gradient)
        assert norm.item() == pytest.approx(exact_norm(gradient), rel=2e-7)
        assert (norm.dtype, norm.device) == (torch.float32, gradient.device)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_norm_is_exact_for_shards_of_any_size_and_not_finite_if_a_gradient_is_not(
    compiled,
):
    whole = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    whole[:100] *= 1e4
    # The shard of a rank can be empty.
    parts = whole.split((1, 255, 256, 257, 999_231, 0, 2_000_000))

    norm = grad_norm(*parts, compiled=compiled).item()

    assert norm == pytest.approx(exact_norm(whole), rel=2e-7)

    for value in (math.inf, -math.inf, math.nan):
        for position in (0, 299, 300, 599):
            gradients = [torch.ones(300), torch.ones(300)]
            gradients[position // 300][position % 300] = value
            norm = grad_norm(*gradients, compiled=compiled)
            assert norm.isnan() if math.isnan(value) else norm.isposinf()

    gradients = [torch.full((n,), 3.0) for n in (4, 12)]

    norm = grad_norm(*gradients, compiled=compiled)

    assert norm.item() == 12.0

    scale_gradients_(gradients, 1.0, norm, compiled)
    assert exact_norm(*gradients) == pytest.approx(1.0, rel=1e-5)
