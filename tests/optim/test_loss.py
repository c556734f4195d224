"""The loss with its output projection: against float64, over chunks, masks, a shared vocabulary, and its memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
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


def materialized(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    logits = (hidden @ weight.T).flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return (
        loss + z_loss * (logits.logsumexp(-1).square() * (labels.flatten() != IGNORE_INDEX)).sum()
    )


def error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    """Several chunks of tokens, the last one shorter, and several blocks of the vocabulary."""
    monkeypatch.setattr("titanlite.optim.losses.tokens_per_chunk", lambda *_: 48)
    monkeypatch.setattr("titanlite.optim.losses.VOCAB_BLOCK", {"cpu": 100})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_as_exact_as_with_all_logits_at_once(
    small_chunks, dtype: torch.dtype, z_loss: float, compiled: bool
):
    """Also compiled, by every version of torch: the graph overwrites the logits with their gradient, in an order of
    its own, so that fp32's sums are in another order."""
    hidden, weight, labels = inputs(200, 1003, dtype=dtype)
    precise = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = materialized(precise[0], precise[1], labels, z_loss)
    exact_gradients = torch.autograd.grad(exact, precise)
    usual = materialized(hidden, weight, labels, z_loss)
    usual_gradients = torch.autograd.grad(usual, (hidden, weight))
    chunked = linear_cross_entropy_sum(
        hidden, weight, labels, ONE, z_loss=z_loss, compiled=compiled
    )
    chunked_gradients = torch.autograd.grad(chunked, (hidden, weight))
    assert chunked.dtype == torch.float32
    # Of the hidden states the same roundings. On CPU a chunk's part of the weight's gradient is rounded to bf16 before
    # the parts are added up in fp32 and rounded once more: at most sqrt(2) times the error.
    assert error(chunked, exact) <= max(error(usual, exact), 1e-6)
    compared = zip(chunked_gradients, usual_gradients, exact_gradients, (1.05, 1.42), strict=True)
    for ours, theirs, best, most in compared:
        assert ours.dtype == dtype
        assert error(ours, best) <= most * error(theirs, best) + compiled * 1e-6


def test_the_scale_is_in_loss_and_gradients_and_no_label_is_zero_and_an_evaluation_has_no_z_loss():
    hidden, weight, labels = inputs(40, 11)
    whole = linear_cross_entropy_sum(hidden.clone(), weight, labels, ONE)
    expected = torch.autograd.grad(whole, (hidden, weight))
    scaled = linear_cross_entropy_sum(
        hidden.clone(), weight, labels, ONE / 4
    )  # a power of two: exact
    assert torch.equal(scaled, whole / 4)
    for gradient, unscaled in zip(
        torch.autograd.grad(scaled * 2, (hidden, weight)), expected, strict=True
    ):
        assert torch.equal(gradient, unscaled / 2)
    nothing = linear_cross_entropy_sum(
        hidden.clone(), weight, torch.full_like(labels, IGNORE_INDEX), ONE, z_loss=0.1
    )
    assert nothing.item() == 0.0
    assert all(not gradient.any() for gradient in torch.autograd.grad(nothing, (hidden, weight)))
    with torch.no_grad():
        assert torch.equal(
            linear_cross_entropy_sum(hidden, weight, labels, ONE, z_loss=0.1), whole.detach()
        )
    with pytest.raises(
        RuntimeError, match="inplace"
    ):  # exp needs its result again, which the gradient overwrites
        linear_cross_entropy_sum(hidden.exp(), weight, labels, ONE).backward()


@pytest.mark.slow
def test_a_compiled_softmax_over_a_part_of_the_vocabulary_knows_which_labels_are_its_own():
    hidden, weight, labels = inputs(48, 100)
    labels = labels.where(labels < 0, labels * 3)
    both = [(c, hidden.clone()) for c in (False, True)]
    losses = [
        linear_cross_entropy_sum(x, weight, labels, ONE, first_class=100, compiled=c)
        for c, x in both
    ]
    results = [[loss, *torch.autograd.grad(loss, (hidden, weight))] for loss in losses]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


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


def test_the_logits_of_all_tokens_never_exist():
    """All logits are 512 MiB in fp32, those of a chunk 128 MiB; the weight's gradient is 8 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert int(done.stdout) < 220
