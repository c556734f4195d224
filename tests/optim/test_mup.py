"""muP trains the same function as explicit multipliers in the forward pass."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from titanlite.config.flavors import Architecture
from titanlite.config.schema import Optimizer
from titanlite.model.llama import Llama
from titanlite.optim.build import build_optimizer, set_learning_rate

# Width of the model and of its heads, relative to the base.
WIDER = 4
LR = 2**-6
# Multipliers are powers of two and eps is negligible, so all results are bitwise equal.
EPS = 1e-30
HIDDEN = ["layers.*.w?.weight"]
OTHERS = ["*norm.weight", "tok_embeddings.weight", "*.bias", "output.weight"]
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied_embeddings": True},
    "biases": {"qkv_bias": True},
    "norms of heads": {"qk_norm": "head"},
}


def train(model: Llama, optimizer: torch.optim.Optimizer, output_factor: float) -> Tensor:
    """Train three steps, and return the logits."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(48, (4, 9), generator=generator)

    def head(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x * output_factor, weight)

    for _ in range(3):
        logits = model(tokens[:, :-1], head=head)
        targets = tokens[:, 1:].flatten()
        F.cross_entropy(logits.flatten(0, 1), targets).backward()
        set_learning_rate(optimizer, LR)
        optimizer.step()
        optimizer.zero_grad()
    return model(tokens[:, :-1], head=head).detach()


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_mup_is_bitwise_equal_to_explicit_multipliers(keys):
    """The multipliers equal table 8 in Tensor Programs V."""
    sizes = (32, 2, 2, 1, 64, 48)
    mup: dict[str, Any] = {"mup_base_dim": 32 // WIDER, "mup_base_head_dim": 16 // WIDER}
    model = Llama(Architecture(*sizes, **keys, **mup))
    optimizer = build_optimizer(model, Optimizer(lr=LR, eps=EPS), arch=model.arch)
    explicit = Llama(Architecture(*sizes, **keys))
    queries = "wq" if keys.get("qk_norm") is None else "q_norm"
    scale = 1 / math.sqrt(WIDER)
    for name, module in explicit.named_modules():
        if name.endswith(f"attention.{queries}"):
            module.register_forward_hook(lambda _module, _inputs, output: output * scale)
    multipliers = {name: 1.0 for name, _ in explicit.named_parameters()}
    for name in multipliers:
        if f"attention.{queries}." in name:
            multipliers[name] = scale
    multipliers["norm.weight" if explicit.output is None else "output.weight"] = 1 / WIDER
    with torch.no_grad():
        for name, parameter in explicit.named_parameters():
            parameter.copy_(model.get_parameter(name) / multipliers[name])

    hidden = {"params": HIDDEN, "lr_factor": 1 / WIDER, "weight_decay": 0.1 * WIDER}
    groups = [hidden, {"params": OTHERS}]
    config = Optimizer.model_validate({"lr": LR, "eps": EPS, "groups": groups})
    logits = train(model, optimizer, output_factor=1.0)
    expected = train(explicit, build_optimizer(explicit, config), output_factor=1 / WIDER)

    assert torch.equal(logits, expected)
