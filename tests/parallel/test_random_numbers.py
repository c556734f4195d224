"""Activation checkpointing repeats the random numbers of dropout, and evaluation draws none."""

from typing import Any

import mutants.plugins  # noqa: F401  # registers the architecture "dropout_blocks"
import pytest
import torch
from tiny_run import SEQ_LEN, VOCAB_SIZE, TinyRun, assert_equal
from torch.nn.utils import get_total_norm

from titanlite.data.batch import Microbatch

pytestmark = pytest.mark.usefixtures("one_rank")


STEP = 0.03  # distance to both sides for the slope of the loss


def create_run(checkpointing: dict[str, Any], compiled: bool) -> TinyRun:
    """Return a run of a model with dropout."""
    compile_keys = {"enable": compiled, "components": ["model"]}
    model = {"architecture": "dropout_blocks"}
    return TinyRun(model=model, activation_checkpoint=checkpointing, compile=compile_keys)


def trained(checkpointing: dict[str, Any], compiled: bool) -> TinyRun:
    """Return a run after two steps that draw the same random numbers in each call."""
    run = create_run(checkpointing, compiled)
    torch.manual_seed(0)
    run.train(2)
    return run


MODES = ({"mode": "full"}, {"mode": "selective"})


def test_activation_checkpointing_repeats_the_random_numbers():
    expected = trained({"mode": "none"}, compiled=False).copy_state()
    for mode in (*MODES, {"mode": "selective", "selective_ac_option": "2"}):
        assert_equal(trained(mode, compiled=False).copy_state(), expected)


@pytest.mark.long
@pytest.mark.parametrize("mode", [*MODES, {"mode": "memory_budget", "memory_budget": 0.3}])
def test_compiled_activation_checkpointing_repeats_the_random_numbers(mode):
    # Since torch 2.15, compiled blocks with checkpointing draw other numbers than without. So
    # compare the gradient with the slope of the loss, which has the same numbers in each call.
    run = create_run(mode, compiled=True)
    compute_loss(run)
    weights: list[Any] = list(run.model.parameters())
    gradients = [weight.grad.clone() for weight in weights]
    norm = get_total_norm(gradients).item()

    losses = []
    for shift in (STEP, -2 * STEP):
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(gradient, alpha=shift / norm)
        losses.append(compute_loss(run))

    # With the gradient of other dropout masks, the slope is 30% less than the norm.
    assert (losses[0] - losses[1]) / (2 * STEP) == pytest.approx(norm, rel=1e-3)


def compute_loss(run: TinyRun) -> float:
    """Compute loss and gradients of fixed tokens, with the same random numbers in each call."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB_SIZE, (4, SEQ_LEN + 1), generator=generator)
    microbatch = Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    run.optimizer.zero_grad()
    torch.manual_seed(0)
    return run.train_step.forward_backward([microbatch], torch.tensor(4 * SEQ_LEN)).item()


def test_an_evaluation_draws_no_random_numbers():
    run = TinyRun(model={"architecture": "dropout_blocks"})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (4, SEQ_LEN + 1), generator=generator)
    microbatches = [Microbatch(tokens[:, :-1], tokens[:, 1:])]

    first = run.train_step.forward_backward.evaluate(microbatches)
    second = run.train_step.forward_backward.evaluate(microbatches)

    assert torch.equal(first, second)
    assert run.model.training
