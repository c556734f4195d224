"""The formats of other programs: Hugging Face's config.json and tensor names, Meta's params.json and rotary order.

Invariant: a mapping that would not be exact is refused. Each key of a file must be mapped, or be known to change
nothing, or have a value that this model computes. Any other key is refused by its name. No files are read here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, ValidationError, ValidationInfo, field_validator

from titanlite.config.errors import UserError
from titanlite.config.files import FileModel
from titanlite.config.flavors import Architecture
from titanlite.config.mistakes import explain, short, shown
from titanlite.config.registry import ARCHITECTURES, resolved

if TYPE_CHECKING:
    from torch import Tensor

Size = Annotated[int, Field(gt=0, lt=2**31)]
Layers = Annotated[int, Field(gt=0, le=1000)]  # each takes a millisecond before any tensor is read

HF_EMBEDDING, HF_OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_NAMES = {"tok_embeddings.weight": HF_EMBEDDING, "norm.weight": "model.norm.weight", "output.weight": HF_OUTPUT}
BLOCK_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_NORMS_AFTER = {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
# In old files. It is computed and not learned.
HF_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def hf_name(arch: Architecture, name: str) -> str:
    """Our parameter name -> Hugging Face's. Both have the same order of rotary channels, so the values are the same."""
    if name in _NAMES:
        return _NAMES[name]
    _, layer, *rest, kind = name.split(".")  # weight or bias
    return f"model.layers.{layer}.{_family(arch).names['.'.join(rest)]}.{kind}"


def _family(arch: Architecture) -> type[HFConfig]:
    """The first family that computes this model. Raises UserError: none does."""
    found = next((each for each in resolved(arch.families) if each.says(arch)), None)
    if found is None:
        raise UserError(f"It cannot be exported, because no model of transformers has all of these: {arch.switches}.")
    return found


@lru_cache(maxsize=4)
def parameter_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in the model's own order."""
    import torch  # a job is checked without it

    with torch.device("meta"):
        model = resolved(arch.model)(arch)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def hf_config(arch: Architecture, dtype: str) -> dict[str, Any]:
    """config.json of the first family that computes this model. `dtype` is that of the saved tensors, such as
    "bfloat16".

    Raises:
        UserError: none does.
    """
    family = _family(arch)
    scaling = {key: getattr(arch, name) for name, key in _aliases(_Llama3).items()} | {"rope_type": "llama3"}
    return {
        "architectures": [family.causal_lm],
        "model_type": family.kind,
        "rope_theta": arch.rope_theta,
        "rope_scaling": None if arch.rope_scaling_factor == 1.0 else scaling,
        **{"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "hidden_act": "silu"},
        **{"initializer_range": 0.02, "use_cache": True, "torch_dtype": dtype},
        "pad_token_id": None,  # some families have a default that may be beyond this vocabulary
        **{key: getattr(arch, name) for name, key in _aliases(family).items()},
    }


def architecture_from_hf(config: dict[str, Any]) -> Architecture:
    """The architecture that a config.json describes, as transformers reads it.

    Raises:
        UserError: it is no model that this one computes exactly. The message names every key that prevents it.
    """
    kind = config.get("model_type")
    families = dict.fromkeys(each for name in ARCHITECTURES for each in resolved(ARCHITECTURES[name].families))
    family = next((each for each in families if each.kind == kind), None)
    if family is None:
        known = ", ".join(each.kind for each in families)
        raise UserError(f"config.json: model_type = {short(shown(kind))}: only {known} can be computed.")
    try:
        parsed = family.model_validate({key: value for key, value in config.items() if key not in _WITHOUT_EFFECT})
    except ValidationError as failure:
        raise UserError(f"config.json: {explain(family, failure)}") from None
    sizes = _aliases(HFConfig).keys() - {"tied_embeddings", "head_dim"}
    if family is not HFConfig and (missing := sizes - parsed.model_fields_set):
        lacks = ", ".join(sorted(_aliases(HFConfig)[name] for name in missing))
        raise UserError(f"config.json: with model_type = {shown(kind)} there must be {lacks}.")
    rotary = [_rotary(table, parsed) for table in (parsed.rope_scaling, parsed.rope_parameters) if table is not None]
    if len(rotary) == 2 and rotary[0] != rotary[1]:  # the result would depend on the version of transformers
        raise UserError("config.json: rope_scaling and rope_parameters differ. Remove the one that is wrong.")
    values = ((name, getattr(parsed, name)) for name in _aliases(family))
    same = {name: 0 if value is None else value for name, value in values} | family.switches
    same["n_kv_heads"] = parsed.n_kv_heads or parsed.n_heads
    return family.architecture(**same, **(rotary or [_rotary(_Plain(), parsed)])[0])


def _aliases(model: type[FileModel]) -> dict[str, str]:
    """Field of Architecture -> key of the file."""
    return {name: field.alias for name, field in model.model_fields.items() if field.alias}


class _RotaryTable(FileModel):
    """`rope_scaling`, which transformers 5 calls `rope_parameters`. `type` is the old name of rope_type."""

    type: str = "default"
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: Literal[1] | None = None


class _Plain(_RotaryTable):
    rope_type: Literal["default"] = "default"


class _Llama3(_RotaryTable):
    rope_type: Literal["llama3"]
    rope_scaling_factor: Annotated[float, Field(ge=1.0, alias="factor")]
    rope_low_freq_factor: Annotated[PositiveFloat, Field(alias="low_freq_factor")]
    rope_high_freq_factor: Annotated[PositiveFloat, Field(alias="high_freq_factor")]
    rope_original_max_seq_len: Annotated[Size | None, Field(alias="original_max_position_embeddings")] = None


def _rotary(table: _RotaryTable, config: HFConfig) -> dict[str, Any]:
    """The rotary fields of Architecture."""
    fields: dict[str, Any] = {"rope_theta": table.rope_theta or config.rope_theta}
    if isinstance(table, _Llama3) and table.rope_scaling_factor > 1.0:
        if table.rope_high_freq_factor <= table.rope_low_freq_factor:
            raise UserError("config.json: rope_scaling: high_freq_factor must be greater than low_freq_factor.")
        fields |= {name: getattr(table, name) for name in _aliases(_Llama3)}
        fields["rope_original_max_seq_len"] = table.rope_original_max_seq_len or config.max_seq_len
    return fields


def _with_type(table: Any) -> Any:
    """{} means none."""
    return {"rope_type": table.get("type", "default"), **table} if isinstance(table, dict) and table else table or None


_Tables = Annotated[Annotated[_Plain | _Llama3, Field(discriminator="rope_type")] | None, BeforeValidator(_with_type)]


class HFConfig(FileModel):
    """config.json of a Llama, with the defaults of transformers' LlamaConfig. In those of other families the sizes must
    not be missing, because their defaults are others. A field with an alias is one of the architecture, the others are
    keys of which this model computes some values only.

    Attributes:
        kind: The `model_type`.
        causal_lm: The class of transformers.
        switches: What each model of the family has; see `Architecture.switches`.
        names: Module of a block -> its name there.
    """

    kind: ClassVar[str] = "llama"
    causal_lm: ClassVar[str] = "LlamaForCausalLM"
    switches: ClassVar[dict[str, Any]] = {}
    names: ClassVar[dict[str, str]] = BLOCK_NAMES
    architecture: ClassVar[type[Architecture]] = Architecture

    vocab_size: Annotated[Size, Field(alias="vocab_size")] = 32000
    dim: Annotated[Size, Field(alias="hidden_size")] = 4096
    ffn_dim: Annotated[Size, Field(alias="intermediate_size")] = 11008
    n_layers: Annotated[Layers, Field(alias="num_hidden_layers")] = 32
    n_heads: Annotated[Size, Field(alias="num_attention_heads")] = 32
    n_kv_heads: Annotated[Size | None, Field(alias="num_key_value_heads")] = None
    max_seq_len: Annotated[Size, Field(alias="max_position_embeddings")] = 2048
    norm_eps: Annotated[PositiveFloat, Field(alias="rms_norm_eps")] = 1e-6
    tied_embeddings: Annotated[bool, Field(alias="tie_word_embeddings")] = False
    head_dim: Annotated[Size | None, Field(alias="head_dim")] = None
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: _Tables = None
    rope_parameters: _Tables = None
    # Of these, this model computes some values only.
    hidden_act: Literal["silu", "swish"] = "silu"
    is_causal: Literal[True] = True
    attention_dropout: Literal[0, None] = None
    partial_rotary_factor: Literal[1, None] = None
    pruned_heads: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    rope_interleaved: Literal[False] = False
    add_cross_attention: Literal[False] = False
    is_encoder_decoder: Literal[False] = False
    sliding_window: None = None
    layer_types: list[Literal["full_attention"]] | None = None
    quantization_config: None = None
    per_layer_config: None = None

    @classmethod
    def says(cls, arch: Architecture) -> bool:
        """Whether a config.json of this family can describe the model."""
        if type(arch) is not cls.architecture:
            return False
        return arch.switches == cls.switches | {n: v for n, v in arch.switches.items() if n in _aliases(cls)}


class _Mistral(HFConfig):
    """The window must not be missing, because transformers has a default for it."""

    kind: ClassVar = "mistral"
    causal_lm: ClassVar = "MistralForCausalLM"

    sliding_window: Size | None = Field(alias="sliding_window")


class _Qwen2(HFConfig):
    """Sizes of a window do not count where it is not used."""

    kind: ClassVar = "qwen2"
    causal_lm: ClassVar = "Qwen2ForCausalLM"
    switches: ClassVar = {"qkv_bias": True}

    use_sliding_window: Literal[False] = False
    sliding_window: Size | None = None
    max_window_layers: int | None = None
    use_mrope: Literal[False] = False


class _Qwen3(_Qwen2):
    """A width of heads must not be missing, because transformers has a default for it."""

    kind: ClassVar = "qwen3"
    causal_lm: ClassVar = "Qwen3ForCausalLM"
    switches: ClassVar = {"qk_norm": "head"}

    head_dim: Size = Field(alias="head_dim")


class _SmolLM3(_Qwen2):
    kind: ClassVar = "smollm3"
    causal_lm: ClassVar = "SmolLM3ForCausalLM"
    switches: ClassVar = {}

    tied_embeddings: bool = Field(True, alias="tie_word_embeddings")
    rope_theta: PositiveFloat = 2e6
    no_rope_interval: Size = Field(4, alias="no_rope_layer_interval")
    no_rope_layers: list[int] | None = None

    @field_validator("no_rope_layers")
    @classmethod
    def _are_each_nth(cls, layers: list[int] | None, info: ValidationInfo) -> list[int] | None:
        each, count = info.data.get("no_rope_interval", 4), info.data.get("n_layers", 0)
        if layers is not None and layers != [int(i % each != 0) for i in range(1, count + 1)]:
            raise ValueError("must be 0 for each layer of no_rope_layer_interval, and 1 for the others")
        return layers


class _Olmo2(HFConfig):
    kind: ClassVar = "olmo2"
    causal_lm: ClassVar = "Olmo2ForCausalLM"
    switches: ClassVar = {"qk_norm": "projection", "norm_placement": "after"}
    names: ClassVar = BLOCK_NAMES | _NORMS_AFTER


FAMILIES = HFConfig, _Mistral, _Qwen2, _Qwen3, _SmolLM3, _Olmo2
"""The first one that can describe a model is exported."""


# Keys that do not change what a causal model computes from its weights: descriptions, the dtype of the stored weights,
# heads for other tasks, how attention is computed, and defaults of generate().
_WITHOUT_EFFECT = frozenset(
    """
    architectures model_type transformers_version transformers.js_config _name_or_path name_or_path _commit_hash
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
    n_layers: Layers
    n_heads: Size
    n_kv_heads: Size | None = None
    vocab_size: Size | Literal[-1] = -1
    norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10000.0
    use_scaled_rope: bool = False
    multiple_of: int | None = None
    ffn_dim_multiplier: float | None = None


def architecture_from_meta(params: MetaParams, vocab_size: int, ffn_dim: int, tied: bool) -> Architecture:
    """The architecture of Meta's params.json and of what is read from the tensors.

    `use_scaled_rope` means the scaling of Llama 3.1, or that of Llama 3.2 for its small models, as in Meta's
    llama-models repository.
    """
    same = params.model_dump(include={"dim", "n_layers", "n_heads", "norm_eps", "rope_theta"})
    same |= {"n_kv_heads": params.n_kv_heads or params.n_heads, "ffn_dim": ffn_dim, "tied_embeddings": tied}
    same["vocab_size"] = vocab_size if params.vocab_size == -1 else params.vocab_size
    if not params.use_scaled_rope:
        return Architecture(**same, max_seq_len=8192)
    return Architecture(**same, rope_scaling_factor=32.0 if params.dim in (2048, 3072) else 8.0)


def from_meta_rotary(name: str, weight: Tensor, head_dim: int) -> Tensor:
    """A weight of Meta's or torchtitan's in this model's layout: the rows of wq and wk, (H * D, C), in another order.
    They pair the channels 2i and 2i + 1, this model i and i + D / 2."""
    if not name.endswith(("attention.wq.weight", "attention.wk.weight")):
        return weight
    heads = weight.unflatten(0, (-1, head_dim // 2, 2))  # (H, D / 2, 2, C)
    return heads.transpose(1, 2).reshape(weight.shape)
