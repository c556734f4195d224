"""Activation checkpointing repeats the random numbers of dropout, and evaluation draws none."""

from collections.abc import Iterator
from typing import Any

import mutants.plugins  # noqa: F401  # registers the architecture "dropout_blocks"
import pytest
import torch
from tiny_run import SEQ_LEN, VOCAB_SIZE, TinyRun, assert_equal
from torch.nn.utils import get_total_norm

from titanlite import cli
from titanlite.data.batch import Microbatch
from titanlite.parallel.forward_backward import TokenCount

pytestmark = pytest.mark.usefixtures("one_rank")


DISTANCE = 0.03  # from the weights, for the central difference of the loss

MODES = ({"mode": "full"}, {"mode": "selective"})


def create_run(checkpointing: dict[str, Any], compiled: bool) -> TinyRun:
    """Return a run of a model with dropout."""
    compile_keys = {"enable": compiled, "components": ["model"]}
    model = {"architecture": "dropout_blocks"}
    return TinyRun(model=model, activation_checkpoint=checkpointing, compile=compile_keys)


def train_two_steps(checkpointing: dict[str, Any]) -> dict[str, Any]:
    """Train with a fixed seed, and return the state after two steps."""
    run = create_run(checkpointing, compiled=False)
    torch.manual_seed(0)
    run.train(2)
    return run.copy_state()


def compute_loss(run: TinyRun) -> float:
    """Run forward and backward on a fixed batch with a fixed seed, and return the loss."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB_SIZE, (4, SEQ_LEN + 1), generator=generator)
    inputs = tokens[:, :-1].contiguous()
    labels = tokens[:, 1:].contiguous()
    microbatch = Microbatch(inputs, labels)
    run.optimizer.zero_grad()
    torch.manual_seed(0)
    num_tokens = TokenCount(labels.numel(), run.mesh.data_group, labels.device)
    return run.train_step.forward_backward([microbatch], num_tokens).item()


@pytest.mark.parametrize(
    "mode",
    [*MODES, {"mode": "selective", "selective_ac_option": "2"}],
    ids=["full", "op", "every second block"],
)
def test_activation_checkpointing_repeats_the_random_numbers(mode):
    assert_equal(train_two_steps(mode), train_two_steps({"mode": "none"}))


@pytest.fixture
def new_compiler() -> Iterator[None]:
    """Compile without graphs of other tests, and leave none behind."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.usefixtures("new_compiler")
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["mode"])
def test_compiled_activation_checkpointing_repeats_the_random_numbers(mode):
    # Since torch 2.15, compiled blocks with checkpointing draw other numbers than without. So
    # compare the norm of the gradient with the slope of the loss along it. Every call of
    # `compute_loss` draws the same random numbers. The gradient of the output layer does not depend
    # on recomputation, and would hide errors, because it is by far the largest.
    run = create_run(mode, compiled=True)
    compute_loss(run)
    weights: list[Any] = [
        weight for name, weight in run.model.named_parameters() if name != "output.weight"
    ]
    gradients = [weight.grad.clone() for weight in weights]
    norm = get_total_norm(gradients).item()

    losses = []
    for shift in (DISTANCE, -2 * DISTANCE):
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(gradient, alpha=shift / norm)
        losses.append(compute_loss(run))

    # The central difference has a relative error of about 1e-4. With other dropout masks in the
    # backward pass, the slope differs by more than 20%.
    slope = (losses[0] - losses[1]) / (2 * DISTANCE)
    assert slope == pytest.approx(norm, rel=1e-3)


def test_a_memory_budget_is_rejected_only_for_models_with_dropout(capfd):
    check = (
        "check --job.plugins mutants.plugins --compile.enable "
        "--activation_checkpoint.mode memory_budget --model.architecture"
    ).split()

    assert cli.main([*check, "parallel_blocks"]) == 0
    assert cli.main([*check, "dropout_blocks"]) == 2
    assert "pytorch/issues/190758" in capfd.readouterr().err


def test_an_evaluation_draws_no_random_numbers():
    run = TinyRun(model={"architecture": "dropout_blocks"})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (4, SEQ_LEN + 1), generator=generator)
    microbatches = [Microbatch(tokens[:, :-1], tokens[:, 1:])]

    first = run.train_step.forward_backward.evaluate(microbatches)
    second = run.train_step.forward_backward.evaluate(microbatches)

    assert torch.equal(first, second)
    assert run.model.training
