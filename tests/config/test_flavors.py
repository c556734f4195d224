"""The named architectures have the published sizes, and a job file may override each field."""

import dataclasses

import pytest
import torch

from titanlite.config import schema
from titanlite.config.flavors import FLAVORS, Architecture, architecture
from titanlite.model.llama import Llama

PUBLISHED = {
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}


def parameters_of(flavor):
    with torch.device("meta"):
        model = Llama(FLAVORS[flavor])
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_llama_3_has_exactly_the_published_number_of_parameters(flavor):
    assert parameters_of(flavor) == PUBLISHED[flavor]


@pytest.mark.parametrize(("flavor", "promised"), [("debugmodel", 6e6), ("150m", 150e6)])
def test_our_own_sizes_are_about_what_they_promise(flavor, promised):
    assert parameters_of(flavor) == pytest.approx(promised, rel=0.1)


def test_every_flavor_is_tested():
    assert set(FLAVORS) == {*PUBLISHED, "debugmodel", "150m"}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_heads_divide(flavor):
    arch = FLAVORS[flavor]
    assert arch.dim % arch.n_heads == 0
    assert arch.n_heads % arch.n_kv_heads == 0
    assert arch.head_dim % 2 == 0  # rotary channels come in pairs


def test_every_field_can_be_overridden_from_the_job_file():
    overrides = {
        **{"dim": 96, "n_layers": 3, "n_heads": 6, "n_kv_heads": 3, "ffn_dim": 100, "vocab_size": 77},
        **{"max_seq_len": 33, "norm_eps": 1e-6, "rope_theta": 123.0, "rope_scaling_factor": 2.0},
        **{"rope_low_freq_factor": 1.5, "rope_high_freq_factor": 5.0, "rope_original_max_seq_len": 16},
        "tied_embeddings": True,
    }
    assert set(overrides) == {field.name for field in dataclasses.fields(Architecture)}
    assert architecture(schema.Model(flavor="8b", **overrides)) == Architecture(**overrides)


def test_what_is_not_overridden_comes_from_the_flavor():
    arch = architecture(schema.Model(flavor="3b", n_layers=2))
    assert arch == dataclasses.replace(FLAVORS["3b"], n_layers=2)
