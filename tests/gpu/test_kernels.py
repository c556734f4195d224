"""Attention's kernels on a GPU against its definition."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.model.attention import attention, backend_order, document_mask

DEVICE = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def heads(dtype: torch.dtype, width: int) -> list[Tensor]:
    """Queries of four heads, keys and values of two: (2, H, 512, width)."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, count, 512, width, generator=generator) for count in (4, 2, 2)]
    return [x.to(DEVICE, dtype).requires_grad_() for x in drawn]


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])  # TF32 has 10 bits
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_of_documents_is_sdpa_with_a_mask(dtype: torch.dtype, tolerance: float, compiled: bool):
    attend = torch.compile(attention, fullgraph=True) if compiled else attention
    inputs = heads(dtype, 64)
    for seed in range(2):  # other documents, the same kernel
        ids = torch.randint(0, 5, (2, 512), generator=torch.Generator().manual_seed(seed)).sort(dim=1).values
        expected = with_gradients(attention(*inputs, document_mask(ids).to(DEVICE)), inputs)  # pyright: ignore
        assert_close(with_gradients(attend(*inputs, document_mask(ids.to(DEVICE))), inputs), expected, tolerance)


def test_the_kernel_that_is_chosen_computes_attention():
    inputs = heads(torch.bfloat16, 128)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        expected = with_gradients(attention(*exact), exact)
    with backend_order(DEVICE):
        assert_close(with_gradients(attention(*inputs), inputs), expected, 2e-2)
