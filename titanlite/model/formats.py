"""Convert configurations, tensor names and layouts of Hugging Face and Meta models.

Invariant: A model that cannot be converted exactly is rejected. Each key of a config.json must be
mapped to a field of `Architecture`, have no effect on the result, or have a value that this model
implements. Any other key raises an error that names the key. This module reads no files.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from titanlite.config.errors import UserError
from titanlite.config.flavors import Architecture
from titanlite.config.mistakes import explain_error, format_value, shorten
from titanlite.config.models import FileModel
from titanlite.config.registry import ARCHITECTURES, resolve
from titanlite.config.schema import (
    PositiveModerate,
    RopeScalingFactor,
    RopeTheta,
    RopeTurns,
)

if TYPE_CHECKING:
    from torch import Tensor

Size = Annotated[int, Field(gt=0, lt=2**31)]
Layers = Annotated[int, Field(gt=0, le=1000)]  # limited, because building a layer takes 1 ms

HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"
HF_NAMES = {
    "tok_embeddings.weight": HF_EMBEDDING,
    "norm.weight": "model.norm.weight",
    "output.weight": HF_OUTPUT,
}
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
# Old files contain these tensors, which are computed rather than learned.
HF_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def hf_name(arch: Architecture, name: str) -> str:
    """Return the Hugging Face name of a parameter.

    For example, "layers.3.attention.wq.weight" becomes "model.layers.3.self_attn.q_proj.weight".
    """
    if name in HF_NAMES:
        return HF_NAMES[name]
    _, layer, *module, kind = name.split(".")  # kind is "weight" or "bias"
    hf_module = _find_family(arch).names[".".join(module)]
    return f"model.layers.{layer}.{hf_module}.{kind}"


def _find_family(arch: Architecture) -> type[HFConfig]:
    """Return the first Hugging Face model family whose config.json can describe an architecture.

    Raises:
        UserError: If no family can describe it.
    """
    for family in resolve(arch.families):
        if family.can_represent(arch):
            return family
    raise UserError(
        f"Cannot export: no model in transformers combines the options {arch.switches}."
    )


def has_hf_family(arch: Architecture) -> bool:
    """Return whether one of the transformers model families can represent an architecture."""
    return any(family.can_represent(arch) for family in resolve(arch.families))


@lru_cache(maxsize=4)
def parameter_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by name, in the order of the model.

    The model is built on the meta device, so this allocates no weights.
    """
    import torch  # validating a job does not need it

    with torch.device("meta"):
        model = resolve(arch.model)(arch)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def hf_config(arch: Architecture, dtype: str) -> dict[str, Any]:
    """Create the content of config.json for a model exported to Hugging Face transformers.

    `dtype` is the dtype of the saved tensors, for example "bfloat16".

    Raises:
        UserError: If no model family in transformers can represent the model.
    """
    family = _find_family(arch)
    fields = _export_fields(arch, family)
    if "layer_types" in fields:  # some layers have a sliding window
        fields |= _export_layer_types(arch)

    return {
        "architectures": [family.causal_lm],
        "model_type": family.kind,
        "rope_theta": arch.rope_theta,
        "rope_scaling": _export_rope_scaling(arch),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
        "pad_token_id": None,  # the default of some families may exceed this vocabulary
        **fields,
    }


def _export_layer_types(arch: Architecture) -> dict[str, Any]:
    """Return the config.json entries for a model in which some layers have a sliding window.

    As in OLMo 3, these layers do not scale RoPE. transformers 5 reads separate RoPE settings for
    layers with and without a window from rope_parameters. Earlier versions read rope_theta and
    rope_scaling, and apply the scaling only to layers without a window.
    """
    unscaled = {"rope_type": "default", "rope_theta": arch.rope_theta}
    return {
        "layer_types": _layer_types(arch.full_attention_interval, arch.n_layers),
        "rope_parameters": {
            "full_attention": unscaled | (_export_rope_scaling(arch) or {}),
            "sliding_attention": unscaled,
        },
    }


def _export_rope_scaling(arch: Architecture) -> dict[str, Any] | None:
    """Return the `rope_scaling` value for config.json, or None without RoPE scaling."""
    if arch.rope_scaling_factor == 1.0:
        return None

    table = _YarnRope if arch.rope_scaling == "yarn" else _Llama3Rope
    settings = _export_fields(arch, table)
    # Without attention_factor, transformers computes the default.
    settings = {key: value for key, value in settings.items() if value}
    return settings | {"rope_type": arch.rope_scaling}


def _export_fields(arch: Architecture, model: type[FileModel]) -> dict[str, Any]:
    """Convert fields of an architecture to keys and values of a config.json.

    For example, `n_heads` = 32 becomes {"num_attention_heads": 32}.

    Args:
        arch: Architecture of the model.
        model: Class that defines the fields to convert. Their aliases are the keys.
    """
    return {key: getattr(arch, name) for name, key in _keys_by_field(model).items()}


def architecture_from_hf(config: dict[str, Any]) -> Architecture:
    """Convert the content of a config.json to an architecture.

    Missing keys get the default values of transformers.

    Raises:
        UserError: If the model family is not supported, or the model cannot be represented exactly.
            The message names every key that prevents it.
    """
    parsed = _parse_hf_config(config)
    family = type(parsed)  # the class of the model family, such as `_Qwen3`

    fields = _import_fields(parsed) | _read_rope(parsed)
    fields["n_kv_heads"] = parsed.n_kv_heads or parsed.n_heads
    # The file lacks options that all models of a family share, such as the biases of Qwen 2.
    fields |= family.switches
    return family.architecture(**fields)


def _import_fields(parsed: FileModel) -> dict[str, Any]:
    """Convert keys and values of a parsed config.json to fields of an architecture.

    This is the inverse of `_export_fields`. Null values, such as a disabled sliding window, become
    0.
    """
    fields: dict[str, Any] = {}
    for name in _keys_by_field(type(parsed)):
        value = getattr(parsed, name)
        fields[name] = 0 if value is None else value
    return fields


def _parse_hf_config(config: dict[str, Any]) -> HFConfig:
    """Validate the content of a config.json for the model family that its `model_type` names.

    Raises:
        UserError: If the family is not supported, or keys are missing or not supported.
    """
    families = _families_by_kind()
    kind = config.get("model_type")
    family = families.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(
            f"config.json: model_type = {shorten(format_value(kind))} is not supported; "
            f"expected one of {', '.join(families)}."
        )

    # Keys that have an effect are checked. Unknown keys are errors.
    relevant = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT}
    try:
        parsed = family.model_validate(relevant)
    except ValidationError as error:
        raise UserError(f"config.json: {explain_error(family, error)}") from None

    # Missing sizes have been set to the Llama defaults, which are wrong for other families.
    if family.kind != "llama":
        _check_has_sizes(parsed)
    return parsed


def _check_has_sizes(parsed: HFConfig) -> None:
    """Check that a config.json of a family other than Llama contains all model sizes.

    titanlite has only the default sizes of Llama, so other families must state all sizes.

    Raises:
        UserError: If a size is missing. The message lists all missing keys.
    """
    keys = _keys_by_field(HFConfig)
    required = keys.keys() - {"tied_embeddings", "head_dim"}
    missing = required - parsed.model_fields_set
    if missing:
        missing_keys = ", ".join(sorted(keys[name] for name in missing))
        kind = format_value(parsed.kind)
        raise UserError(f"config.json: model_type = {kind} requires {missing_keys}.")


def _families_by_kind() -> dict[str, type[HFConfig]]:
    """Map each supported `model_type` of a config.json to its model family, including plugins."""
    families: dict[str, type[HFConfig]] = {}
    for name in ARCHITECTURES:
        for family in resolve(ARCHITECTURES[name].families):
            families.setdefault(family.kind, family)
    return families


def _keys_by_field(model: type[FileModel]) -> dict[str, str]:
    """Map the `Architecture` fields in a class such as `HFConfig` to their keys in config.json.

    For example, "n_heads" is mapped to "num_attention_heads".
    """
    fields = model.model_fields.items()
    return {name: field.alias for name, field in fields if field.alias}


class _RopeTable(FileModel):
    """RoPE settings in a config.json: `rope_scaling`, or `rope_parameters` since transformers 5."""

    type: str = "default"
    """The key that older files use instead of `rope_type`."""
    rope_theta: RopeTheta | None = None
    partial_rotary_factor: Literal[1] | None = None


class _DefaultRope(_RopeTable):
    """RoPE without scaling."""

    rope_type: Literal["default"] = "default"


class _Llama3Rope(_RopeTable):
    """RoPE with the frequency scaling of Llama 3.1."""

    rope_type: Literal["llama3"]
    rope_scaling_factor: RopeScalingFactor = Field(alias="factor")
    rope_low_freq_factor: RopeTurns = Field(alias="low_freq_factor")
    rope_high_freq_factor: RopeTurns = Field(alias="high_freq_factor")
    rope_original_max_seq_len: Size | None = Field(None, alias="original_max_position_embeddings")

    def import_fields(self) -> dict[str, Any]:
        """Convert these RoPE settings to fields of `Architecture`, such as "rope_scaling_factor".

        Raises:
            UserError: If high_freq_factor is not greater than low_freq_factor.
        """
        # Llama 3.1 interpolates between the two factors, so they must differ.
        if self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise UserError(
                "config.json: rope_scaling: high_freq_factor must be greater than low_freq_factor."
            )
        return _import_fields(self)


class _YarnRope(_RopeTable):
    """RoPE with YaRN frequency scaling. The default values match transformers."""

    rope_type: Literal["yarn"]
    truncate: Literal[True] = True
    rope_scaling_factor: Annotated[RopeScalingFactor, Field(gt=1.0, alias="factor")]
    rope_beta_fast: RopeTurns = Field(32.0, alias="beta_fast")
    rope_beta_slow: RopeTurns = Field(1.0, alias="beta_slow")
    rope_attention_factor: float | None = Field(None, ge=1e-6, le=1e6, alias="attention_factor")
    rope_original_max_seq_len: Size | None = Field(None, alias="original_max_position_embeddings")

    def import_fields(self) -> dict[str, Any]:
        """Return the fields of `Architecture` that this table sets."""
        attention_factor = self.rope_attention_factor or 0.0  # 0 selects the default
        return _import_fields(self) | {"rope_attention_factor": attention_factor}


_AnyRope = _DefaultRope | _Llama3Rope | _YarnRope
_ROPE_TABLES = {"default": _DefaultRope, "llama3": _Llama3Rope, "yarn": _YarnRope}


def _read_rope(config: HFConfig) -> dict[str, Any]:
    """Return the fields of `Architecture` that the RoPE settings of a config.json determine.

    transformers 5 writes the settings to rope_parameters, and earlier versions to rope_scaling.

    Raises:
        UserError: If both exist and differ, or if the settings are invalid.
    """
    settings = config.rope_parameters or config.rope_scaling or _DefaultRope()
    fields = _rope_fields(settings, config)
    if config.rope_scaling is not None and _rope_fields(config.rope_scaling, config) != fields:
        raise UserError(
            "config.json: rope_scaling and rope_parameters differ. Remove the one that is wrong."
        )
    return fields


def _rope_fields(rope: _AnyRope, config: HFConfig) -> dict[str, Any]:
    """Convert the RoPE settings of a config.json to fields of `Architecture`, such as "rope_theta".

    Args:
        rope: RoPE settings of the config.json.
        config: All other settings, which provide values that are missing in `rope`.

    Raises:
        UserError: From `import_fields`, if the settings contradict each other.
    """
    fields: dict[str, Any] = {"rope_theta": rope.rope_theta or config.rope_theta}
    if isinstance(rope, _DefaultRope) or rope.rope_scaling_factor == 1.0:
        return fields  # without scaling, the other settings have no effect

    fields |= rope.import_fields()  # the scaling factor and further options of this rope_type
    fields["rope_scaling"] = rope.rope_type
    fields["rope_original_max_seq_len"] = rope.rope_original_max_seq_len or config.max_seq_len
    return fields


def _parse_rope_table(table: Any) -> _AnyRope | None:
    """Validate the RoPE settings of a config.json according to their "rope_type".

    Older files call this key "type". If the table is empty, return None, as for a file without
    RoPE settings.

    Raises:
        ValueError: If the settings are invalid. The message names all keys that are invalid.
    """
    if not table:
        return None
    if not isinstance(table, dict):
        raise ValueError("must be a table")

    settings = {"rope_type": table.get("type", "default"), **table}
    model = _ROPE_TABLES.get(str(settings["rope_type"]))
    if model is None:
        raise ValueError(f"has a rope_type that is none of {', '.join(_ROPE_TABLES)}")
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise ValueError(f"is invalid: {explain_error(model, error)}") from None


_Rope = Annotated[_AnyRope | None, BeforeValidator(_parse_rope_table)]


class HFConfig(FileModel):
    """The config.json of a Llama model, with the default values of LlamaConfig in transformers.

    Subclasses describe the config.json of other model families.

    Fields with an alias are fields of `Architecture`, and the alias is the key in config.json. All
    other fields are config.json keys that titanlite supports only with certain values.

    Attributes:
        kind: The `model_type`.
        causal_lm: Name of the model class in transformers.
        switches: Options that all models of the family share; see `Architecture.switches`.
        names: Modules of a block, such as "attention.wq", mapped to their Hugging Face names.
        architecture: Class that the configuration is converted to.
    """

    kind: ClassVar[str] = "llama"
    causal_lm: ClassVar[str] = "LlamaForCausalLM"
    switches: ClassVar[dict[str, Any]] = {}
    names: ClassVar[dict[str, str]] = BLOCK_NAMES
    architecture: ClassVar[type[Architecture]] = Architecture

    vocab_size: Size = Field(32000, alias="vocab_size")
    dim: Size = Field(4096, alias="hidden_size")
    ffn_dim: Size = Field(11008, alias="intermediate_size")
    n_layers: Layers = Field(32, alias="num_hidden_layers")
    n_heads: Size = Field(32, alias="num_attention_heads")
    n_kv_heads: Size | None = Field(None, alias="num_key_value_heads")
    max_seq_len: Size = Field(2048, alias="max_position_embeddings")
    norm_eps: PositiveModerate = Field(1e-6, alias="rms_norm_eps")
    tied_embeddings: bool = Field(False, alias="tie_word_embeddings")
    head_dim: Size | None = Field(None, alias="head_dim")
    rope_theta: RopeTheta = 10000.0
    rope_scaling: _Rope = None
    rope_parameters: _Rope = None
    # Keys for which only some values are implemented.
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
    def can_represent(cls, arch: Architecture) -> bool:
        """Return whether a config.json of this family can describe the architecture."""
        if type(arch) is not cls.architecture:
            return False
        # Options with a key in config.json can have any value. All other options must have the
        # value that all models of the family share.
        keys = _keys_by_field(cls)
        with_key = {name: value for name, value in arch.switches.items() if name in keys}
        return arch.switches == cls.switches | with_key


class _Mistral(HFConfig):
    """The config.json of Mistral.

    The key sliding_window is required, because its default in transformers is not null.
    """

    kind: ClassVar = "mistral"
    causal_lm: ClassVar = "MistralForCausalLM"

    sliding_window: Size | None = Field(alias="sliding_window")


class _Qwen2(HFConfig):
    """The config.json of Qwen 2 and 2.5, which must have use_sliding_window = false.

    With this value, the keys that set window sizes have no effect.
    """

    kind: ClassVar = "qwen2"
    causal_lm: ClassVar = "Qwen2ForCausalLM"
    switches: ClassVar = {"qkv_bias": True}

    use_sliding_window: Literal[False] = False
    sliding_window: Size | None = None
    max_window_layers: int | None = None
    use_mrope: Literal[False] = False


class _Qwen3(_Qwen2):
    """The config.json of Qwen 3.

    The key head_dim is required, because transformers does not default it to dim / n_heads.
    """

    kind: ClassVar = "qwen3"
    causal_lm: ClassVar = "Qwen3ForCausalLM"
    switches: ClassVar = {"qk_norm": "head"}

    head_dim: Size = Field(alias="head_dim")


class _SmolLM3(_Qwen2):
    """The config.json of SmolLM3, in which every `no_rope_interval`-th layer has no RoPE."""

    kind: ClassVar = "smollm3"
    causal_lm: ClassVar = "SmolLM3ForCausalLM"
    switches: ClassVar = {}

    tied_embeddings: bool = Field(True, alias="tie_word_embeddings")
    rope_theta: RopeTheta = 2e6
    no_rope_interval: Size = Field(4, alias="no_rope_layer_interval")
    no_rope_layers: list[int] | None = None

    @field_validator("no_rope_layers")
    @classmethod
    def _check_no_rope_layers(
        cls, layers: list[int] | None, info: ValidationInfo
    ) -> list[int] | None:
        """Check that exactly every `no_rope_layer_interval`-th layer lacks RoPE.

        In the list, 0 means no RoPE. For example, [1, 1, 1, 0, 1, 1] has an interval of 4.

        Raises:
            ValueError: If the list differs from this pattern.
        """
        interval = info.data.get("no_rope_interval", 4)
        num_layers = info.data.get("n_layers", 0)
        expected = [int(layer % interval != 0) for layer in range(1, num_layers + 1)]
        if layers is not None and layers != expected:
            raise ValueError("must be 0 for every no_rope_layer_interval-th layer, and else 1")
        return layers


class _Olmo2(HFConfig):
    """The config.json of OLMo 2, whose norms follow the attention and the feed-forward network.

    Query and key norms span all heads.
    """

    kind: ClassVar = "olmo2"
    causal_lm: ClassVar = "Olmo2ForCausalLM"
    switches: ClassVar = {"qk_norm": "projection", "norm_placement": "after"}
    names: ClassVar = BLOCK_NAMES | {
        "attention_norm": "post_attention_layernorm",
        "ffn_norm": "post_feedforward_layernorm",
    }


class _Olmo3(_Olmo2):
    """The config.json of OLMo 3, in which every n-th layer attends to all tokens.

    Only these layers apply RoPE scaling. All other layers have a sliding window. The interval n is
    read from `layer_types`.
    """

    kind: ClassVar = "olmo3"
    causal_lm: ClassVar = "Olmo3ForCausalLM"

    rope_theta: RopeTheta = 500000.0
    sliding_window: Size = Field(4096, alias="sliding_window")
    layer_types: Any = None  # the next field reads the same key
    full_attention_interval: int = Field(4, alias="layer_types")

    @field_validator("full_attention_interval", mode="before")
    @classmethod
    def _find_interval(cls, layer_types: Any, info: ValidationInfo) -> int:
        """Return the interval n such that exactly every n-th layer attends to all tokens.

        For example, ["sliding_attention", "full_attention"] gives 2. None gives the default, 4.

        Raises:
            ValueError: If `layer_types` does not follow this pattern.
        """
        if layer_types is None:
            return 4
        num_layers = info.data.get("n_layers", 0)
        # If no layer attends to all tokens, n exceeds the number of layers.
        for interval in range(1, num_layers + 2):
            if layer_types == _layer_types(interval, num_layers):
                return interval
        raise ValueError('must be "full_attention" for every n-th layer, else "sliding_attention"')

    @field_validator("rope_parameters", mode="before")
    @classmethod
    def _select_full_attention(cls, tables: Any) -> Any:
        """Reduce the two tables in rope_parameters to the table for layers without a window.

        The other table is redundant: it must be unscaled and have the same rope_theta.

        Args:
            tables: Value of the key rope_parameters: RoPE settings for layers without a window
                ("full_attention") and for layers with one ("sliding_attention").

        Raises:
            ValueError: If a table is missing, the tables differ in rope_theta, or layers with a
                window scale RoPE.
        """
        if not tables:
            return tables
        if not _has_unscaled_window_table(tables):
            raise ValueError(
                "must have the tables full_attention and sliding_attention with the same "
                "rope_theta, the latter without scaling"
            )
        return tables["full_attention"]  # validated later by `_parse_rope_table`

    @classmethod
    def can_represent(cls, arch: Architecture) -> bool:
        """Return whether a config.json of this family can describe the architecture."""
        return arch.full_attention_interval > 0 and super().can_represent(arch)


def _has_unscaled_window_table(tables: Any) -> bool:
    """Return whether `tables` has the structure of rope_parameters in an OLMo 3 config.json.

    It must map "full_attention" and "sliding_attention" to RoPE settings with the same rope_theta.
    The settings for sliding-window attention must be unscaled.
    """
    if not isinstance(tables, dict) or tables.keys() != {"full_attention", "sliding_attention"}:
        return False
    full_attention = tables["full_attention"]
    rope_theta = full_attention.get("rope_theta") if isinstance(full_attention, dict) else None
    return tables["sliding_attention"] == {"rope_type": "default", "rope_theta": rope_theta}


def _layer_types(interval: int, num_layers: int) -> list[str]:
    """Return the attention type of each layer, as in a config.json.

    Every `interval`-th layer has full attention. All others have a sliding window.
    """
    layers = range(1, num_layers + 1)
    return ["sliding_attention" if layer % interval else "full_attention" for layer in layers]


FAMILIES = HFConfig, _Mistral, _Qwen2, _Qwen3, _SmolLM3, _Olmo2, _Olmo3
"""Supported model families. A model is exported as the first family that can represent it."""


# Keys that do not affect the logits: descriptions, the dtype of the stored weights, heads for other
# tasks, the attention implementation, and defaults of generate().
_WITHOUT_EFFECT = frozenset(
    """
    architectures model_type transformers_version transformers.js_config _name_or_path
    name_or_path _commit_hash is_llama_config unsloth_version unsloth_fixed dtype torch_dtype
    use_bfloat16 torchscript tf_legacy_loss initializer_range use_cache pretraining_tp
    chunk_size_feed_forward is_decoder cross_attention_hidden_size tie_encoder_decoder
    max_sequence_length pad_token_id bos_token_id eos_token_id sep_token_id
    decoder_start_token_id tokenizer_class prefix return_dict output_attentions
    output_hidden_states tie_last_hidden_states _attn_implementation_autoset finetuning_task
    task_specific_params problem_type id2label label2id num_labels max_length max_new_tokens
    min_length min_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
    """.split()  # noqa: SIM905
)


def compare_shapes(
    expected: dict[str, tuple[int, ...]], actual: dict[str, tuple[int, ...]]
) -> list[str]:
    """List the tensors of a file that are missing, unexpected, or have the wrong shape.

    Each item of the list is a line of text, for example "norm.weight: missing".

    Args:
        expected: Expected shapes, by name.
        actual: Shapes that the file contains, by name.
    """
    differences = []
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            differences.append(f"{name}: missing")
        elif name not in expected:
            # The name comes from the file, so it can have any length.
            differences.append(f"{shorten(name)}: unexpected")
        elif actual[name] != expected[name]:
            differences.append(f"{name}: shape {actual[name]}, expected {expected[name]}")
    return differences


class MetaParams(FileModel):
    """Settings in the params.json of Meta's Llama checkpoints.

    The file has no feed-forward dimension, and its vocabulary size may be -1. Read both sizes from
    the shapes of the tensors instead.
    """

    dim: Size
    n_layers: Layers
    n_heads: Size
    n_kv_heads: Size | None = None
    vocab_size: Size | Literal[-1] = -1
    norm_eps: PositiveModerate = 1e-5
    rope_theta: RopeTheta = 10000.0
    use_scaled_rope: bool = False
    multiple_of: int | None = None
    ffn_dim_multiplier: float | None = None


def architecture_from_meta(
    params: MetaParams, vocab_size: int, ffn_dim: int, tied: bool
) -> Architecture:
    """Convert Meta's params.json and the sizes of its tensors to an architecture.

    The file contains neither the context length nor the RoPE scaling factor. Choose them by the
    Llama generation, as in the Meta llama-models repository.

    Args:
        params: Content of params.json.
        vocab_size: Number of rows of the embedding, used if params.json has -1.
        ffn_dim: Number of rows of the first feed-forward matrix.
        tied: Whether the embedding is also the output matrix.
    """
    fields = params.model_dump(include={"dim", "n_layers", "n_heads", "norm_eps", "rope_theta"})
    fields["n_kv_heads"] = params.n_kv_heads or params.n_heads
    fields["ffn_dim"] = ffn_dim
    fields["tied_embeddings"] = tied
    fields["vocab_size"] = vocab_size if params.vocab_size == -1 else params.vocab_size

    is_small_llama_3_2 = params.dim in (2048, 3072)  # no other Llama since 3.1 has these widths
    if not params.use_scaled_rope:  # Llama 3.0
        fields["max_seq_len"] = 8192  # later models have the default context length
    elif is_small_llama_3_2:
        fields["rope_scaling_factor"] = 32.0
    else:
        fields["rope_scaling_factor"] = 8.0
    return Architecture(**fields)


def from_meta_rotary(name: str, weight: Tensor, head_dim: int) -> Tensor:
    """Permute a weight from the RoPE layout of Meta and torchtitan to the layout of this model.

    Meta pairs channel 2i with channel 2i + 1, while this model pairs channel i with channel
    i + D / 2. Permute the rows of `wq` and `wk`, shape (H * D, C), and return all other weights
    unchanged.

    Args:
        name: Name of the weight, for example "layers.3.attention.wq.weight".
        weight: Value of the weight in the Meta layout.
        head_dim: Head dimension D.
    """
    if not name.endswith(("attention.wq.weight", "attention.wk.weight")):
        return weight
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))  # (H, D / 2, 2, C)
    return pairs.transpose(1, 2).reshape(weight.shape)
