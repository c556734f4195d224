"""The formats of other programs: Hugging Face's config.json and tensor names, Meta's params.json and rotary order.

Invariant: a mapping that would not be exact is refused. Each key of a file must be mapped, or be known to change
nothing, or have the one value that this model computes. Any other key is refused by its name. No files are read here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, ValidationError, model_validator
from torch import Tensor

from titanlite.config.files import FileModel, explain, short
from titanlite.config.flavors import Architecture

Size = Annotated[int, Field(gt=0, lt=2**31)]
MOST_LAYERS = 10_000  # a limit, because lists of this length are made before any tensor is read

HF_EMBEDDING, HF_OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_NAMES = {"tok_embeddings.weight": HF_EMBEDDING, "norm.weight": "model.norm.weight", "output.weight": HF_OUTPUT}
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
# In old files. It is computed and not learned.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def hf_name(name: str) -> str:
    """Our parameter name -> Hugging Face's. Both have the same order of rotary channels, so the values are the same."""
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
    """The architecture that a config.json describes, as transformers reads it.

    Raises:
        ValueError: it is no Llama that this model computes exactly. The message names every key that prevents it.
    """
    if (kind := config.get("model_type")) != "llama":
        raise ValueError(f'model_type is {short(repr(kind))}, expected "llama"')
    try:
        parsed = _Config.model_validate({key: value for key, value in config.items() if key not in _WITHOUT_EFFECT})
    except ValidationError as failure:
        raise ValueError(explain(failure)) from None
    heads, width = parsed.num_attention_heads, parsed.hidden_size
    kv_heads, head_dim = parsed.num_key_value_heads or heads, parsed.head_dim or width // heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads is {kv_heads}, expected a divisor of num_attention_heads = {heads}")
    if head_dim * heads != width or head_dim % 2:
        share = f"hidden_size / num_attention_heads = {width / heads}"
        raise ValueError(f"head_dim is {head_dim}, expected {share}, an even number")
    return Architecture(
        dim=width,
        n_layers=parsed.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        ffn_dim=parsed.intermediate_size,
        vocab_size=parsed.vocab_size,
        max_seq_len=parsed.max_position_embeddings,
        norm_eps=parsed.rms_norm_eps,
        tied_embeddings=parsed.tie_word_embeddings,
        **_rotary(parsed),
    )


class _Rotary(FileModel):
    """`rope_scaling`, which transformers 5 calls `rope_parameters`. `type` is the old name of rope_type."""

    rope_type: Literal["default", "llama3"] = "default"
    type: str = "default"
    rope_theta: PositiveFloat | None = None
    factor: Annotated[float, Field(ge=1.0)] | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: Literal[1] | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_word(cls, values: Any) -> Any:
        if isinstance(values, dict) and "type" in values and "rope_type" not in values:
            return {**values, "rope_type": values["type"]}
        return values

    @model_validator(mode="after")
    def _belongs_to_its_type(self) -> Self:
        scaling = {key: getattr(self, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        if self.rope_type == "default":
            given = [key for key, value in scaling.items() if value is not None]
            if given:
                raise ValueError(f"{', '.join(given)} without rope_type: is it llama3?")
        elif missing := [key for key, value in scaling.items() if value is None]:
            raise ValueError(f"rope_type llama3 needs {', '.join(missing)}")
        elif scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
            raise ValueError("high_freq_factor must be greater than low_freq_factor")
        return self


_RotaryTable = Annotated[_Rotary | None, BeforeValidator(lambda table: table or None)]  # {} means none


class _Config(FileModel):
    """config.json of a Llama, with the defaults of transformers' LlamaConfig. If a key has a single allowed value, this
    model does not compute the others."""

    model_type: Literal["llama"]
    vocab_size: Size = 32000
    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size = 2048
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: _RotaryTable = None
    rope_parameters: _RotaryTable = None
    hidden_act: Literal["silu", "swish"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    attention_dropout: Literal[0] | None = None
    partial_rotary_factor: Literal[1] | None = None
    rope_interleaved: Literal[False] = False
    sliding_window: None = None
    layer_types: None = None
    is_causal: Literal[True] = True
    add_cross_attention: Literal[False] = False
    is_encoder_decoder: Literal[False] = False
    quantization_config: None = None
    per_layer_config: None = None
    pruned_heads: Annotated[dict[str, Any], Field(max_length=0)] | None = None


# Keys that do not change what a causal Llama computes from its weights: descriptions, the dtype of the stored weights,
# heads for other tasks, how attention is computed, and defaults of generate().
_WITHOUT_EFFECT = frozenset(
    """
    architectures transformers_version transformers.js_config _name_or_path name_or_path _commit_hash
    is_llama_config unsloth_version unsloth_fixed dtype torch_dtype use_bfloat16 torchscript tf_legacy_loss
    initializer_range use_cache pretraining_tp chunk_size_feed_forward is_decoder cross_attention_hidden_size
    tie_encoder_decoder max_sequence_length pad_token_id bos_token_id eos_token_id sep_token_id
    decoder_start_token_id tokenizer_class prefix return_dict output_attentions output_hidden_states
    tie_last_hidden_states _attn_implementation_autoset finetuning_task task_specific_params problem_type
    id2label label2id num_labels max_length max_new_tokens min_length min_new_tokens do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p epsilon_cutoff
    eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905
)


def _rotary(config: _Config) -> dict[str, Any]:
    """The rotary fields of Architecture.

    Raises:
        ValueError: rope_scaling and rope_parameters differ, so the result would depend on the version of transformers.
    """
    found = [_rotary_of(table, config) for table in (config.rope_scaling, config.rope_parameters) if table is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError("rope_scaling and rope_parameters differ. Remove the one that is wrong")
    return found[0] if found else _rotary_of(_Rotary(), config)


def _rotary_of(table: _Rotary, config: _Config) -> dict[str, Any]:
    theta = {"rope_theta": float(table.rope_theta or config.rope_theta)}
    if table.rope_type == "default" or table.factor == 1.0:
        return theta
    return theta | {
        "rope_scaling_factor": table.factor,
        "rope_low_freq_factor": table.low_freq_factor,
        "rope_high_freq_factor": table.high_freq_factor,
        "rope_original_max_seq_len": table.original_max_position_embeddings or config.max_position_embeddings,
    }


def tensor_differences(arch: Architecture, found: dict[str, tuple[int, ...]]) -> list[str]:
    """One line per tensor of a Hugging Face Llama that is missing, superfluous or of another shape.

    Args:
        found: Hugging Face name -> shape.
    """
    expected = {hf_name(name): shape for name, shape in parameter_shapes(arch).items()}
    spare = {name for name in found if _DERIVED.fullmatch(name) or (arch.tied_embeddings and name == HF_OUTPUT)}
    return differences(expected, {name: shape for name, shape in found.items() if name not in spare})


def differences(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    """One line per tensor that is missing, superfluous or of another shape. Both: name -> shape."""
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            lines.append(f"{name}: missing")
        elif name not in expected:
            lines.append(f"{short(name)}: not part of this architecture")
        elif expected[name] != tuple(found[name]):
            lines.append(f"{name}: shape {tuple(found[name])}, expected {expected[name]}")
    return lines


class MetaParams(FileModel):
    """Meta's params.json. It does not give the vocabulary (-1) and the feed-forward width; the tensors have these
    sizes."""

    dim: Size
    n_layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)]
    n_heads: Size
    n_kv_heads: Size | None = None
    vocab_size: Size | Literal[-1] = -1
    norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10000.0
    use_scaled_rope: bool = False
    rope_scaling_factor: Annotated[float, Field(ge=1.0)] | None = None
    high_freq_factor: Annotated[float, Field(gt=1.0)] = 4.0
    multiple_of: int | None = None
    ffn_dim_multiplier: float | None = None
    max_seq_len: int | None = None
    max_batch_size: int | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim = {self.dim} must be a multiple of 2 * n_heads = {2 * self.n_heads}")
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            raise ValueError(f"n_heads = {self.n_heads} must be a multiple of n_kv_heads = {self.n_kv_heads}")
        return self


def architecture_from_meta(params: MetaParams, vocab_size: int, ffn_dim: int) -> Architecture:
    """The architecture of Meta's params.json and of the two sizes that are read from the tensors.

    `use_scaled_rope` means the scaling of Llama 3.1, or that of Llama 3.2 for its small models, as in Meta's
    llama-models repository.
    """
    scaling: dict[str, Any] = {}
    if params.use_scaled_rope:
        factor = params.rope_scaling_factor or (32.0 if params.dim in (2048, 3072) else 8.0)
        scaling = {"rope_scaling_factor": factor, "rope_high_freq_factor": params.high_freq_factor}
    return Architecture(
        dim=params.dim,
        n_layers=params.n_layers,
        n_heads=params.n_heads,
        n_kv_heads=params.n_kv_heads or params.n_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        max_seq_len=131072 if scaling else 8192,
        norm_eps=params.norm_eps,
        rope_theta=float(params.rope_theta),
        **scaling,
    )


def from_meta_rotary(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of Meta's or torchtitan's wq or wk, (H * D, C). They pair the channels 2i and 2i + 1, this model
    i and i + D / 2."""
    heads = weight.unflatten(0, (-1, head_dim // 2, 2))  # (H, D / 2, 2, C)
    return heads.transpose(1, 2).reshape(weight.shape)
