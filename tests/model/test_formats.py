"""A config.json is read as transformers reads it: the same logits, or a refusal that names the key."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from titanlite.checkpoint.huggingface import HuggingFaceReader, load_hf_weights
from titanlite.config.errors import UserError
from titanlite.model import formats
from titanlite.model.formats import MetaParams, architecture_from_hf, architecture_from_meta, hf_config
from titanlite.model.llama import Llama

BASE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", **SCALING, "original_max_position_embeddings": 32}
SAME = {
    "defaults only": {},
    "grouped heads": {"num_key_value_heads": 2},
    "no number of key heads": {"num_key_value_heads": None},
    "the width of a head": {"head_dim": 8},
    "the other name of SiLU": {"hidden_act": "swish"},
    "another epsilon": {"rms_norm_eps": 0.5},
    "rope_theta": {"rope_theta": 100.0},
    "a whole rope_theta": {"rope_theta": 100},
    "rope_theta in rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "rope_theta twice": {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 100.0}},
    "rope_theta in rope_scaling": {"rope_theta": 7.0, "rope_scaling": {**LLAMA3, "rope_theta": 100.0}},
    "llama3 in rope_scaling": {"rope_scaling": LLAMA3},
    "llama3 in rope_parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 100.0}},
    "llama3 in rope_parameters, old word": {
        "rope_parameters": {"type": "llama3", **SCALING, "original_max_position_embeddings": 32, "rope_theta": 100.0}
    },
    "llama3 in rope_scaling, old word": {
        "rope_scaling": {"type": "llama3", **SCALING, "original_max_position_embeddings": 32}
    },
    "llama3 in both": {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3},
    "llama3, empty rope_scaling": {"rope_scaling": {}, "rope_parameters": LLAMA3},
    "llama3 without an original length": {
        "max_position_embeddings": 48,
        "rope_scaling": {"rope_type": "llama3", **SCALING},
    },
    "llama3 by a factor of one": {"rope_scaling": {**LLAMA3, "factor": 1.0}},
    "all channels are rotated": {
        "partial_rotary_factor": 1.0,
        "rope_scaling": {**LLAMA3, "partial_rotary_factor": 1.0},
    },
    "tied": {"tie_word_embeddings": True},
    "a dtype": {"torch_dtype": "float32", "dtype": "float32"},
    "parts of the training": {"pretraining_tp": 4, "initializer_range": 0.5, "use_cache": False},
    "parts of generate": {"temperature": 3.0, "repetition_penalty": 2.0, "num_beams": 4, "bos_token_id": 5},
    "special tokens": {"pad_token_id": 3, "eos_token_id": [1, 2]},
}


def write(folder, raw):
    """A random model of transformers with `raw` as its config.json."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig.from_dict(json.loads(json.dumps(raw))))
    with torch.no_grad():
        for parameter in model.parameters():  # large, so that a wrong angle shows in the logits
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("name", SAME)
def test_logits_are_those_of_transformers(tmp_path, name):
    from transformers import AutoModelForCausalLM

    write(tmp_path, BASE | SAME[name])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    reader = HuggingFaceReader(tmp_path)
    ours = Llama(reader.arch)
    load_hf_weights(tmp_path, ours)
    tokens = torch.randint(97, (2, 200), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()  # fp32 sums in another order
    assert architecture_from_hf(hf_config(reader.arch, "float32")) == reader.arch


def test_every_key_that_transformers_writes_is_known():
    from transformers import LlamaConfig

    written = LlamaConfig(**BASE, rope_parameters=dict(LLAMA3)).to_dict()
    assert architecture_from_hf(json.loads(json.dumps(written))).rope_scaling_factor == 8.0
    older = dict.fromkeys(formats._WITHOUT_EFFECT) | {"is_encoder_decoder": False, "add_cross_attention": False}
    assert architecture_from_hf(BASE | older) == architecture_from_hf(BASE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.* 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.* 'dynamic'"),
        ({"rope_parameters": {"type": "yarn", "factor": 2.0}}, "rope_parameters.* 'yarn'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.*factor is unknown"),
        ({"rope_scaling": {**LLAMA3, "rope_type": "default", "type": "llama3"}}, "rope_scaling.*factor is unknown"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "greater than low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 2.0}}, "rope_scaling.*attention_factor is unknown"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5}}, "rope_parameters differ"),
        ({"rope_scaling": {**LLAMA3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"original_max_position_embeddings": 32}, "original_max_position_embeddings is unknown"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"compression_config": {}}, "compression_config is unknown"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
        ({"sliding_window": 4096}, "sliding_window is 4096, expected None"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"is_causal": False}, "is_causal is False"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"num_attention_heads": 16}, "head_dim is 3, .* an even number"),
        ({"num_attention_heads": 7}, "head_dim is 6"),
        ({"num_key_value_heads": 4}, "a divisor of num_attention_heads = 6"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected less than or equal to 1000"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": 10**40}, "hidden_size is 1000000000000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"logits_scaling": 2.0}, "logits_scaling is unknown"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map is unknown"),
    ],
)
def test_what_would_compute_something_else_is_refused_by_its_name(changes, message):
    with pytest.raises(ValueError, match=message):
        architecture_from_hf(BASE | changes)


def test_tied_embeddings_with_another_output_matrix_in_the_files_are_refused(tmp_path):
    write(tmp_path, BASE | {"tie_word_embeddings": True})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert HuggingFaceReader(tmp_path).arch.tied_embeddings  # a copy of the embedding is none
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        HuggingFaceReader(tmp_path)


def test_an_adapter_is_not_left_out_in_silence(tmp_path):
    write(tmp_path, BASE)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter"):
        HuggingFaceReader(tmp_path)


def test_metas_scaling_is_that_of_its_generation():
    small = MetaParams(dim=2048, n_layers=1, n_heads=32, use_scaled_rope=True)
    assert architecture_from_meta(small, 128256, 8192).rope_scaling_factor == 32.0
    assert architecture_from_meta(small.model_copy(update={"dim": 4096}), 128256, 8192).rope_scaling_factor == 8.0
