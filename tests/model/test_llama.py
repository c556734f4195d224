"""Initial weights and masks. test_formats.py compares whole models."""

import dataclasses
import itertools
import math
import re

import pytest
import torch

from titanlite.config.flavors import Architecture
from titanlite.model.attention import attention, document_mask
from titanlite.model.llama import INIT_STD, Llama
from titanlite.parallel.context import flex_mask

BASE = Architecture(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=101, rope_theta=10000.0
)


def build(arch, seed=0):
    with torch.device("meta"):
        model = Llama(arch)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            # A weight that init_weights forgets would stay NaN.
            parameter.fill_(math.nan)
    model.init_weights(seed)
    return model


def test_initial_weights_are_truncated_normals_that_shrink_with_depth():
    arch = dataclasses.replace(BASE, dim=256, n_layers=3, ffn_dim=512, vocab_size=1024)
    # Truncation at 3 sigma lowers the standard deviation.
    density_at_3_sigma = math.exp(-4.5) / math.sqrt(2 * math.pi)
    share_within_3_sigma = math.erf(3 / math.sqrt(2))
    tails = 6 * density_at_3_sigma / share_within_3_sigma
    shrink = math.sqrt(1 - tails)
    for name, parameter in build(arch).named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        std = 1.0 if name == "tok_embeddings.weight" else INIT_STD
        if "wo" in name or "w2" in name:
            std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
        # Mean and standard deviation may differ by five standard errors.
        count = parameter.numel()
        relative_std = parameter.std() / (std * shrink)
        assert parameter.abs().max() <= 3 * std, name
        assert abs(parameter.mean()) < 5 * std / math.sqrt(count), name
        assert abs(relative_std - 1) < 5 / math.sqrt(2 * count), name


def test_an_initial_weight_depends_only_on_seed_and_name():
    """It does not depend on other parameters, their order, or earlier random numbers."""
    before = torch.get_rng_state()
    small = build(BASE)
    large = build(dataclasses.replace(BASE, n_layers=3, ffn_dim=64))
    other = build(BASE, seed=1)

    assert torch.equal(torch.get_rng_state(), before)

    for name, parameter in small.named_parameters():
        assert torch.equal(parameter, Llama(BASE).get_parameter(name)), name  # seed 0
        if parameter.shape == large.get_parameter(name).shape:
            assert torch.equal(parameter, large.get_parameter(name)), name
        if parameter.ndim == 2:
            assert not torch.equal(parameter, other.get_parameter(name)), name
    projections = re.compile(r".*(wk|wv)\.weight")
    weights = [p for name, p in small.named_parameters() if projections.fullmatch(name)]

    assert all(not torch.equal(one, two) for one, two in itertools.combinations(weights, 2))


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_sdpa_with_a_document_mask(window):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (2, 128), generator=generator)
    ids = ids.sort(dim=1).values
    q = torch.randn(2, 4, 128, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, 128, 16, generator=generator)

    expected = attention(q, k, v, document_mask(ids, window))
    output = attention(q, k, v, flex_mask(ids, ids, None, window))

    # The softmax adds in another order.
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
