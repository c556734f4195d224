"""A config.json is read as transformers reads it: the same logits and gradients, or a refusal that names the key."""

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from titanlite.checkpoint.huggingface import hf_weights, load_hf_weights
from titanlite.config.errors import UserError
from titanlite.config.flavors import Architecture
from titanlite.model.formats import (
    MetaParams,
    architecture_from_hf,
    architecture_from_meta,
    hf_config,
    hf_name,
)
from titanlite.model.llama import Llama

BASE = {"model_type": "llama", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80}
BASE |= {"num_hidden_layers": 2, "num_attention_heads": 6}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", **SCALING, "original_max_position_embeddings": 32}
OLD_WORD = {"type": "llama3", **SCALING, "original_max_position_embeddings": 32}
SIZES = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
MISTRAL = SIZES | {"model_type": "mistral", "sliding_window": None}
QWEN3 = SIZES | {
    "model_type": "qwen3",
    "head_dim": 16,
    "use_sliding_window": False,
    "max_window_layers": 1,
}
OLMO2 = SIZES | {"model_type": "olmo2", "attention_bias": False}
SMOLLM3 = SIZES | {
    "model_type": "smollm3",
    "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 2,
    "pad_token_id": None,
}
QWEN2 = SIZES | {
    "model_type": "qwen2",
    "use_sliding_window": False,
    "sliding_window": 8,
    "max_window_layers": 1,
}
BLENDED = {
    "rope_scaling": {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 7.0},
    "tie_word_embeddings": True,
}
SAME = [
    {},  # the defaults
    {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "swish",
        "rms_norm_eps": 0.5,
        "rope_theta": 100,
    },
    {"num_key_value_heads": None, "rope_theta": 7.0, "rope_parameters": {"rope_theta": 100.0}},
    {"rope_theta": 7.0, "rope_scaling": {**LLAMA3, "rope_theta": 100.0}},
    {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3},
    {"rope_scaling": {}, "rope_parameters": {**OLD_WORD, "rope_theta": 100.0}},
    {"rope_scaling": OLD_WORD},
    {
        "max_position_embeddings": 48,
        "rope_scaling": {"rope_type": "llama3", **SCALING},
    },  # no original length
    {"rope_scaling": {**LLAMA3, "factor": 1.0}},
    {"partial_rotary_factor": 1.0, "rope_scaling": {**LLAMA3, "partial_rotary_factor": 1.0}},
    {"tie_word_embeddings": True, "torch_dtype": "float32", "dtype": "float32", "pad_token_id": 3},
    {
        "pretraining_tp": 4,
        "initializer_range": 0.5,
        "use_cache": False,
        "temperature": 3.0,
        "eos_token_id": [1, 2],
    },
    {"head_dim": 16},
    {
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 59,
    },
    BLENDED,
    *(MISTRAL, MISTRAL | {"head_dim": 16, "sliding_window": 9}, QWEN3, OLMO2, SMOLLM3),
    *(QWEN2, QWEN2 | {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}),
]


def write(folder, raw):
    """A random model of transformers with `raw` as its config.json.

    Its weights are large enough that attention is far from uniform and norms far from one, so that
    a mistake shows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(raw))))
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn_like(x) / math.sqrt(x.shape[-1]) * 1.5 + float(x.ndim == 1))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))


def assert_close(found, expected):
    """Within 1e-5 of the largest value: what fp32 leaves of sums taken in another order."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


FAR = [
    changes for changes in SAME if changes is not BLENDED
]  # whose angles, off by an ulp, are off by 1e-3 there


@pytest.mark.parametrize(
    ("changes", "first"), [*((c, 0) for c in SAME), *((c, 90_000) for c in FAR)]
)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, changes, first):
    from transformers import AutoConfig, AutoModelForCausalLM

    write(tmp_path, BASE | changes)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    arch = hf_weights(tmp_path).arch
    ours = Llama(arch)
    load_hf_weights(tmp_path, ours)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(
        4, 97, (2, 200), generator=generator
    )  # a token for padding, 3, would have no gradient
    positions = torch.arange(first, first + 200)
    found, expected = (
        ours(tokens, positions if first else None),
        theirs(tokens, position_ids=positions[None]).logits,
    )
    assert_close(found, expected)
    weight = torch.randn(found.shape, generator=generator)
    for logits in (found, expected):
        (logits * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == {hf_name(arch, name) for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, gradients[hf_name(arch, name)])

    exported: dict[str, Any] = hf_config(arch, "float32")
    assert architecture_from_hf(exported) == arch
    twin = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**exported), attn_implementation="eager"
    )
    assert type(twin).__name__ == exported["architectures"][0]
    twin.load_state_dict(theirs.state_dict())
    assert_close(twin(tokens, position_ids=positions[None]).logits, expected)


@pytest.mark.parametrize("family", [{}, MISTRAL, QWEN2, QWEN3, OLMO2, SMOLLM3])
def test_every_key_that_transformers_writes_is_known(family):
    from transformers import AutoConfig

    written = AutoConfig.for_model(**BASE | family, rope_parameters=dict(LLAMA3)).to_dict()
    assert architecture_from_hf(json.loads(json.dumps(written))).rope_scaling_factor == 8.0


def of(family, **changes):
    return {**changes, **family, **changes}


def rope(**changes):
    return {"rope_scaling": {**LLAMA3, **changes}}


@pytest.mark.parametrize(
    "changes",
    [
        *({"model_type": "gemma3"}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        *(
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            {"rope_parameters": {"type": "yarn", "factor": 2.0}},
        ),
        *(
            {"rope_scaling": {"factor": 2.0}},
            rope(rope_type="default", type="llama3"),
            rope(high_freq_factor=1.0),
        ),
        *(rope(attention_factor=2.0), rope(partial_rotary_factor=0.5)),
        *(
            {"rope_parameters": {"rope_theta": 5e5}} | rope(),
            {"original_max_position_embeddings": 32},
        ),
        *(
            {"partial_rotary_factor": 0.5},
            {"quantization_config": {"quant_method": "fp8"}},
            {"compression_config": {}},
        ),
        *(
            {"per_layer_config": {"0": {}}},
            {"sliding_window": 4096},
            {"layer_types": ["sliding_attention"] * 2},
        ),
        *(
            {"is_causal": False},
            {"attention_bias": True},
            {"mlp_bias": True},
            {"attention_dropout": 0.1},
        ),
        *({"hidden_act": "gelu"}, {"head_dim": 0}, {"num_key_value_heads": 0}),
        *(
            {"model_type": "qwen2"},
            of(QWEN2, use_sliding_window=True),
            of(QWEN3, attention_bias=True),
            of(QWEN3, head_dim=None),
            of(SMOLLM3, no_rope_layers=[0, 1]),
            of(QWEN2, layer_types=["sliding_attention"] * 2),
        ),
        *(
            {"rope_theta": None},
            {"rope_theta": float("inf")},
            {"hidden_size": 10**40},
            {"logits_scaling": 2.0},
        ),
        *(
            {"num_hidden_layers": 10**9},
            {"num_hidden_layers": True},
            {"tie_word_embeddings": "yes"},
        ),
        *(
            {"auto_map": {"AutoModel": "code.Model"}},
            {"is_encoder_decoder": True},
            {"pruned_heads": {"1": [0]}},
        ),
    ],
    ids=str,
)
def test_what_would_compute_something_else_is_refused_by_its_name(changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        architecture_from_hf(BASE | changes)


def test_a_model_of_no_family_is_not_exported():
    with pytest.raises(UserError, match=r"qkv_bias.*qk_norm"):
        hf_config(Architecture(8, 1, 1, 1, 8, qkv_bias=True, qk_norm="head"), "float32")


DIFFERENT = [  # from the tensors, and what is said
    ({"num_attention_heads": 16}, "into 16 heads"),  # of width 3, which is odd
    ({"num_key_value_heads": 4}, "4 key/value heads"),
    ({"vocab_size": 98}, r"embed_tokens.weight: shape \(97, 48\), expected \(98, 48\)"),
    (
        {"num_hidden_layers": 1},
        "model.layers.1.input_layernorm.weight: not part of this architecture",
    ),
]


@pytest.mark.parametrize(("changes", "message"), DIFFERENT)
def test_a_configuration_that_contradicts_the_tensors_is_refused(tmp_path, changes, message):
    write(tmp_path, BASE)
    (tmp_path / "config.json").write_text(json.dumps(BASE | changes))
    with pytest.raises(UserError, match=message):
        hf_weights(tmp_path)


def test_other_tensors_than_the_configuration_describes_are_refused(tmp_path):
    write(tmp_path, BASE | {"tie_word_embeddings": True})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert hf_weights(tmp_path).arch.tied_embeddings  # a copy of the embedding is none
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        hf_weights(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter"):  # which is not left out in silence
        hf_weights(tmp_path)


def test_metas_scaling_is_that_of_its_generation():
    small = MetaParams(dim=2048, n_layers=1, n_heads=32, use_scaled_rope=True)
    assert architecture_from_meta(small, 128256, 8192, tied=True).rope_scaling_factor == 32.0
