"""Masks of packed documents."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from titanlite.config.flavors import Architecture
from titanlite.model.attention import attention, backend_order, document_mask, flex_document_mask
from titanlite.model.llama import Llama
from titanlite.optim.loss import IGNORE_INDEX

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def test_a_token_sees_its_own_document_up_to_itself() -> None:
    mask = document_mask(IDS)
    assert isinstance(mask, torch.Tensor)
    for row in range(2):
        for query in range(8):
            for key in range(8):
                expected = key <= query and IDS[row, query] == IDS[row, key]
                assert bool(mask[row, 0, query, key]) == bool(expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same() -> None:
    """The form used on a GPU, here by its definition."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (2, 128), generator=generator).sort(dim=1).values
    q = torch.randn(2, 4, 128, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, 128, 16, generator=generator)
    expected = attention(q, k, v, document_mask(ids))
    # The sums of the softmax run in another order.
    torch.testing.assert_close(attention(q, k, v, flex_document_mask(ids)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [[5, 3, 8], [1, 15], [16]])
def test_the_loss_of_a_packed_row_is_that_of_its_documents_one_by_one(lengths: list[int]) -> None:
    model = Llama(Architecture(32, 2, 4, 2, 64, vocab_size=48))
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 48, (1, n), generator=generator) for n in lengths]
    ids = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], dim=1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = torch.cat([torch.cat([d[:, 1:], torch.full((1, 1), IGNORE_INDEX)], dim=1) for d in documents], dim=1)

    def gradient_of(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    packed = cross_entropy_sum(model(torch.cat(documents, dim=1), positions, document_mask(ids)), labels)
    alone = torch.stack([cross_entropy_sum(model(d[:, :-1]), d[:, 1:]) for d in documents if d.shape[1] > 1]).sum()
    # One kernel call over 16 positions and several over fewer add up in another order.
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient_of(packed), gradient_of(alone), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("capability", "first"), [((8, 0), "FLASH_ATTENTION"), ((9, 0), "CUDNN_ATTENTION")])
def test_the_order_of_kernels_follows_the_generation_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], first: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    before = torch._C._get_sdp_priority_order()
    with backend_order(torch.device("cuda")):
        order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
        assert order[0].name == first
        assert order.index(SDPBackend.MATH) == 3
    assert torch._C._get_sdp_priority_order() == before
