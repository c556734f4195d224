"""The chunked loss is exact with masks and sharded vocabularies, and saves memory."""

import sys

import pytest
import torch
from small_runs import run_program
from torch import Tensor
from torch.nn import functional as F

from titanlite.model.microbatch import IGNORE_INDEX
from titanlite.optim.losses import linear_cross_entropy_sum

ONE = torch.ones(())


def inputs(
    tokens: int, vocab: int, dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, dim, generator=generator).to(dtype)
    weight = torch.randn(vocab, dim, generator=generator).to(dtype) * 0.3
    labels = torch.randint(0, vocab, (2, tokens // 2), generator=generator)
    labels[0, : tokens // 5] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def materialized(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, softcap: float
) -> Tensor:
    logits = (hidden @ weight.T).flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    flat = labels.flatten()
    loss = F.cross_entropy(logits, flat, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss + z_loss * logits.logsumexp(-1)[flat != IGNORE_INDEX].square().sum()


def error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    """Compute several chunks of tokens, the last one shorter, and several vocabulary blocks."""
    monkeypatch.setattr("titanlite.optim.losses.tokens_per_chunk", lambda *_: 48)
    monkeypatch.setattr("titanlite.optim.losses.VOCAB_BLOCK", 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("z_loss", "softcap", "compiled"),
    [
        (0.0, 0.0, False),
        (1e-2, 2.0, False),
        pytest.param(1e-2, 2.0, True, marks=pytest.mark.slow),
    ],
)
def test_chunked_loss_is_as_exact_as_with_all_logits_at_once(
    small_chunks, dtype, z_loss, softcap, compiled
):
    """The compiled graph adds in another order, and overwrites logits with their gradients."""
    hidden, weight, labels = inputs(200, 1003, dtype=dtype)
    precise = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = materialized(precise[0], precise[1], labels, z_loss, softcap)
    exact_gradients = torch.autograd.grad(exact, precise)
    usual = materialized(hidden, weight, labels, z_loss, softcap)
    usual_gradients = torch.autograd.grad(usual, (hidden, weight))
    chunked = linear_cross_entropy_sum(
        hidden, weight, labels, ONE, z_loss=z_loss, softcap=softcap, compiled=compiled
    )
    chunked_gradients = torch.autograd.grad(chunked, (hidden, weight))

    assert chunked.dtype == torch.float32

    # Gradients of the hidden states are rounded alike. On a CPU, the weight gradient of each
    # chunk is rounded to bf16 before the sum in fp32, which causes at most sqrt(2) times the error.
    last_bit = 2e-7
    assert error(chunked, exact) <= max(error(usual, exact) + last_bit, 1e-6)

    tolerance = 1e-6 if compiled else 0.0
    factors = (1.05, 1.42)
    compared = zip(chunked_gradients, usual_gradients, exact_gradients, factors, strict=True)
    for gradient, usual_gradient, exact_gradient, factor in compared:
        limit = factor * error(usual_gradient, exact_gradient) + tolerance
        assert gradient.dtype == dtype
        assert error(gradient, exact_gradient) <= limit


def test_loss_and_gradients_are_scaled():
    hidden, weight, labels = inputs(40, 11)
    whole = linear_cross_entropy_sum(hidden.clone(), weight, labels, ONE)
    scaled = linear_cross_entropy_sum(hidden.clone(), weight, labels, ONE / 4)

    # Powers of two scale exactly.
    assert torch.equal(scaled, whole / 4)

    expected = torch.autograd.grad(whole / 2, (hidden, weight))
    torch.testing.assert_close(
        torch.autograd.grad(scaled * 2, (hidden, weight)), expected, rtol=0, atol=0
    )


def test_loss_and_gradients_without_labels_are_zero():
    hidden, weight, labels = inputs(40, 11)
    no_labels = torch.full_like(labels, IGNORE_INDEX)

    loss = linear_cross_entropy_sum(hidden.clone(), weight, no_labels, ONE, z_loss=0.1)

    gradients = torch.autograd.grad(loss, (hidden, weight))

    assert not any(value.any() for value in (loss, *gradients))


def test_evaluation_leaves_out_the_z_loss():
    hidden, weight, labels = inputs(40, 11)
    plain = linear_cross_entropy_sum(hidden.clone(), weight, labels, ONE)

    with torch.no_grad():
        evaluated = linear_cross_entropy_sum(hidden, weight, labels, ONE, z_loss=0.1)

    assert torch.equal(evaluated, plain)


def test_backward_fails_if_an_operator_needs_the_overwritten_hidden_states():
    hidden, weight, labels = inputs(40, 11)

    loss = linear_cross_entropy_sum(hidden.exp(), weight, labels, ONE)

    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.slow
def test_compiled_loss_of_a_vocabulary_shard_equals_the_eager_loss():
    hidden, weight, labels = inputs(48, 100)
    labels = labels.where(labels < 0, labels * 3)

    def compute(compiled: bool) -> list[Tensor]:
        keys = {"first_class": 100, "compiled": compiled}
        loss = linear_cross_entropy_sum(hidden.clone(), weight, labels, ONE, **keys)
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    torch.testing.assert_close(compute(True), compute(False), rtol=1e-5, atol=1e-5)


PEAK = """
import resource, torch
from titanlite.optim.losses import linear_cross_entropy_sum
hidden = torch.randn(1, 2048, 32).requires_grad_()
weight = torch.randn(65536, 32).requires_grad_()
labels = torch.randint(0, 65536, (1, 2048))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_cross_entropy_sum(hidden, weight, labels, torch.ones(())).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_peak_memory_holds_only_the_logits_of_a_chunk():
    """In fp32, all logits take 512 MiB, a chunk 128 MiB, and the weight gradient 8 MiB."""
    peak = int(run_program(sys.executable, "-c", PEAK).stdout)

    assert peak < 220
