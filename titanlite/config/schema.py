"""Define all keys of a job file with their types, constraints, defaults and help texts.

Invariant: a `JobConfig` is immutable, and each value in it is valid by itself. Rules that involve
several keys, the world size or files are in `titanlite.rules`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.fields import FieldInfo

from titanlite.config.flavors import find_flavor
from titanlite.config.mistakes import UNKNOWN_NAME, ConfigError, Mistake, build_mistake
from titanlite.config.models import Section
from titanlite.config.registry import (
    ARCHITECTURES,
    HOOKS,
    LOSSES,
    METRICS_LOGGERS,
    OPTIMIZERS,
    SCHEDULES,
    SECTIONS,
    SOURCES,
    TOKENIZERS,
)

MAX_STEPS = 10**9
MAX_TOKENS = 10**18
_MAX_NAME_BYTES = 255  # of a file or folder, in common file systems
TOKEN_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
LENGTH_KEYS = ("steps", "tokens", "tokens_per_parameter")
"""Keys of [training] that set the length of a run. A job sets at most one of them."""


def parse_tokens(text: str) -> int:
    """Return the number of tokens in a string such as "500M" or "2.5e12".

    Raises:
        ValueError: If the string is not a number from 1 to 1e18, with or without a unit.
    """
    unit = TOKEN_UNITS.get(text[-1:].upper())
    try:
        number = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= MAX_TOKENS:
        raise ValueError("is not a number of tokens, such as 500M, 10B, 1T or 2.5e12")
    return round(number)


def check_path(path: str) -> str:
    """Check a path from a job, and return it with a leading ~ replaced by the home folder.

    Raises:
        ValueError: If no file system accepts the path, it contains an environment variable, or it
            is a file URL with a relative path.
    """
    path = os.path.expanduser(path)
    if "\0" in path or _has_long_name(path):
        raise ValueError(
            f"is not a path: it has a NUL byte, or a name of more than {_MAX_NAME_BYTES} bytes"
        )

    if _has_environment_variable(path):
        raise ValueError(
            "has an environment variable, and only a shell expands these. Write the path itself"
        )

    is_relative_url = bool(re.match("(file|local)://[^/]", path))  # such as file://data
    if is_relative_url:
        raise ValueError(
            "is a URL with a relative path. Write an absolute path, as in file:///data"
        )
    return path


def _has_long_name(path: str) -> bool:
    """Return whether a file or folder in `path` has a name that is too long for file systems."""
    return any(len(name.encode()) > _MAX_NAME_BYTES for name in path.split("/"))


def _has_environment_variable(path: str) -> bool:
    """Return whether a path contains an environment variable, such as "data/$USER" or "${UNSET}/x".

    In the middle of a name, as in "a$b", a dollar sign counts only if the variable is set.
    """
    has_set_variable = os.path.expandvars(path) != path
    has_variable_at_start_of_name = bool(re.search(r"(^|/)\$\{?[A-Za-z_]", path))
    return has_set_variable or has_variable_at_start_of_name


def _default_dump_folder(folder: str, info: ValidationInfo) -> str:
    if folder:
        return folder
    job_file = info.data.get("config_file") or "python"
    return f"outputs/{Path(job_file).stem}"


def _check_auto_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be at least 1, or -1 for automatic")
    return value


def _check_not_tiny(value: float) -> float:
    if 0 < value < 1e-6:
        raise ValueError("must be 0, or at least 1e-6")
    return value


def _check_unique(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"has {name} more than once. List each name once")
    return names


def _check_block(name: str) -> str:
    if not re.fullmatch(r"layers\.[0-9]{1,9}", name):
        raise ValueError("must be the name of a block, such as layers.4")
    return name


def _check_tokens(value: object, check_number: ValidatorFunctionWrapHandler) -> object:
    """Validate a number of tokens, such as 10**10 or "10B", and return `value` unchanged.

    Args:
        value: An integer or a string. A string is parsed only for validation.
        check_number: Pydantic validator of the integer.
    """
    check_number(parse_tokens(value) if isinstance(value, str) else value)
    return value


def _allow_tokens(value: object, check_steps: ValidatorFunctionWrapHandler) -> object:
    """Validate a number of steps, or a number of tokens with a unit, such as "500M".

    Returns:
        The validated number of steps, or the number of tokens as an unchanged string.

    Raises:
        ValueError: If a string is not a number of tokens with a unit.
    """
    if not isinstance(value, str):
        return check_steps(value)
    try:
        parse_tokens(value)
        has_unit = value[-1].upper() in TOKEN_UNITS
    except ValueError:
        has_unit = False
    if not has_unit:
        raise ValueError("must be an integer, or a number of tokens such as 500M")
    return value


def _check_ac_option(value: str) -> str:
    if not re.fullmatch(r"op|[1-9][0-9]*", value):
        raise ValueError('must be "op" or a number from 1, such as "2"')
    return value


T = TypeVar("T")
ListOf = Annotated[tuple[T, ...], Field(strict=False)]
"""Type of a list key. It is a list in TOML, but a tuple in a section, so that the section is
immutable.
"""
AutoInt = Annotated[int, AfterValidator(_check_auto_or_positive)]
PathText = Annotated[str, AfterValidator(check_path)]
Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]
AsWritten = PlainSerializer(lambda length: length)
Tokens = Annotated[int, Field(gt=0, le=MAX_TOKENS), WrapValidator(_check_tokens), AsWritten]
"""Type of a number of tokens: an integer, or a string such as "10B", which is kept as written."""
OrTokens = Annotated[T, WrapValidator(_allow_tokens), AsWritten]
"""Type of a number of steps, or of a number of tokens as a string such as "500M".

Type checkers treat it as a number of steps, because `load_run` converts tokens to steps.
"""
Seconds = Annotated[int, Field(gt=0, le=10**9)]  # timedelta cannot hold much more
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
MupSize = Annotated[int, Field(ge=0, lt=2**31)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
# These limits, and the limits of some keys below, reject only values with which float32 would
# overflow, divide by zero or round to zero.
Moderate = Annotated[float, Field(ge=0.0, le=1e6)]
PositiveModerate = Annotated[float, Field(ge=1e-30, le=1e6)]
ZeroOrModerate = Annotated[float, Field(ge=0.0, le=1e15), AfterValidator(_check_not_tiny)]
RopeTheta = Annotated[float, Field(gt=1.0, le=1e15)]  # YaRN divides by its logarithm
RopeScalingFactor = Annotated[float, Field(ge=1.0, le=1e6)]
RopeTurns = Annotated[float, Field(gt=1e-9, lt=1e9)]
Block = Annotated[str, AfterValidator(_check_block)]
Component = Literal["model", "loss", "optimizer", "clip"]


def _drop_unused_keys(**defaults: object) -> dict[str, tuple[object, str]]:
    """Return entries of `Section.dropped` for keys that were removed because nothing used them.

    Jobs that an earlier version saved contain these keys with their defaults, and remain valid. Any
    other value is reported as an error.

    Args:
        defaults: Former default of each removed key, by its name.
    """
    message = "is no longer a key, because nothing read it. Remove it."
    return {key: (default, message) for key, default in defaults.items()}


class Job(Section):
    """Name, outputs and plugins of the run."""

    dropped: ClassVar = {"plan": (False, "was removed. Run `titanlite profile` instead.")}

    config_file: PathText | None = None
    """Job file (TOML). It is looked up in the current folder, then in train_configs/, then among
    the job files that are installed with titanlite. You can omit the suffix .toml."""
    dump_folder: Annotated[PathText, AfterValidator(_default_dump_folder)] = Field(
        default="", validate_default=True
    )
    """Folder for all outputs. If empty, it is outputs/NAME, where NAME is the name of the job file
    without .toml. A command with neither a job file nor --from uses debug_model, and a job that is
    created in Python uses outputs/python."""
    description: str = ""
    """Description of the run, logged at the start."""
    plugins: ListOf[str] = ()
    """Plugins to import before the rest of the job is read: Python modules, or names that installed
    packages offer as entry points in the group titanlite.plugins. See docs/reference/plugins.md."""
    hooks: Annotated[ListOf[Annotated[str, HOOKS]], AfterValidator(_check_unique)] = ()
    """Plugin hooks to run in the training loop, in this order, after the built-in hooks."""
    require_certificate: bool = False
    """Start only if `titanlite prove` has written a certificate for this job to the folder `proof`
    in job.dump_folder."""


class Model(Section):
    """Model architecture. Omitted keys default to the values of the flavor."""

    dropped: ClassVar = {
        "name": (
            None,
            "is a key of torchtitan. Convert the job file with `titanlite migrate FILE`.",
        )
    }
    advanced: ClassVar = (
        "norm_eps",
        "rope_theta",
        "rope_scaling_factor",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "rope_original_max_seq_len",
        "rope_scaling",
        "rope_beta_fast",
        "rope_beta_slow",
        "rope_attention_factor",
        "head_dim",
        "qkv_bias",
        "qk_norm",
        "norm_placement",
        "sliding_window",
        "full_attention_interval",
        "no_rope_interval",
        "logit_softcap",
        "mup_base_dim",
        "mup_base_head_dim",
        "attention_backend",
    )

    architecture: Annotated[str, ARCHITECTURES] = "llama"
    """Model class: the built-in llama, or a class that a plugin registered. A plugin model uses the
    keys of this section and of the section with its name."""
    flavor: Annotated[str, AfterValidator(find_flavor)] = "debugmodel"
    """Name of an architecture in titanlite/config/flavors.py, such as debugmodel, 150m, 8b or
    qwen2.5-0.5b, or of the corresponding model on the Hugging Face Hub, such as
    meta-llama/Llama-3.1-8B."""
    dim: PositiveInt | None = None
    """Width of the residual stream."""
    n_layers: PositiveInt | None = None
    """Number of transformer blocks."""
    n_heads: PositiveInt | None = None
    """Number of query heads. It must divide dim unless head_dim is set."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention). It must divide n_heads."""
    ffn_dim: PositiveInt | None = None
    """Hidden width of the SwiGLU feed-forward network."""
    vocab_size: PositiveInt | None = None
    """Number of rows of the embedding. It must be at least the vocabulary size of the tokenizer. If
    omitted, it is the value of the flavor or, for debugmodel and 150m, the vocabulary size of the
    tokenizer rounded up to a multiple of 128."""
    max_seq_len: PositiveInt | None = None
    """Maximum sequence length of the model, in tokens."""
    norm_eps: PositiveModerate | None = None
    """Epsilon of RMSNorm."""
    rope_theta: RopeTheta | None = None
    """Base of the RoPE frequencies."""
    rope_scaling_factor: RopeScalingFactor | None = None
    """Factor by which rope_scaling extends the context. 1 disables scaling."""
    rope_low_freq_factor: RopeTurns | None = None
    """Frequencies with fewer turns than this in the original context are divided by the full
    scaling factor."""
    rope_high_freq_factor: RopeTurns | None = None
    """Frequencies with more turns than this in the original context are not scaled."""
    rope_original_max_seq_len: PositiveInt | None = None
    """Context length before the extension, in tokens."""
    rope_scaling: Literal["llama3", "yarn"] | None = None
    """How frequencies are scaled: as in Llama 3.1, or by YaRN. With full_attention_interval, only
    the blocks that it selects are scaled, as in OLMo 3."""
    rope_beta_fast: RopeTurns | None = None
    """YaRN does not scale frequencies with more turns than this in the original context."""
    rope_beta_slow: RopeTurns | None = None
    """YaRN divides frequencies with fewer turns than this by the full scaling factor."""
    rope_attention_factor: Annotated[ZeroOrModerate, Field(le=1e6)] | None = None
    """Factor by which YaRN multiplies rotated queries and keys. 0: use 0.1 ln(rope_scaling_factor)
    + 1."""
    tied_embeddings: bool | None = None
    """Share the embedding matrix with the output projection."""
    head_dim: PositiveInt | None = None
    """Width of a head. It must be even. If omitted, it is dim / n_heads if this also holds for the
    flavor, and otherwise the value of the flavor."""
    qkv_bias: bool | None = None
    """Add a bias to queries, keys and values, as in Qwen2."""
    qk_norm: Literal["none", "head", "projection"] | None = None
    """Apply RMSNorm to queries and keys before RoPE. head: to each head, as in Qwen3. projection:
    over all heads together, as in OLMo 2."""
    norm_placement: Literal["before", "after"] | None = None
    """Position of the norms in a block. before: at the inputs of the attention and the feed-forward
    network. after: at their outputs, before they are added to the residual stream, as in OLMo 2."""
    sliding_window: NonNegativeInt | None = None
    """Number of most recent tokens that each token attends to, including itself, as in the first
    Mistral 7B. 0: attend to all preceding tokens."""
    full_attention_interval: NonNegativeInt | None = None
    """Disable the sliding window in every n-th block, where n is this value. OLMo 3 uses 4. 0: all
    blocks have the window."""
    no_rope_interval: NonNegativeInt | None = None
    """Disable RoPE in every n-th block, where n is this value. SmolLM3 uses 4. 0: all blocks have
    RoPE."""
    logit_softcap: ZeroOrModerate | None = None
    """Replace each logit x by c * tanh(x / c), where c is this value. Gemma 2 uses 30. 0 leaves the
    logits unchanged."""
    mup_base_dim: MupSize | None = None
    """Value of dim for which optimizer.lr was tuned. muP scales initial weights and learning rates
    from this width to dim. 0 disables this scaling."""
    mup_base_head_dim: MupSize | None = None
    """Value of head_dim for which optimizer.lr was tuned. muP scales attention from this width to
    head_dim. 0 disables this scaling."""
    attention_backend: Literal["auto", "sdpa", "flex", "varlen", "fa3", "fa4"] = "auto"
    """Attention kernels. sdpa: scaled dot-product attention, with a boolean mask for documents and
    windows. flex: flex attention for these masks. varlen: variable-length FlashAttention for these
    masks. fa3 and fa4: sdpa and varlen with FlashAttention 3 or 4 kernels. auto: flex on a GPU with
    dataset.document_mask, a sliding window or context parallelism, otherwise sdpa. flex, fa3 and
    fa4 need a GPU. varlen, fa3 and fa4 do not support context parallelism."""

    @property
    def uses_document_bounds(self) -> bool:
        """Whether the attention kernels take document boundaries instead of a mask."""
        return self.attention_backend in ("varlen", "fa3", "fa4")


class TokenizerOptions(Section):
    """Tokenizer file."""

    name: Annotated[str, TOKENIZERS] | None = None
    """Tokenizer format, or a tokenizer that a plugin registered. If omitted, huggingface for a path
    that ends in .json, and tiktoken otherwise."""
    path: PathText = "assets/tokenizer/tokenizer.model"
    """Path or URL of a tokenizer.model in tiktoken format (Llama 3) or a Hugging Face
    tokenizer.json. The default is included in titanlite. It has 4,096 tokens and was trained on
    Python source code."""


class Training(Section):
    """Length, batch size and numerics of the run."""

    advanced: ClassVar = (
        "z_loss",
        "mixed_precision_reduce",
        "dtype",
        "init_dtype",
        "enable_cpu_offload",
        "deterministic",
        "gc_freq",
        "num_threads",
    )

    steps: Steps = 10000
    """Number of optimizer steps."""
    tokens: Tokens | None = None
    """Number of training tokens, such as "10B", to set instead of steps. It is converted to a
    number of steps, rounded down."""
    tokens_per_parameter: PositiveModerate | None = None
    """Number of training tokens per model parameter, to set instead of steps. 20 is compute-optimal
    according to Chinchilla."""
    seq_len: PositiveInt = 2048
    """Sequence length in tokens."""
    local_batch_size: PositiveInt = 8
    """Number of sequences per forward pass of a data-parallel rank (a microbatch)."""
    global_batch_size: AutoInt = -1
    """Number of sequences per optimizer step, over all ranks. -1: local_batch_size times the
    data-parallel degree. With a larger multiple of this product, gradients are accumulated over
    several forward passes."""
    max_norm: ZeroOrModerate = 1.0
    """Maximum L2 norm of all gradients together. If the norm is larger, gradients are scaled down.
    0 disables clipping."""
    loss: Annotated[str, LOSSES] = "cross_entropy"
    """Training loss. cross_entropy: fused with the output projection, so that only a part of the
    logits is in memory at a time. reference: plain cross entropy of all logits, for comparison,
    which needs much more memory. Plugins can register more. Validation always reports the cross
    entropy."""
    z_loss: Moderate = 0.0
    """Weight of the z-loss, which keeps logits from growing. It is log(Z)^2 per token, where Z is
    the softmax denominator. PaLM used 1e-4. 0 disables it. The validation loss does not include
    it."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of computations and all-gathered parameters. auto: bfloat16 on GPUs and on CPUs with
    bfloat16 instructions (AVX512-BF16, AMX or ARM bf16), float32 on other CPUs, where bfloat16 is
    many times slower. With auto, a resumed run keeps the dtype of its checkpoint."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradient reduction. Sums over many ranks lose precision in bfloat16."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of sharded parameters, gradients and optimizer state. bfloat16 halves their memory, but
    rounds small updates away: see optimizer.stochastic_rounding."""
    init_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which weights are initialized and sharded before the cast to dtype. bfloat16 halves
    peak memory at startup. Loading weights that were published in bfloat16 remains lossless."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in CPU memory. Slow, but fits larger
    models."""
    seed: Seed = 0
    """Seed of the initial weights and, unless dataset.seed is set, of the data order."""
    deterministic: bool = False
    """Use only deterministic kernels, which are slower on a GPU. CPU runs are always
    deterministic."""
    gc_freq: PositiveInt = 50
    """Number of steps between Python garbage collections. All ranks collect at the same step, so
    that they do not wait for each other."""
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of CPU threads per process. 0: OMP_NUM_THREADS if it is set, otherwise the number of
    cores divided by the number of processes on the node."""


class TextSource(Section):
    """A source of documents."""

    source: Annotated[str, SOURCES] = "python_stdlib"
    """Kind of source. python_stdlib: .py files of the Python standard library. jsonl: files with
    one JSON object per line, also .gz and .zst. text: plain UTF-8 files. parquet: Parquet files.
    arrow: a folder that `datasets` saved. huggingface: anything that `datasets` loads. c4: English
    allenai/c4, streamed by `datasets`. shards: a folder that `titanlite prepare` created. tokens:
    Megatron (.bin), OLMo (.npy) or datatrove (.ds) token files. Plugins can register more."""
    path: PathText | None = None
    """Location of the data. jsonl, text, parquet and tokens: a file or a pattern like
    "data/*.jsonl". arrow and shards: a folder. huggingface: a dataset on the Hub or a local folder.
    All of these except huggingface also accept a URL such as "s3://bucket/data/*.jsonl"."""
    config: str | None = None
    """Name of the dataset configuration (huggingface)."""
    split: str = "train"
    """Name of the split (huggingface and arrow)."""
    text_column: str = "text"
    """Name of the field that contains the text."""
    loss_mask_column: str | None = None
    """Name of the field that lists which parts of the text count in the loss, as [start, end] pairs
    in characters (jsonl and parquet). If omitted, the whole text counts."""
    token_dtype: Literal["uint8", "uint16", "uint32", "uint64"] | None = None
    """Data type of the token ids in .npy files without a header (tokens)."""
    streaming: bool = False
    """Read the data during training instead of downloading it first (huggingface)."""


class ValidationSource(TextSource):
    """One source of a validation mixture."""

    dropped = _drop_unused_keys(max_epochs=0)

    weight: ZeroOrModerate = 1.0
    """Share of sequences from this source, relative to the weights of the other sources."""


class DataSource(ValidationSource):
    """One source of a mixture."""

    dropped: ClassVar = {}

    max_epochs: NonNegativeInt = 0
    """End the run with a checkpoint after this many passes over this source. 0: no limit. With a
    limit, each rank reads and tokenizes the sequences of all ranks. If there are many ranks,
    tokenize the source in advance."""


class DataStage(Section):
    """Change of source weights, batch size or learning rate at a given step of the run.

    For example, the last stage can anneal on better data. Omitted keys keep their values from the
    previous stage. `titanlite check --plot` draws all stages.
    """

    start_step: NonNegativeInt
    """Number of steps before the stage begins."""
    weights: ListOf[ZeroOrModerate] | None = None
    """Weight of each source, in the order of dataset.sources."""
    global_batch_size: PositiveInt | None = None
    """Number of sequences per optimizer step, over all ranks, instead of
    training.global_batch_size."""
    lr_factor: PositiveModerate | None = None
    """Factor by which to multiply the learning rate of [lr_scheduler]."""


class Dataset(TextSource):
    """Training data and its order.

    The keys of this section describe one source. For a mixture, use [[dataset.sources]].
    """

    dropped = _drop_unused_keys(weight=1.0)
    advanced: ClassVar = (
        "config",
        "split",
        "streaming",
        "seed",
        "on_change",
        "on_bad_record",
        "num_workers",
        "prefetch",
    )

    max_epochs: NonNegativeInt = 0
    """End the run with a checkpoint after this many passes over the source. 0: no limit. With a
    limit, each rank reads and tokenizes the sequences of all ranks. If there are many ranks,
    tokenize the source in advance."""
    sources: ListOf[DataSource] = ()
    """Sources of a mixture, each as a table [[dataset.sources]]. They replace the keys of one
    source."""
    stages: ListOf[DataStage] = ()
    """Changes of source weights, batch size and learning rate during the run, each as a table
    [[dataset.stages]]."""
    seed: Seed | None = None
    """Seed of the data order. If omitted, training.seed."""
    packing: Literal["concat", "best_fit"] = "concat"
    """How documents fill sequences. concat: documents are joined and cut, so that no token is lost.
    best_fit: documents that fit into a sequence are never cut, and unused positions are padded."""
    document_mask: bool = False
    """Restrict attention to tokens of the same document, restart positions at each document, and do
    not predict the first token of the next document."""
    on_change: Literal["error", "warn"] = "error"
    """What to do if the data has changed when a run resumes. error: stop. warn: continue with the
    new data, at the beginning of the document or part (such as a file) that was being read. Always
    an error: a different number of sources or streams, and a prepared shard that differs from its
    manifest.json. The number of streams can change if max_epochs is set or removed, or if a source
    of few documents or parts gets more or fewer of them."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What to do with a record that is not JSON, has no text, or is not Unicode. error: save, then
    stop the run. skip: leave it out, log it once, and count it in the metrics."""
    num_workers: NonNegativeInt = 1
    """Number of background processes per rank that read and tokenize. One process delivers millions
    of tokens per second. 0: read in the training process."""
    prefetch: PositiveInt = 2
    """Number of global batches that each background process prepares in advance."""

    def get_stage_value(self, key: str, done: int, default: Any) -> Any:
        """Return the value of a key in the data stage that a training step belongs to.

        A stage that omits the key keeps the value from the previous stage.

        Args:
            key: Key of a stage, such as "global_batch_size".
            done: Number of optimizer steps before this one.
            default: Value to return if no stage up to this step sets the key.
        """
        value = default
        for stage in sorted(self.stages, key=lambda stage: stage.start_step):
            if stage.start_step <= done and getattr(stage, key) is not None:
                value = getattr(stage, key)
        return value


class Validation(TextSource):
    """Validation loss on held-out documents or on separate data sources.

    The keys of this section describe one source. For a mixture, use [[validation.sources]].
    """

    dropped = _drop_unused_keys(
        weight=1.0,
        max_epochs=0,
        stages=[],
        document_mask=False,
        on_change="error",
        num_workers=1,
        prefetch=2,
    )
    advanced: ClassVar = ("config", "split", "streaming", "seed", "packing", "on_bad_record")

    freq: OrTokens[NonNegativeInt] = 0
    """Number of steps between validations, or of tokens such as "500M". The run also validates
    before the first step and at the end. 0 disables validation."""
    sequences: PositiveInt = 64
    """Number of sequences per validation, each of training.seq_len tokens, over all ranks."""
    holdout: BelowOne = 0.0
    """Fraction of the documents in [dataset] to validate on instead of a separate source. A hash of
    each document selects them, and they are never trained on, even with freq = 0."""
    sources: ListOf[ValidationSource] = ()
    """Sources of a mixture, each as a table [[validation.sources]]. They replace the keys of one
    source."""
    seed: Seed | None = None
    """Seed for the selection of documents. If omitted, training.seed."""
    packing: Literal["concat", "best_fit"] = "concat"
    """How documents fill sequences: see dataset.packing."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What to do with a bad record: see dataset.on_bad_record."""

    @property
    def has_own_data(self) -> bool:
        """Whether this section names validation data, other than the default source."""
        return bool(self.path or self.sources) or self.source != "python_stdlib"


class ParameterGroup(Section):
    """Parameters with a separate learning rate or weight decay."""

    params: Annotated[ListOf[str], Field(min_length=1)]
    """Names of parameters, or patterns with * and ?, such as ["tok_embeddings.*",
    "layers.*.attention.w?.weight"]. Each parameter of the model must be in exactly one group, and
    each pattern must match a parameter."""
    lr_factor: Moderate = 1.0
    """Factor by which to multiply the learning rate."""
    weight_decay: Moderate | None = None
    """Weight decay of these parameters, including norms and embeddings. If omitted,
    optimizer.weight_decay and its exceptions apply."""

    def claims(self, name: str) -> bool:
        """Return whether the parameter called `name` matches one of the patterns of this group."""
        return any(fnmatchcase(name, pattern) for pattern in self.params)


class Optimizer(Section):
    """Optimizer. The defaults are the AdamW settings of the Llama papers."""

    advanced: ClassVar = (
        "eps",
        "momentum",
        "decay_embeddings",
        "implementation",
        "state_dtype",
        "stochastic_rounding",
        "groups",
    )

    name: Annotated[str, OPTIMIZERS] = "AdamW"
    """Optimizer. Muon updates the matrices of the blocks, and uses AdamW for all other parameters.
    AdamW8bit, from torchao, stores moments in 8 bits, and synchronizes with the GPU in each step.
    It supports neither tensor parallelism nor CPU offload. Lion subtracts from each weight lr times
    the sign of beta1 * momentum + (1 - beta1) * gradient, and beta2 is the decay of its momentum.
    SGD uses momentum."""
    lr: Annotated[float, Field(ge=1e-30, le=1e30)] = 3e-4
    """Peak learning rate."""
    beta1: BelowOne = 0.9
    """Decay of the first moment per step."""
    beta2: BelowOne = 0.95
    """Decay of the second moment per step. 0.95 averages over about 20 steps, 0.999 over about
    1,000."""
    eps: PositiveModerate = 1e-8
    """Term added to the square root of the second moment to avoid division by zero."""
    momentum: BelowOne = 0.95
    """Decay of the momentum per step. Only Muon and SGD use it."""
    weight_decay: Moderate = 0.1
    """Decoupled weight decay of all matrices. Norms and biases have none unless a parameter group
    sets it."""
    decay_embeddings: bool = True
    """Apply weight decay to the embedding."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Implementation of AdamW. fused is the fastest. foreach and for-loop are for comparison, and
    synchronize with the GPU in each step. This key has no effect with stochastic_rounding, with a
    state_dtype that differs from training.dtype, or if the optimizer is compiled."""
    state_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the optimizer moments. If omitted, training.dtype. bfloat16 halves their memory, and
    needs stochastic_rounding with a beta above 0.99. If it differs from training.dtype, the update
    is compiled on a GPU."""
    stochastic_rounding: bool = False
    """Round bfloat16 weights and moments up or down at random, so that small updates are not lost.
    The random bits depend only on the step and the element, so they are the same for any number of
    ranks and after a resume. The update is compiled on a GPU."""
    groups: ListOf[ParameterGroup] = ()
    """Parameter groups, each as a table [[optimizer.groups]]. With groups, each parameter must be
    in exactly one."""


class LRScheduler(Section):
    """Learning rate schedule: warmup, constant learning rate, then decay (WSD)."""

    name: Annotated[str, SCHEDULES] = "wsd"
    """Schedule. Plugin schedules also receive the keys of this section."""
    warmup_steps: OrTokens[NonNegativeInt] | None = None
    """Number of steps in which the learning rate rises linearly to its peak, or of tokens such as
    "500M". If omitted, it is 200 steps, but at most a tenth of the schedule."""
    total_steps: OrTokens[Steps] | None = None
    """Length of the whole schedule in steps, or in tokens such as "10B". Set it if the run trains
    only the first training.steps steps of a longer schedule. If omitted, it is training.steps."""
    decay_steps: OrTokens[NonNegativeInt] | None = None
    """Number of steps at the end of the schedule in which the learning rate decays, or of tokens
    such as "1B". If omitted, decay_ratio applies."""
    decay_ratio: Fraction | None = None
    """Fraction of the schedule, at its end, in which the learning rate decays. Decay never starts
    before warmup ends. Without decay_steps and decay_ratio, it starts directly after warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """Learning rate at the end of the decay, as a fraction of the peak."""

    def count_warmup_steps(self, total_steps: int) -> int:
        """Return the number of warmup steps of a schedule of `total_steps` steps."""
        if self.warmup_steps is None:
            return min(200, total_steps // 10)
        return self.warmup_steps


_ONE_GROUP_IS_PREFETCHED = "was removed. FSDP prefetches one group. Remove it."


class Parallelism(Section):
    """Layout of the ranks."""

    dropped: ClassVar = {
        "fsdp_forward_prefetch": (0, _ONE_GROUP_IS_PREFETCHED),
        "fsdp_backward_prefetch": (0, _ONE_GROUP_IS_PREFETCHED),
    }
    advanced: ClassVar = (
        "fsdp_reshard_after_forward",
        "fsdp_min_num_params",
        "fsdp_reduce",
        "memory_savers",
        "enable_fsdp_symmetric_memory",
        "enable_async_tensor_parallel",
        "pipeline_parallel_split_points",
    )

    data_parallel_replicate_degree: PositiveInt = 1
    """Number of replicas of the sharded model (HSDP). Parameters are all-gathered within each
    replica, and gradients are reduced over all replicas."""
    data_parallel_shard_degree: AutoInt = -1
    """Number of data-parallel ranks to shard the parameters of a replica over (FSDP2). -1: use all
    ranks that the other degrees leave. Parameters are also sharded over the context-parallel
    ranks."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether to free unsharded parameters after the forward pass, and to all-gather them again for
    the backward pass. default: never with a pipeline. Otherwise always, except for blocks that are
    so small that they share one group, for a single rank whose blocks have fewer parameters than 16
    times fsdp_min_num_params, and for the output projection, which is freed once per step."""
    fsdp_min_num_params: NonNegativeInt = 1_000_000
    """Minimum number of parameters of an FSDP group. Each group has one all-gather and one
    reduction. Small consecutive blocks share a group. 0: each block is a group."""
    fsdp_reduce: Literal["auto", "step", "microbatch"] = "auto"
    """When to reduce gradients. step: once, with the last microbatch. Until then, each rank keeps
    all gradients, 4 bytes per parameter. microbatch: after each microbatch, so that a rank keeps
    only its shard, at the cost of more traffic. auto: microbatch if all gradients take more than
    256 MiB and are sharded or offloaded, training.dtype equals training.mixed_precision_reduce, and
    there is no pipeline. Otherwise, auto means step."""
    memory_savers: Literal["none", "safe", "all"] = "safe"
    """Optimizations that save more GPU memory than plain FSDP2. Results are bitwise identical.
    none: plain FSDP2 and torch. safe: optimizations that are estimated to make a step at most 0.3%
    longer. all: also optimizations that make the GPU wait longer. Their cost has not been measured
    on a real GPU."""
    enable_fsdp_symmetric_memory: bool = False
    """Run FSDP collectives in NCCL symmetric memory. Needs GPUs, parameters that are sharded over
    several ranks, torch 2.13 and memory_savers = "none". Cannot be combined with
    enable_async_tensor_parallel."""
    tensor_parallel_degree: PositiveInt = 1
    """Number of ranks that share each matmul, with sequence parallelism and loss parallelism. Keep
    it within a node, because computation waits for the communication."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with matmuls through symmetric memory. Needs
    compile.enable and a GPU."""
    context_parallel_degree: PositiveInt = 1
    """Number of ranks that share each sequence. Each rank gets one chunk from the front and one
    from the back, which balances causal attention. The ranks all-gather keys and values."""
    pipeline_parallel_degree: PositiveInt = 1
    """Number of pipeline ranks. A step has training.global_batch_size / data-parallel degree /
    training.local_batch_size microbatches. It needs at least one microbatch per pipeline rank, so
    set training.global_batch_size. Models with tied embeddings do not support a pipeline."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Pipeline schedule. 1F1B and GPipe have one stage per rank. ZBVZeroBubble has two. The others
    have two, or as many as pipeline_parallel_split_points defines. Zero-bubble schedules delay
    weight gradients. They need an uncompiled model, and activation_checkpoint.mode "none" or
    "full", or "selective" with a number as selective_ac_option."""
    pipeline_parallel_split_points: ListOf[Block] = ()
    """First block of each stage except the first, such as ["layers.4", "layers.8"]. If empty,
    stages are balanced for speed, without using more memory than an even split."""


class ActivationCheckpoint(Section):
    """Activation checkpointing: recompute activations in the backward pass to save memory."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """Activations to recompute. none: no activations. full: all except the inputs of blocks.
    selective: see selective_ac_option. memory_budget: the compiler chooses; needs
    compile.enable."""
    selective_ac_option: Annotated[str, AfterValidator(_check_ac_option)] = "op"
    """How mode "selective" saves memory. op: keep the results of attention and of every second
    matmul. A number n: recompute every n-th block in full."""
    memory_budget: Fraction = 0.5
    """Fraction of activation memory that mode "memory_budget" may keep."""


class Compile(Section):
    """Compilation with torch.compile."""

    enable: bool = False
    """Compile the components below. The first step then takes half a minute or more."""
    components: ListOf[Component] = ("model", "loss")
    """What to compile. model: the transformer blocks, all in one compilation, and the FP8 cast of
    weights. loss: softmax and gradient of the loss. optimizer: the update. clip: the gradient norm.
    On a GPU, the update is always compiled with optimizer.stochastic_rounding or a different
    optimizer.state_dtype, because otherwise it needs 72 kernels per tensor."""


class Float8(Section):
    """FP8 matmuls with Float8Linear or MXFP8Linear from torchao."""

    advanced: ClassVar = (
        "precompute_float8_dynamic_scale_for_fsdp",
        "min_features",
        "filter_fqns",
        "emulate",
    )

    enable: bool = False
    """Convert linear layers to FP8."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = "tensorwise"
    """Scaling recipe. tensorwise: one scale per tensor, the fastest. rowwise: one scale per row,
    more accurate. rowwise_with_gw_hp: like rowwise, with weight gradients in high precision.
    mxfp8: one scale per 32 values, for B200, GB200, B300 and GB300."""
    enable_fsdp_float8_all_gather: bool = False
    """All-gather weights in FP8, which halves the traffic compared to bfloat16. Needs recipe_name =
    "tensorwise"."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights with one all-reduce after the optimizer step. Needs
    enable_fsdp_float8_all_gather."""
    min_features: NonNegativeInt = 1024
    """Minimum number of inputs and of outputs that a layer must have to be converted. For smaller
    layers, casting costs as much as FP8 saves. 0: no minimum. Layers whose sizes are not multiples
    of 16 (with mxfp8, of 32) always stay in high precision."""
    filter_fqns: ListOf[str] = ()
    """Parts of the names of layers to keep in high precision. The output projection always stays in
    high precision."""
    emulate: bool = False
    """Emulate FP8 in high precision. On hardware without FP8, emulation is automatic, and is
    logged. With mxfp8, it is automatic only on CPUs."""

    @property
    def size_multiple(self) -> int:
        """Number that must divide all dimensions of an FP8 matmul."""
        return 32 if self.recipe_name == "mxfp8" else 16

    def shard_multiple(self, tensor_degree: int) -> int:
        """Return the number that must divide both dimensions of an FP8 weight shard.

        The MXFP8 kernels of torch store the scales of 128 x 128 weights together, and tensor
        parallelism must not split such a block.

        Args:
            tensor_degree: Tensor-parallel degree.
        """
        has_blocks = self.recipe_name == "mxfp8" and not self.emulate
        return 128 if has_blocks and tensor_degree > 1 else self.size_multiple


class Checkpoint(Section):
    """Saving and resuming."""

    dropped: ClassVar = {
        "create_seed_checkpoint": (
            False,
            "was removed, because all layouts start from the same weights.",
        )
    }
    advanced: ClassVar = (
        "folder",
        "keep_every_n_steps",
        "exclude_from_loading",
        "last_save_model_only",
        "export_dtype",
        "timeout_seconds",
        "mirror_mbps",
    )

    enable: bool = True
    """Save every `interval` steps and at the end, and resume from the newest checkpoint at
    startup."""
    folder: PathText = "checkpoint"
    """Folder of the checkpoints: an absolute path, or a path inside job.dump_folder."""
    interval: OrTokens[PositiveInt] = 500
    """Number of steps between saves, or of tokens such as "500M"."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """How to write checkpoints. disabled: training stops during the write. async: training stops
    only for a copy to CPU memory, which a thread then writes. The copy takes as much CPU memory as
    the weights and optimizer state. async_with_pinned_mem: like async, but the copy runs during the
    next step; needs a GPU."""
    keep_latest_k: NonNegativeInt = 10
    """Number of newest checkpoints to keep. 0: keep all."""
    keep_every_n_steps: NonNegativeInt = 0
    """Keep checkpoints whose step is a multiple of this, regardless of keep_latest_k. 0 disables
    this."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest validation loss, and link it as `best`. Whenever a
    validation reaches a new lowest loss, a checkpoint is saved."""
    load_step: Annotated[int, Field(ge=-1)] = -1
    """Step to roll back to. Later checkpoints are renamed. The rollback happens only once: the next
    start with the same value resumes from the newest checkpoint. -1: always resume from the newest
    checkpoint."""
    exclude_from_loading: ListOf[Literal["optimizer", "data", "rng", "hooks"]] = ()
    """Parts of a checkpoint to reset instead of loading them: optimizer state, data position,
    random state, or state of hooks, such as averaged weights and spike history. This happens only
    once: checkpoints that were saved with the same value are loaded completely."""
    initial_load_path: PathText | None = None
    """Checkpoint whose weights a new run starts from, at step 0: a step folder, a checkpoint
    folder, the output folder of a run, or a URL. Ignored if there is a checkpoint to resume
    from."""
    initial_load_in_hf: bool = False
    """Whether initial_load_path is a Hugging Face folder. Each rank reads only its part of the
    files."""
    last_save_model_only: bool = False
    """After the last step, save only the weights, in the folder `final` beside the checkpoint
    folder. A run cannot resume from this folder."""
    last_save_in_hf: bool = False
    """Also export the model after the last step to `final_hf` beside the checkpoint folder, for
    transformers."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights in `final_hf`."""
    timeout_seconds: Seconds = 1800
    """Maximum number of seconds to wait for the slowest rank in a save, load or export."""
    mirror: PathText | None = None
    """URL of a folder, such as "s3://bucket/my_run", to copy each checkpoint to during training. If
    that folder has a newer checkpoint than the run, the run resumes from it. S3 needs the package
    s3fs. Other storage that fsspec supports also works."""
    mirror_mbps: ZeroOrModerate = 0.0
    """Maximum bandwidth of copies to the mirror, in megabits per second. 0: no limit."""


class Metrics(Section):
    """Metrics and metrics loggers."""

    log_freq: PositiveInt = 10
    """Number of steps between log lines. At each log line, the CPU waits for the GPU."""
    enable_tensorboard: bool = True
    """Write TensorBoard files to `tb` in job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases (pip install 'wandb>=0.19'). Set WANDB_PROJECT and WANDB_ENTITY in
    the environment, or WANDB_MODE=offline to write to `wandb` in job.dump_folder only."""
    loggers: ListOf[Annotated[str, METRICS_LOGGERS]] = ()
    """Additional metrics loggers, which plugins register."""
    details: ListOf[Literal["gradients", "updates"]] = ()
    """Additional metrics of log steps for each kind of parameter, such as attention.wq of all
    blocks. gradients: norms before clipping, and histograms over the blocks in TensorBoard.
    updates: norm of the update without weight decay, relative to the weights; needs memory for
    three copies of the largest weight on a rank."""


class Profiling(Section):
    """Traces of time and memory, written to `profile` in job.dump_folder."""

    enable_profiling: bool = False
    """Trace steps for Perfetto on the schedule that the other keys define, and log the slowest
    operators."""
    profile_freq: Steps = 10
    """Number of steps in a cycle. The warmup and traced steps are at the end of the cycle."""
    profiler_warmup: NonNegativeInt = 3
    """Number of steps before the traced steps in which the profiler runs without recording."""
    profiler_active: PositiveInt = 1
    """Number of steps to trace in a cycle."""
    profiler_repeat: NonNegativeInt = 0
    """Number of cycles. 0: repeat until the end of the run."""
    profiler_ranks: ListOf[NonNegativeInt] = (0,)
    """Ranks to trace. Empty: all ranks."""
    enable_memory_snapshot: bool = False
    """Record memory allocations in the trace, on the same schedule and ranks. On a GPU, also write
    snapshots for pytorch.org/memory_viz, including one if a rank runs out of memory."""


class SampleOptions(Section):
    """Prompts to complete during training."""

    freq: NonNegativeInt = 0
    """Number of steps between samples. Samples are logged, and written to TensorBoard and
    samples.jsonl. 0 disables them."""
    prompts: ListOf[str] = ()
    """Prompts, such as ["def __init__(self", "import os"]. An empty prompt starts a new
    document. It needs a tokenizer that has a BOS token."""
    max_new_tokens: PositiveInt = 50
    """Maximum number of tokens of a completion. Each token takes a forward pass over the whole text
    on all ranks. A completion ends earlier at the end of the document or at training.seq_len."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature. 0 always selects the most likely token."""
    top_k: NonNegativeInt = 50
    """Number of most likely tokens to sample from. 0: sample from all tokens."""
    seed: Seed = 0
    """Random seed for sampling, used for each step and prompt."""


class Guards(Section):
    """Anomaly detection and recovery."""

    advanced: ClassVar = ("max_roll_backs", "spike_deviations", "spike_history", "compare_every")

    max_skipped: NonNegativeInt = 3
    """Maximum number of consecutive skipped steps. A step with a non-finite loss or gradient is
    skipped: it changes neither weights nor optimizer state. One more skipped step stops the run
    with exit code 3."""
    on_spike: Literal["warn", "skip", "roll_back"] = "warn"
    """What to do with a step whose loss or gradient norm is a spike. warn: log and count it. skip:
    also skip it, which counts toward max_skipped. roll_back: at the next log line, save or
    validation, restore weights and optimizer state of the newest checkpoint, and continue with the
    data after the spike."""
    max_roll_backs: NonNegativeInt = 3
    """Maximum number of rollbacks. One more spike stops the run with exit code 3."""
    spike_deviations: Annotated[float, Field(ge=1e-30)] = 10.0
    """A value is a spike if it exceeds the median of recent steps by this many deviations. A
    deviation is 1.4826 times the median distance from the median, and at least 1% of the median."""
    spike_history: Annotated[int, Field(ge=3, le=10_000)] = 100
    """Number of recent steps to compare with, excluding skipped steps. Spike detection starts after
    this many steps."""
    compare_every: PositiveInt = 1000
    """Number of steps between checks for silent data corruption. They compare the weights of HSDP
    replicas, and the norm weights of tensor-parallel ranks. Other layouts have nothing to compare.
    If weights differ, the run stops with exit code 3. The error message names the ranks that differ
    from the majority (if there is no majority, all that hold the weight), and their nodes."""


class EmaOptions(Section):
    """Exponential moving average of the weights.

    Checkpoints contain the average. With --ema, `titanlite eval`, `generate` and `export` use it
    instead of the trained weights.
    """

    decay: BelowOne = 0.0
    """Decay per step, such as 0.999. The average covers about 1 / (1 - decay) steps. It takes 4
    bytes per parameter, sharded like the weights. 0 disables the average."""


class Comm(Section):
    """Process groups and timeouts."""

    init_timeout_seconds: Seconds = 300
    """Maximum number of seconds to wait for all ranks to start, and for collectives of the first
    step, which compiles kernels."""
    train_timeout_seconds: Seconds = 100
    """Maximum number of seconds for a collective of a later step, before a rank counts as lost."""
    preemption_seconds: Seconds = 3600
    """Number of seconds that ranks have to finish their step and save after a stop signal, before
    they are killed."""


class RootConfig(Section):
    """Base class for jobs and command options. A validation error lists all mistakes at once.

    Raises:
        ConfigError: If any value is invalid.
    """

    source: ClassVar[str] = "JobConfig"
    """Where the values come from, for error messages."""

    @model_validator(mode="wrap")
    @classmethod
    def _validate_all(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the values with pydantic, and raise all errors as one `ConfigError`."""
        values, errors = cls._validate_plugin_sections(values)
        try:
            model = validate(values)
        except ValidationError as failure:
            errors += failure.errors(include_url=False)
        else:
            if not errors:
                return model
        mistakes = [build_mistake(cls, error) for error in errors]
        raise ConfigError(mistakes, cls.source)

    @classmethod
    def _validate_plugin_sections(cls, values: Any) -> tuple[Any, list[Any]]:
        """Validate the sections of plugins, before pydantic validates all other values.

        This default does nothing, because only a job can have such sections. `JobConfig` overrides
        it.

        Returns:
            The values to pass to pydantic, and a list of errors in the format of
            `ValidationError.errors`.
        """
        return values, []


RENAMED_KEYS = {"metrics.writers": "metrics.loggers"}
"""Current name of each renamed key, by its former name. Jobs that use the former name remain
valid."""


def rename_keys(tables: dict[str, Any]) -> list[str]:
    """Replace former names of keys by their current names in the sections of a job.

    If a section has both names, keep both, so that validation reports the former name.

    Args:
        tables: Table of keys and values of each section. A table with a former name is replaced by
            a new table.

    Returns:
        Former names of the replaced keys, to warn about them. Keys with an empty value, such as
        `writers = []`, are left out, because earlier versions wrote them to each config.toml.
    """
    renamed = []
    for former_key, current_key in RENAMED_KEYS.items():
        section, former_name = former_key.split(".")
        _, current_name = current_key.split(".")
        table = tables.get(section)
        if not isinstance(table, dict):
            continue  # for example, an object that was created in Python
        if former_name not in table or current_name in table:
            continue

        # Rename the key in a copy, because `table` belongs to the caller.
        new_table = dict(table)
        value = new_table.pop(former_name)
        new_table[current_name] = value
        tables[section] = new_table
        if value:
            renamed.append(former_key)
    return renamed


class JobConfig(RootConfig):
    """Complete configuration of a training run.

    Each section of a job file is an attribute: `job.training.steps` is the key `steps` of the
    section `[training]`. The sections of plugins are attributes as well.
    """

    model_config = ConfigDict(extra="allow")  # for tables of plugins; others are rejected below
    dropped: ClassVar = {"dry_run": (None, "was removed. Run `titanlite profile` instead.")}

    job: Job = Job()
    model: Model = Model()
    tokenizer: TokenizerOptions = TokenizerOptions()
    training: Training = Training()
    dataset: Dataset = Dataset()
    validation: Validation = Validation()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    samples: SampleOptions = SampleOptions()
    guards: Guards = Guards()
    ema: EmaOptions = EmaOptions()
    comm: Comm = Comm()

    @classmethod
    def _validate_plugin_sections(cls, values: Any) -> tuple[Any, list[Any]]:
        """Validate the sections of plugins, and report sections that do not exist.

        Missing sections of plugins get their defaults. Pydantic validates the built-in sections
        afterward.

        Returns:
            The sections to pass to pydantic, without invalid sections of plugins, and a list of
            errors in the format of `ValidationError.errors`.
        """
        if not isinstance(values, dict | cls):
            return values, []  # pydantic reports the wrong type

        # Convert a job that an earlier version saved: drop removed keys, and rename others.
        tables = cls.without_dropped_defaults(dict(values))
        rename_keys(tables)

        # Take the sections of plugins out of `tables`, and validate them.
        plugin_tables = {}
        for name in SECTIONS:
            if name not in cls.model_fields:
                plugin_tables[name] = tables.pop(name, {})  # {} gives the defaults
        plugin_sections, plugin_errors = _validate_sections(plugin_tables)

        # The other sections must be built-in sections.
        unknown_errors = _list_unknown_sections(tables)
        return tables | plugin_sections, plugin_errors + unknown_errors

    @classmethod
    def read(cls, tables: dict[str, Any]) -> tuple[Self, Sequence[Mistake]]:
        """Create a job from its sections, with defaults in place of invalid values.

        Call this to report the mistakes later, together with other mistakes. `model_validate`
        raises an error instead.

        Args:
            tables: Table of keys and values of each section.

        Returns:
            The job, and the mistakes in `tables`.
        """
        try:
            return cls.model_validate(tables), ()
        except ConfigError as error:
            invalid_keys = {mistake.key for mistake in error.mistakes}
            valid_tables = _remove_keys(tables, invalid_keys)
            return cls.model_validate(valid_tables), error.mistakes

    def with_section(self, section: str, /, **values: Any) -> Self:
        """Return a copy of this job with new values for some keys of a section.

        The new values are not validated.
        """
        table = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: table})


def _validate_sections(tables: dict[str, Any]) -> tuple[dict[str, Section], list[Any]]:
    """Validate the sections that plugins have added to a job.

    Args:
        tables: Table of keys and values of each section.

    Returns:
        The valid sections, by name, and a list of pydantic errors in the others. Each error has a
        location that starts with the name of its section, such as ("my_section", "lr").
    """
    sections: dict[str, Section] = {}
    errors: list[Any] = []
    for name, table in tables.items():
        try:
            sections[name] = SECTIONS[name].model_validate(table)
        except ValidationError as failure:
            for error in failure.errors(include_url=False):
                errors.append({**error, "loc": (name, *error["loc"])})
    return sections, errors


def _list_unknown_sections(tables: dict[Any, Any]) -> list[Any]:
    """Return a pydantic error for each section that does not exist."""
    return [
        {"type": UNKNOWN_NAME, "loc": (name,), "input": table}
        for name, table in tables.items()
        if isinstance(name, str) and name not in SECTIONS  # pydantic reports names of other types
    ]


def _remove_keys(tables: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    """Return `tables` without the sections and keys in `keys` ("section" or "section.key")."""
    remaining = {}
    for section, table in tables.items():
        if section in keys:
            continue
        remaining[section] = {
            key: value for key, value in table.items() if f"{section}.{key}" not in keys
        }
    return remaining


SECTIONS.update({name: field.annotation for name, field in JobConfig.model_fields.items()})  # type: ignore[misc]


def list_keys() -> dict[str, FieldInfo]:
    """Return the schema of all keys of a job, including the keys of loaded plugins.

    Returns:
        The pydantic field of each key, by its full name, such as "training.steps".
    """
    return {
        f"{name}.{key}": field
        for name, section in SECTIONS.items()
        for key, field in section.model_fields.items()
    }
