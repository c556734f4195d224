"""Activation checkpointing repeats the random numbers of dropout, and evaluation draws none."""

from typing import Any

import mutants.plugins  # noqa: F401  # registers the architecture "dropout_blocks"
import pytest
import torch
from tiny_run import SEQ_LEN, VOCAB_SIZE, TinyRun, assert_equal

from titanlite.data.batch import Microbatch

pytestmark = pytest.mark.usefixtures("one_rank")


def trained(checkpointing: dict[str, Any], compiled: bool) -> TinyRun:
    """Return a run after two steps that draw the same random numbers in each call."""
    compile_keys = {"enable": compiled, "components": ["model"]}
    model = {"architecture": "dropout_blocks"}
    run = TinyRun(model=model, activation_checkpoint=checkpointing, compile=compile_keys)
    torch.manual_seed(0)
    run.train(2)
    return run


MODES = ({"mode": "full"}, {"mode": "selective"})
EAGER = (*MODES, {"mode": "selective", "selective_ac_option": "2"})
COMPILED = (*MODES, {"mode": "memory_budget", "memory_budget": 0.3})


@pytest.mark.parametrize(
    ("compiled", "modes"),
    [(False, EAGER), pytest.param(True, COMPILED, marks=pytest.mark.long)],
    ids=["eager", "compiled"],
)
def test_activation_checkpointing_repeats_the_random_numbers(compiled, modes):
    expected = trained({"mode": "none"}, compiled).copy_state()
    for mode in modes:
        assert_equal(trained(mode, compiled).copy_state(), expected)


def test_an_evaluation_draws_no_random_numbers():
    run = TinyRun(model={"architecture": "dropout_blocks"})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (4, SEQ_LEN + 1), generator=generator)
    microbatches = [Microbatch(tokens[:, :-1], tokens[:, 1:])]

    first = run.train_step.forward_backward.evaluate(microbatches)
    second = run.train_step.forward_backward.evaluate(microbatches)

    assert torch.equal(first, second)
    assert run.model.training
