"""MXFP8 layers equal an emulation in float32, and are rejected on GPUs without kernels."""

import pytest
import torch
from torch import Tensor, nn

from titanlite.cli import main
from titanlite.config import schema
from titanlite.config.errors import UserError
from titanlite.parallel.float8 import convert_to_float8

MXFP8 = schema.Float8(enable=True, recipe_name="mxfp8", min_features=0)
OPTIONS = "--model.flavor debugmodel --float8.enable --float8.min_features 0"


def round_to_mxfp8(x: Tensor) -> Tensor:
    """Round blocks of 32 columns to e4m3 values times a power of two.

    The power of two is the smallest one with which all values are at most 448 (RCEIL).
    """
    blocks = x.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest / 448)
    # frexp returns the mantissa 0.5 for powers of two, which need the smaller exponent.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(-127, 127))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.T with both matrices rounded along the dimension that the product sums over."""
    return round_to_mxfp8(a.contiguous()) @ round_to_mxfp8(b.contiguous()).T


def build_layer(config: schema.Float8) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(96, 64, bias=False, device="meta"))
    convert_to_float8(model, config, lambda _: None)
    return model.to_empty(device="cpu")


@pytest.mark.parametrize("spread", [1.0, 1e6], ids=["normal", "outliers"])
def test_values_and_gradients_equal_an_emulation(spread):
    torch.manual_seed(0)
    layer = build_layer(MXFP8)
    weight = torch.randn(64, 96)
    layer.load_state_dict({"0.weight": weight})
    factors = torch.logspace(0, torch.tensor(spread).log10(), 96)
    x = torch.randn(2, 64, 96) * factors
    # The scale of blocks of zeros must not divide by zero.
    x[0, :, :32] = 0
    x.requires_grad_()
    grad = torch.randn(2, 64, 64)

    output = layer(x)
    grad_x, grad_weight = torch.autograd.grad(output, (x, *layer.parameters()), grad)

    rows = x.detach().flatten(0, 1)
    grad_rows = grad.flatten(0, 1)
    expected = {
        "output": (output.detach().flatten(0, 1), multiply(rows, weight)),
        "input": (grad_x.flatten(0, 1), multiply(grad_rows, weight.T)),
        "weight": (grad_weight, multiply(grad_rows.T, rows.T)),
    }
    for name, (value, reference) in expected.items():
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5 * spread, msg=name)


def use_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(
    ("name", "capability", "alternative"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "rowwise"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "float8.enable = false"),
        ("NVIDIA GeForce RTX 5090", (12, 0), "rowwise"),
    ],
)
def test_mxfp8_on_a_gpu_without_kernels_is_rejected(monkeypatch, name, capability, alternative):
    use_gpu(monkeypatch, name, capability)
    with pytest.raises(UserError) as error:
        build_layer(MXFP8)

    message = str(error.value)
    assert name in message
    assert f"{capability[0]}.{capability[1]}" in message
    assert alternative in message

    build_layer(MXFP8.model_copy(update={"emulate": True}))


def test_mxfp8_on_a_gpu_needs_bfloat16(monkeypatch):
    use_gpu(monkeypatch, "NVIDIA B200", (10, 0))
    build_layer(MXFP8)
    model = nn.Sequential(nn.Linear(64, 64, device="meta"))

    with pytest.raises(UserError, match="bfloat16"):
        convert_to_float8(model, MXFP8, lambda _: None, compute_dtype="float32")


def test_a_plan_with_mxfp8_rejects_a_gpu_without_kernels(capsys):
    arguments = f"plan {OPTIONS} --float8.recipe_name mxfp8 --quick --gpu".split()

    assert main([*arguments, "B200"]) == 0
    assert "matmuls" in capsys.readouterr().out
    assert main([*arguments, "H100"]) == 2
    assert "H100" in capsys.readouterr().err
