"""Llama in the words of others: Hugging Face's config.json and tensor names, Meta's params.json and rotary order.

Invariant: a mapping that would not be exact is refused. Plain values and tensors in, plain values and tensors out; no
files. May import model.flavors and torch.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from titanlite.model.flavors import Architecture

_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # in old files; computed, not learned


def hf_name(name: str) -> str:
    """Our parameter name -> Hugging Face's. Both keep rotary channels in the same order, so values stay as they are."""
    if name in _NAMES:
        return _NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_BLOCK_NAMES[rest]}"


def parameter_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in the model's own order."""
    kv_dim = arch.n_kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (arch.vocab_size, arch.dim)}
    of_block = {
        "attention_norm.weight": (arch.dim,),
        "attention.wq.weight": (arch.dim, arch.dim),
        "attention.wk.weight": (kv_dim, arch.dim),
        "attention.wv.weight": (kv_dim, arch.dim),
        "attention.wo.weight": (arch.dim, arch.dim),
        "ffn_norm.weight": (arch.dim,),
        "feed_forward.w1.weight": (arch.ffn_dim, arch.dim),
        "feed_forward.w2.weight": (arch.dim, arch.ffn_dim),
        "feed_forward.w3.weight": (arch.ffn_dim, arch.dim),
    }
    for layer in range(arch.n_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_block.items()}
    shapes["norm.weight"] = (arch.dim,)
    if not arch.tied_embeddings:
        shapes["output.weight"] = (arch.vocab_size, arch.dim)
    return shapes


def hf_config(arch: Architecture, dtype: str) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM. `dtype` is that of the saved tensors, such as "bfloat16"."""
    scaling = None
    if arch.rope_scaling_factor != 1.0:
        scaling = {
            "rope_type": "llama3",
            "factor": arch.rope_scaling_factor,
            "low_freq_factor": arch.rope_low_freq_factor,
            "high_freq_factor": arch.rope_high_freq_factor,
            "original_max_position_embeddings": arch.rope_original_max_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": arch.dim,
        "intermediate_size": arch.ffn_dim,
        "head_dim": arch.head_dim,
        "num_hidden_layers": arch.n_layers,
        "num_attention_heads": arch.n_heads,
        "num_key_value_heads": arch.n_kv_heads,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.max_seq_len,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": arch.tied_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def architecture_from_hf(config: dict[str, Any]) -> Architecture:
    """The architecture that a config.json describes.

    Raises:
        ValueError: it is no Llama that this model computes exactly; names every key that is in the way.
    """
    if config.get("model_type") != "llama":
        raise ValueError(f'model_type is {config.get("model_type")!r}, expected "llama"')
    missing = [
        key
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if not isinstance(config.get(key), int) or config[key] < 1
    ]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or {}  # transformers 5 gathers the rotary keys here
    scaling = (rope if rope.get("rope_type", "default") != "default" else None) or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    expected = {
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "head_dim": (config.get("head_dim") or width // heads, width / heads),
        "pretraining_tp": (config.get("pretraining_tp", 1), 1),
        "rope_scaling.rope_type": (kind, "llama3" if kind == "llama3" else "default"),
    }
    wrong = [f"{key} is {found!r}, expected {value!r}" for key, (found, value) in expected.items() if found != value]
    if wrong:
        raise ValueError("; ".join(wrong))
    return Architecture(
        dim=width,
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_seq_len=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        tied_embeddings=config.get("tie_word_embeddings", False),
        **_llama3_scaling(scaling if kind == "llama3" else {}),
    )


def tensor_differences(arch: Architecture, found: dict[str, tuple[int, ...]]) -> list[str]:
    """One line for each tensor of a Hugging Face Llama that is missing, superfluous or of another shape.

    Args:
        found: Hugging Face name -> shape.
    """
    expected = {hf_name(name): shape for name, shape in parameter_shapes(arch).items()}
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            lines.append(f"{name}: missing")
        elif name not in expected:
            if not _DERIVED.fullmatch(name) and not (arch.tied_embeddings and name == "lm_head.weight"):
                lines.append(f"{name}: not part of this architecture")
        elif expected[name] != tuple(found[name]):
            lines.append(f"{name}: shape {tuple(found[name])}, expected {expected[name]}")
    return lines


def architecture_from_meta(params: dict[str, Any], vocab_size: int, ffn_dim: int) -> Architecture:
    """The architecture of Meta's params.json. It leaves out two sizes, which the tensors tell.

    `use_scaled_rope` stands for the scaling of Llama 3.1, or that of 3.2 for its small models, as in Meta's
    llama-models repository.
    """
    scaling = {}
    if params.get("use_scaled_rope", False):
        factor = params.get("rope_scaling_factor") or (32.0 if params["dim"] in (2048, 3072) else 8.0)
        scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": params.get("high_freq_factor", 4.0)}
    return Architecture(
        dim=params["dim"],
        n_layers=params["n_layers"],
        n_heads=params["n_heads"],
        n_kv_heads=params.get("n_kv_heads") or params["n_heads"],
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        max_seq_len=131072 if scaling else 8192,
        norm_eps=params.get("norm_eps", 1e-5),
        rope_theta=float(params.get("rope_theta", 10000.0)),
        **_llama3_scaling(scaling),
    )


def from_meta_rotary(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of Meta's wq or wk, (H * D, C): Meta pairs channels 2i and 2i + 1, we pair i and i + D / 2."""
    heads = weight.unflatten(0, (-1, head_dim // 2, 2))  # (H, D / 2, 2, C)
    return heads.transpose(1, 2).reshape(weight.shape)


def _llama3_scaling(scaling: dict[str, Any]) -> dict[str, Any]:
    if not scaling:
        return {}
    return {
        "rope_scaling_factor": float(scaling["factor"]),
        "rope_low_freq_factor": float(scaling["low_freq_factor"]),
        "rope_high_freq_factor": float(scaling["high_freq_factor"]),
        "rope_original_max_seq_len": int(scaling.get("original_max_position_embeddings", 8192)),
    }
