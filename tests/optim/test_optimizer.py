"""Optimizer implementations agree, and stochastic rounding does not depend on the layout."""

import copy

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titanlite.config import schema
from titanlite.config.flavors import Architecture
from titanlite.model.llama import Llama
from titanlite.optim.build import build_optimizer
from titanlite.parallel.init_weights import keep_shard

ARCH = Architecture(32, 2, 2, 1, 64, vocab_size=48)


def train_two_steps(compiled: bool = False, **keys: object) -> torch.Tensor:
    """Train two steps, and return all weights in one vector."""
    model = Llama(ARCH)
    optimizer = build_optimizer(model, schema.Optimizer.model_validate(keys), compiled)
    tokens = torch.arange(8).view(1, 8)
    for _ in range(2):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        # Kernels may round the square root and the division differently, by one ulp of updates of
        # 3e-4.
        ({"implementation": "fused"}, 1e-6),
        ({"implementation": "foreach"}, 1e-6),
        pytest.param({"compiled": True}, 1e-6, marks=pytest.mark.slow),
        # bfloat16 moments have 8 bits, so a step of 3e-4 is exact to 2^-8, or to twice as much
        # after the square root.
        ({"state_dtype": "bfloat16"}, 2 * 3e-4 * 2**-7),
    ],
)
def test_all_implementations_compute_the_same_updates(keys, tolerance):
    torch.testing.assert_close(
        train_two_steps(**keys), train_two_steps(implementation="for-loop"), rtol=0, atol=tolerance
    )


def test_stochastic_rounding_keeps_small_updates_that_rounding_to_nearest_loses():
    """bfloat16 rounds steps of 1e-4 at weights of 1 to zero, because they are below 2^-9."""

    def after_100_steps(stochastic: bool) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        settings = schema.Optimizer(lr=1e-4, weight_decay=0.0, stochastic_rounding=stochastic)
        optimizer = build_optimizer(nn.ParameterList([weight]), settings)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach().float()

    assert after_100_steps(stochastic=False).eq(1.0).all()

    moved = after_100_steps(stochastic=True)
    # Each of the 4,096 elements is a random walk of 100 steps with a standard deviation of at most
    # 2^-8 / 2, so the mean is exact to 3e-4.
    assert moved.mean().item() == pytest.approx(1.0 - 100 * 1e-4, abs=1e-3)
    assert len(moved.unique()) > 1


def compare_updates_of_shards() -> None:
    """Update parameters that are sharded in one or both dimensions, some unevenly."""
    shapes = [(8, 8), (28, 24), (12, 20), (4, 36)]
    for rows, columns in shapes:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        first = nn.Linear(columns, rows)
        second = nn.Linear(rows, columns)
        model = nn.Sequential(first, second).bfloat16()
        whole = copy.deepcopy(model)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter, full in zip(model.parameters(), whole.parameters(), strict=True):
                full.copy_(torch.randn(full.shape, generator=generator))
                full.grad = torch.randn(full.shape, generator=generator).bfloat16()
                parameter.grad = parameter.clone()
                keep_shard(parameter, full)
                keep_shard(parameter.grad, full.grad)
        for part in (model, whole):
            build_optimizer(part, schema.Optimizer(stochastic_rounding=True)).step()
        for parameter, full in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), full)


@pytest.mark.slow
def test_stochastic_updates_of_shards_equal_those_of_whole_parameters():
    run_ranks(4, compare_updates_of_shards)
