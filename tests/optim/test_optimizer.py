"""Which parameters decay, and what the job file's words become."""

import pytest
import torch

from titanlite.config import schema
from titanlite.model.flavors import Architecture
from titanlite.model.llama import Llama
from titanlite.optim.clip import clip_grad_norm_
from titanlite.optim.optimizer import build_optimizer

ARCH = Architecture(32, 2, 2, 1, 64, vocab_size=48)


def groups(**keys: object) -> tuple[list[str], list[str]]:
    model = Llama(ARCH)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, schema.Optimizer.model_validate({"weight_decay": 0.2, **keys}))
    decayed, exempt = optimizer.param_groups
    assert decayed["weight_decay"] == 0.2
    assert exempt["weight_decay"] == 0.0
    return [names[p] for p in decayed["params"]], [names[p] for p in exempt["params"]]


def test_norms_are_not_decayed() -> None:
    decayed, exempt = groups()
    assert exempt == [name for name, _ in Llama(ARCH).named_parameters() if "norm" in name]
    assert "tok_embeddings.weight" in decayed


def test_embeddings_are_exempt_on_request() -> None:
    decayed, exempt = groups(decay_embeddings=False)
    assert "tok_embeddings.weight" in exempt
    assert "output.weight" in decayed


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_implementations_agree(implementation: str) -> None:
    def weights_after_two_steps(name: str) -> torch.Tensor:
        model = Llama(ARCH)
        model.init_weights(0)
        optimizer = build_optimizer(model, schema.Optimizer.model_validate({"implementation": name}))
        for _ in range(2):
            model(torch.arange(8).view(1, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    # Kernels may round the square root and the division differently, by an ulp of updates of 3e-4.
    torch.testing.assert_close(
        weights_after_two_steps(implementation), weights_after_two_steps("for-loop"), rtol=0, atol=1e-6
    )


def test_clipping_scales_to_the_norm_and_reports_the_one_before() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    assert clip_grad_norm_([parameter], 1.0).item() == 6.0
    torch.testing.assert_close(parameter.grad.norm(), torch.tensor(1.0), rtol=1e-5, atol=0)


def test_a_limit_of_zero_clips_nothing() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    assert clip_grad_norm_([parameter], 0.0).item() == 6.0
    assert parameter.grad.tolist() == [3.0] * 4
