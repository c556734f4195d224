"""Attention's kernels against its definition, and random numbers against a CPU's."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from titanlite.config.flavors import Architecture
from titanlite.model.attention import attention, backend_order, document_mask
from titanlite.model.llama import Llama

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def heads(dtype: torch.dtype, width: int) -> list[Tensor]:
    """Queries of four heads, keys and values of two: (2, H, 512, width)."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, count, 512, width, generator=generator) for count in (4, 2, 2)]
    return [x.to(DEVICE, dtype).requires_grad_() for x in drawn]


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator).to(out)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])  # TF32 has 10 bits
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_of_documents_is_sdpa_with_a_mask(dtype: torch.dtype, tolerance: float, compiled: bool):
    attend = torch.compile(attention, fullgraph=True) if compiled else attention
    inputs = heads(dtype, 64)
    for seed in range(2):  # other documents, the same kernel
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 5, (2, 512), generator=generator).sort(dim=1).values
        expected = with_gradients(attention(*inputs, document_mask(ids).to(DEVICE)), inputs)  # pyright: ignore
        found = with_gradients(attend(*inputs, document_mask(ids.to(DEVICE))), inputs)  # pyright: ignore
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_the_kernel_that_is_chosen_computes_attention():
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    inputs = heads(dtype, 128)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        expected = with_gradients(attention(*exact), exact)
    with backend_order(DEVICE):
        found = with_gradients(attention(*inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 1e-5) * b.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU from Hopper on"
)
def test_cudnn_takes_llamas_heads():
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = heads(torch.bfloat16, 128)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # an error where it does not
        found = with_gradients(out, [q, k, v])
    assert all(x.isfinite().all() for x in found)


def test_initial_weights_are_those_of_a_cpu_or_another_draw_of_the_same_distribution():
    """A GPU has another generator: the same bits on any number of GPUs, other bits than on CPUs."""

    def draw(device: torch.device) -> dict[str, Tensor]:
        with device:
            model = Llama(Architecture(256, 2, 4, 2, 512, vocab_size=4096))
        model.init_weights(0)
        return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}

    here, again, cpu = draw(DEVICE), draw(DEVICE), draw(torch.device("cpu"))
    for name, weight in here.items():
        assert torch.equal(weight, again[name])
        if DEVICE.type == "cpu" or weight.ndim == 1:
            assert torch.equal(weight, cpu[name])
            continue
        assert weight.std() == pytest.approx(cpu[name].std(), rel=0.02)  # of 32,768 numbers or more
        assert abs(weight.mean()) < 0.03 * weight.std()
        assert weight.abs().max() == pytest.approx(cpu[name].abs().max(), rel=0.02)  # cut at three deviations
