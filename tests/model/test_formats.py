"""A config.json is read as in transformers, or rejected with the name of the key."""

import json
import math
import re
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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SIZES = json.loads(
    '{"num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,'
    ' "rope_theta": 10000.0}'
)
FAMILIES: dict[str, dict[str, Any]] = {}
for line in """
{"model_type": "mistral", "sliding_window": null}
{"model_type": "qwen2", "use_sliding_window": false, "sliding_window": 8, "max_window_layers": 1}
{"model_type": "qwen3", "use_sliding_window": false, "head_dim": 16, "max_window_layers": 1}
{"model_type": "olmo2", "attention_bias": false}
{"model_type": "olmo3", "sliding_window": 9, "rope_theta": 500000.0, \
"layer_types": ["sliding_attention", "full_attention"]}
{"model_type": "smollm3", "no_rope_layers": [1, 0], "no_rope_layer_interval": 2, \
"pad_token_id": null}
""".strip().splitlines():
    keys = json.loads(line)
    FAMILIES[keys["model_type"]] = SIZES | keys
QWEN2 = FAMILIES["qwen2"]
OLMO3 = FAMILIES["olmo3"]
ALL_WINDOWS = {"layer_types": ["sliding_attention"] * 2, "rope_scaling": YARN}
UNSCALED = {"rope_type": "default", "rope_theta": 10000.0}
BOTH_ROPES = {"full_attention": UNSCALED | YARN, "sliding_attention": UNSCALED}
BLENDED = {
    "rope_scaling": {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 7.0},
    "tie_word_embeddings": True,
}
# These keys do not configure rotary scaling.
PLAIN = """
{}
{"num_key_value_heads": 2, "head_dim": 8, "hidden_act": "swish", "rms_norm_eps": 0.5, \
"rope_theta": 100}
{"num_key_value_heads": null, "rope_theta": 7.0, "rope_parameters": {"rope_theta": 100.0}}
{"tie_word_embeddings": true, "torch_dtype": "float32", "dtype": "float32", "pad_token_id": 3}
{"pretraining_tp": 4, "initializer_range": 0.5, "use_cache": false, "temperature": 3.0, \
"eos_token_id": [1, 2]}
{"head_dim": 16}
{"hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 59}
"""
SAME: list[dict[str, Any]] = [
    *map(json.loads, PLAIN.strip().splitlines()),
    {"rope_theta": 7.0, "rope_scaling": {**LLAMA3, "rope_theta": 100.0}},
    {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3},
    {"rope_scaling": {}, "rope_parameters": {**OLD_WORD, "rope_theta": 100.0}},
    {"rope_scaling": OLD_WORD},
    # The original length is missing.
    {"max_position_embeddings": 48, "rope_scaling": {"rope_type": "llama3", **SCALING}},
    {"rope_scaling": {**LLAMA3, "factor": 1.0}},
    {"partial_rotary_factor": 1.0, "rope_scaling": {**LLAMA3, "partial_rotary_factor": 1.0}},
    {"rope_scaling": YARN},
    {"rope_scaling": {**YARN, "beta_fast": 9.0, "beta_slow": 2.0, "attention_factor": 1.5}},
    {"max_position_embeddings": 48, "rope_parameters": {"type": "yarn", "factor": 2.0}},
    BLENDED,
    *FAMILIES.values(),
    FAMILIES["mistral"] | {"head_dim": 16, "sliding_window": 9},
    OLMO3 | {"rope_scaling": YARN},
    OLMO3 | {"rope_parameters": BOTH_ROPES},
    OLMO3 | {"num_hidden_layers": 5, "layer_types": None},
    OLMO3 | ALL_WINDOWS,
    QWEN2 | {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
]


def write(folder, raw):
    """Write a random model of transformers with `raw` as its config.json.

    Weights are so large that attention is far from uniform, and norms are far from one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(raw))))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]) * 1.5
            parameter.copy_(noise + 1.0 if parameter.ndim == 1 else noise)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))


def assert_close(actual, expected):
    """Allow 1e-5 of the largest value, because fp32 sums have another order."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


# Angles of BLENDED that differ by an ulp differ by 1e-3 at far positions.
FAR = [changes for changes in SAME if changes is not BLENDED]
CASES = [(changes, 0) for changes in SAME]
CASES += [(changes, 90_000) for changes in FAR]


@pytest.mark.parametrize(("changes", "first"), CASES)
def test_logits_and_gradients_equal_those_of_transformers(tmp_path, changes, first):
    from transformers import AutoConfig, AutoModelForCausalLM

    write(tmp_path, BASE | changes)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    arch = hf_weights(tmp_path).arch
    ours = Llama(arch)
    load_hf_weights(tmp_path, ours)
    generator = torch.Generator().manual_seed(3)
    # transformers gives the padding token, 3, no gradient.
    tokens = torch.randint(4, 97, (2, 200), generator=generator)
    positions = torch.arange(first, first + 200)
    actual = ours(tokens, positions if first else None)
    expected = theirs(tokens, position_ids=positions[None]).logits

    assert_close(actual, expected)

    weight = torch.randn(actual.shape, generator=generator)
    for logits in (actual, expected):
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


@pytest.mark.parametrize("family", ["", *FAMILIES])
def test_every_key_that_transformers_writes_is_known(family):
    from transformers import AutoConfig

    keys = BASE | FAMILIES.get(family, {})
    rope = {"full_attention": dict(LLAMA3)} if family == "olmo3" else dict(LLAMA3)
    written = AutoConfig.for_model(**keys, rope_parameters=rope).to_dict()

    assert architecture_from_hf(json.loads(json.dumps(written))).rope_scaling_factor == 8.0


# The first key is named in the error.
REJECTED = """
{"model_type": "gemma3"}
{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
{"rope_scaling": {"type": "dynamic", "factor": 2.0}}
{"rope_parameters": {"type": "yarn", "factor": 1.0}}
{"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": false}}
{"rope_scaling": {"factor": 2.0}}
{"original_max_position_embeddings": 32}
{"partial_rotary_factor": 0.5}
{"quantization_config": {"quant_method": "fp8"}}
{"compression_config": {}}
{"per_layer_config": {"0": {}}}
{"sliding_window": 4096}
{"layer_types": ["sliding_attention", "sliding_attention"]}
{"is_causal": false}
{"attention_bias": true}
{"mlp_bias": true}
{"attention_dropout": 0.1}
{"hidden_act": "gelu"}
{"head_dim": 0}
{"model_type": ["llama"]}
{"num_key_value_heads": 0}
{"model_type": "qwen2"}
{"rope_theta": null}
{"rope_theta": Infinity}
{"rope_theta": 1.0}
{"rope_theta": 1e300}
{"rms_norm_eps": 1e300}
{"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 1e-320}}
{"hidden_size": 10000000000000000000000000000000000000000}
{"logits_scaling": 2.0}
{"num_hidden_layers": 1000000000}
{"num_hidden_layers": true}
{"tie_word_embeddings": "yes"}
{"auto_map": {"AutoModel": "code.Model"}}
{"is_encoder_decoder": true}
{"pruned_heads": {"1": [0]}}
"""
# Family and keys.
REJECTED_IN_FAMILY = """
qwen2 {"use_sliding_window": true}
qwen2 {"layer_types": ["sliding_attention", "sliding_attention"]}
qwen3 {"attention_bias": true}
qwen3 {"head_dim": null}
smollm3 {"no_rope_layers": [0, 1]}
olmo3 {"layer_types": ["full_attention", "sliding_attention"]}
olmo3 {"layer_types": "full_attention"}
olmo3 {"sliding_window": null}
olmo3 {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
olmo3 {"rope_parameters": {"full_attention": 3}}
"""
IN_FAMILY = []
for line in REJECTED_IN_FAMILY.strip().splitlines():
    family, _, text = line.partition(" ")
    keys = json.loads(text)
    # The rejected key comes first, and its value replaces the value of the family.
    IN_FAMILY.append(keys | FAMILIES[family] | keys)


@pytest.mark.parametrize(
    "changes",
    [
        *map(json.loads, REJECTED.strip().splitlines()),
        {"rope_scaling": LLAMA3 | {"rope_type": "default", "type": "llama3"}},
        {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
        {"rope_scaling": LLAMA3 | {"attention_factor": 2.0}},
        {"rope_scaling": LLAMA3 | {"partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": LLAMA3},
        *IN_FAMILY,
    ],
    ids=str,
)
def test_a_key_that_changes_the_computation_is_rejected_by_its_name(changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        architecture_from_hf(BASE | changes)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (LLAMA3 | {"factor": 0.5}, "factor"),
        (LLAMA3 | {"mscale": 1.0}, "high_freq_factor"),  # one of the known keys
        ({"rope_type": "yarn", "factor": 8.0, "attention_factor": 1e300}, "attention_factor"),
    ],
    ids=["value", "unknown key", "extreme value"],
)
def test_an_error_in_rope_settings_names_the_keys_of_the_config_json(settings, key):
    with pytest.raises(UserError) as error:
        architecture_from_hf(BASE | {"rope_scaling": settings})

    assert re.search(rf"\b{key}\b", str(error.value))
    # pydantic names the class of the settings: rope_scaling.llama3.factor.
    assert not re.search(r"llama3\.|yarn\.", str(error.value))


def test_a_model_that_no_family_supports_is_not_exported():
    with pytest.raises(UserError, match=r"qkv_bias.*qk_norm"):
        hf_config(Architecture(8, 1, 1, 1, 8, qkv_bias=True, qk_norm="head"), "float32")


UNEXPECTED = "model.layers.1.input_layernorm.weight: unexpected"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 16}, "into 16 heads"),  # the heads have the odd width 3
        ({"num_key_value_heads": 4}, "4 key/value heads"),
        ({"vocab_size": 98}, r"embed_tokens.weight: shape \(97, 48\), expected \(98, 48\)"),
        ({"num_hidden_layers": 1}, UNEXPECTED),
    ],
)
def test_a_configuration_that_contradicts_the_tensors_is_rejected(tmp_path, changes, message):
    write(tmp_path, BASE)
    (tmp_path / "config.json").write_text(json.dumps(BASE | changes))
    with pytest.raises(UserError, match=message):
        hf_weights(tmp_path)


def test_missing_and_additional_tensors_are_rejected(tmp_path):
    write(tmp_path, BASE | {"tie_word_embeddings": True})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")

    # A copy of the embedding is not an additional tensor.
    assert hf_weights(tmp_path).arch.tied_embeddings

    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(
        UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        hf_weights(tmp_path)

    (tmp_path / "adapter_config.json").write_text("{}")
    # An unknown tensor must not be ignored silently.
    with pytest.raises(UserError, match="adapter"):
        hf_weights(tmp_path)


def test_rotary_scaling_of_meta_files_depends_on_the_llama_generation():
    small = MetaParams(dim=2048, n_layers=1, n_heads=32, use_scaled_rope=True)
    assert architecture_from_meta(small, 128256, 8192, tied=True).rope_scaling_factor == 32.0
