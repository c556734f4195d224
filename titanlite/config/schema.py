"""Every key of a job file: its type, its constraint, its default and why the default is what it is.

Invariant: a `JobConfig` is immutable, and each single value in it is valid on its own. Rules that span keys,
the world size or files are in `titanlite.load_run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic.functional_validators import AfterValidator, ModelWrapValidatorHandler, model_validator
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from titanlite.config.files import FileModel
from titanlite.config.flavors import FLAVORS
from titanlite.config.mistakes import Mistake, WrongJob, mistake, without
from titanlite.config.registry import ARCHITECTURES, HOOKS, OPTIMIZERS, SCHEDULES, SOURCES, TOKENIZERS, WRITERS


def usable_path(path: str) -> str:
    """The path with a leading ~ expanded. Raises ValueError: no system accepts it."""
    path = os.path.expanduser(path)
    if "\0" in path or any(len(name.encode()) > 255 for name in path.split("/")):
        raise ValueError("is no path: it has a NUL byte, or a name of more than 255 bytes")
    return path


def _or_of_job_file(folder: str, info: ValidationInfo) -> str:
    return folder or f"outputs/{Path(info.data.get('config_file') or 'python').stem}"


def _auto_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be at least 1, or -1 for automatic")
    return value


def _known_flavor(name: str) -> str:
    if name not in FLAVORS:
        raise ValueError(f"must be one of {', '.join(FLAVORS)}")
    return name


AutoInt = Annotated[int, AfterValidator(_auto_or_positive)]
PathText = Annotated[str, AfterValidator(usable_path)]
Steps = Annotated[int, Field(gt=0, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists; a frozen section holds a tuple
Blocks = Annotated[tuple[Annotated[str, Field(pattern=r"^layers\.[0-9]{1,9}$")], ...], Field(strict=False)]
Component = Literal["model", "loss", "optimizer", "clip"]
NEVER_READ = "is no longer a key, because nothing read it. Remove it."


def _never_read(**defaults: object) -> dict[str, tuple[object, str]]:
    """Keys that an earlier version accepted but never read, as `Section.dropped` has them."""
    return {key: (default, NEVER_READ) for key, default in defaults.items()}


class Section(FileModel):
    """Base of all sections: immutable, closed to unknown keys, without silent conversions ("8" is not 8)."""

    # Validated anew, because `model_copy(update=...)` does not validate.
    model_config = ConfigDict(use_attribute_docstrings=True, revalidate_instances="always")

    dropped: ClassVar[dict[str, tuple[object, str]]] = {}
    """Keys that earlier versions had: name -> (its default, the answer to any other value: what to use instead). Jobs
    that these versions saved name each key, so one that has its default is read as if it were not there."""
    on_resume: ClassVar[Literal["harmless", "changes the curve", "refused"]] = "changes the curve"
    """What a resume says of a change in a section that a plugin brings."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():  # whose text has the lines of its docstring
            field.description = " ".join((field.description or "").split())

    @model_validator(mode="before")
    @classmethod
    def _forget_dropped(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if k not in cls.dropped or v != cls.dropped[k][0]}


class Job(Section):
    """What this run is and where its outputs go."""

    dropped: ClassVar = {"plan": (False, "is gone: `titanlite profile` measures a few steps.")}

    config_file: PathText | None = None
    """Job file (TOML). A bare name is looked up in the current folder, then in train_configs/."""
    dump_folder: Annotated[PathText, AfterValidator(_or_of_job_file)] = Field(default="", validate_default=True)
    """Folder of all outputs. Empty: outputs/<name of the job file>, so that two job files never mix their outputs. A
    job that is made in Python gets outputs/python."""
    description: str = ""
    """Free text, shown in the first line of the log."""
    plugins: Names = ()
    """Python modules to import before all else is read, or names under which installed packages offer them (entry
    points of the group titanlite.plugins). They register what other keys can name. See docs/extending.md."""
    hooks: Annotated[tuple[Annotated[str, HOOKS], ...], Field(strict=False)] = ()
    """Registered hooks of plugins that the training loop calls, in this order, after its own."""


class Model(Section):
    """The architecture. A key that is left out has the flavor's value."""

    dropped: ClassVar = {"name": (None, "is a key of torchtitan's: `titanlite migrate FILE` converts its job files.")}

    architecture: Annotated[str, ARCHITECTURES] = "llama"
    """What is built: titanlite's own model, or a registered one of a plugin, which has the keys here, too."""
    flavor: Annotated[str, AfterValidator(_known_flavor)] = "debugmodel"
    """A name in titanlite/config/flavors.py, such as debugmodel, 150m, 8b or qwen2.5-0.5b."""
    dim: PositiveInt | None = None
    """Width of the residual stream."""
    n_layers: PositiveInt | None = None
    """Number of transformer blocks."""
    n_heads: PositiveInt | None = None
    """Number of query heads. Without head_dim it must divide dim."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention). It must divide n_heads."""
    ffn_dim: PositiveInt | None = None
    """Inner width of the SwiGLU feed-forward network."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding, at least as many as the tokenizer has tokens. Left out: the flavor's number; for
    debugmodel and 150m the number of tokens, rounded up to a multiple of 128."""
    max_seq_len: PositiveInt | None = None
    """Longest sequence that the model has positions for, in tokens."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of RMSNorm."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary position embedding's frequencies."""
    rope_scaling_factor: Annotated[float, Field(ge=1.0)] | None = None
    """Llama 3.1 frequency scaling: by how many times the context was extended. 1 means no scaling."""
    rope_low_freq_factor: PositiveFloat | None = None
    """Frequencies that make fewer turns than this within the original context are divided by the full scaling
    factor."""
    rope_high_freq_factor: PositiveFloat | None = None
    """Frequencies that make more turns than this within the original context are not scaled."""
    rope_original_max_seq_len: PositiveInt | None = None
    """Length of the context before it was extended, in tokens."""
    tied_embeddings: bool | None = None
    """Use the embedding matrix as the output projection, too."""
    head_dim: PositiveInt | None = None
    """Width of a head, an even number. Left out: the flavor's; if that is dim / n_heads, it follows these two."""
    qkv_bias: bool | None = None
    """Add a bias to queries, keys and values, as Qwen2 does."""
    qk_norm: Literal["none", "head", "projection"] | None = None
    """RMSNorm of queries and keys before the rotary embedding: of each head alone, as Qwen3 does, or of all heads
    together, as OLMo 2 does."""
    norm_placement: Literal["before", "after"] | None = None
    """before: attention and feed-forward get a normalised input. after: their outputs are normalised before they are
    added to the residual stream, as OLMo 2 does."""
    sliding_window: NonNegativeInt | None = None
    """A token attends to so many tokens, itself included, as in the first Mistral 7B. 0: to all tokens before it."""
    no_rope_interval: NonNegativeInt | None = None
    """Each n-th block has no rotary positions, as in SmolLM3, where n is 4. 0: all blocks have them."""


class Tokenizer(Section):
    """The tokenizer file."""

    name: Annotated[str, TOKENIZERS] | None = None
    """The format, or a registered tokenizer of a plugin. Left out: huggingface for a file that ends in .json, otherwise
    tiktoken."""
    path: PathText = "assets/tokenizer/tokenizer.model"
    """A tokenizer.model in tiktoken's format (Llama 3), or a Hugging Face tokenizer.json. The default has 4,096 tokens
    and was trained on Python source. It comes with titanlite, so that a fresh machine can train. Also a URL."""


class Training(Section):
    """The length, the batch and the numerics of the run."""

    steps: Steps = 10000
    """Number of optimizer steps."""
    seq_len: PositiveInt = 2048
    """Tokens per row. A row is one training sequence."""
    local_batch_size: PositiveInt = 8
    """Rows per forward pass of one data-parallel rank (a microbatch)."""
    global_batch_size: AutoInt = -1
    """Rows per optimizer step, over all ranks. -1: local_batch_size times the data-parallel degree. With a larger
    multiple of that number, gradients are accumulated over several forward passes."""
    max_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down so that their total L2 norm is at most this. 0: no clipping. Llama was trained with
    1."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the z-loss: this times log(Z)^2 is added to the loss of each token, where Z is the denominator of the
    softmax. It keeps the logits from growing until they overflow bfloat16. PaLM used 1e-4. 0: none. The validation loss
    never contains it."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype in which FSDP all-gathers parameters and in which the model computes. bfloat16 halves the traffic and is
    computed by the tensor cores."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are reduced over the ranks. float32 is the default because sums over many ranks lose
    bits in bfloat16."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the sharded parameters, gradients and optimizer state. bfloat16 halves their memory, but updates that
    are small beside the weight are rounded away: see optimizer.stochastic_rounding."""
    init_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which weights are initialised and sharded before they are cast to `dtype`. bfloat16 halves the peak
    memory of the start-up. It loses nothing when the weights that are loaded were published in bfloat16."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory. This is slow, but larger models fit."""
    seed: Seed = 0
    """Seed of the initial weights and, unless dataset.seed says otherwise, of the data order."""
    deterministic: bool = False
    """Use only kernels that give the same bits each time. They are slower on a GPU. Runs on a CPU are always
    deterministic."""
    gc_freq: PositiveInt = 50
    """Steps between two of Python's garbage collections. All ranks collect at the same step, because a rank that
    collects alone makes all others wait."""
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads per process. 0: the value of OMP_NUM_THREADS if it is set, otherwise the cores of the machine divided
    by the number of its processes."""


class TextSource(Section):
    """A source of documents."""

    source: Annotated[str, SOURCES] = "python_stdlib"
    """python_stdlib: the .py files of the running interpreter's standard library. jsonl: files with one JSON object per
    line, also .gz and .zst. text: plain UTF-8 files. parquet: Parquet files. arrow: a folder that `datasets` saved to
    disk. huggingface: anything that `datasets` loads. c4: allenai/c4 in English, streamed by `datasets`. shards: a
    folder that `titanlite prepare` made. A plugin can bring others."""
    path: PathText | None = None
    """jsonl, text and parquet: a file or a glob, for example "data/*.jsonl". arrow and shards: a folder. huggingface:
    an id on the hub, or a local folder. All but huggingface: also a URL, such as "s3://bucket/data/*.jsonl"."""
    config: str | None = None
    """huggingface: name of the dataset's configuration."""
    split: str = "train"
    """huggingface and arrow: name of the split."""
    text_column: str = "text"
    """Name of the field that holds the text."""
    streaming: bool = False
    """huggingface: read the data during training instead of downloading it first."""


class ValidationSource(TextSource):
    """One source of a mix to validate on."""

    dropped = _never_read(max_epochs=0)

    weight: NonNegativeFloat = 1.0
    """Share of the rows that come from this source, relative to the weights of the other sources."""


class DataSource(ValidationSource):
    """One source of a mix."""

    dropped: ClassVar = {}

    max_epochs: NonNegativeInt = 0
    """The run ends, with a checkpoint, once it has read this source this many times. 0: it never ends because of the
    data. Above 0, each rank tokenizes the whole source to know where it ends; only the length of shards is known."""


class DataStage(Section):
    """Other data, batches or rates from some step on, for example to anneal on better data. A key that is left out
    stays as it was in the stage before. `titanlite check --plot` draws them."""

    start_step: NonNegativeInt
    """The stage begins after this step: its first global batch is that of the next one."""
    weights: Annotated[tuple[NonNegativeFloat, ...] | None, Field(strict=False)] = None
    """One weight per source, in the order of dataset.sources."""
    global_batch_size: PositiveInt | None = None
    """Rows per optimizer step, over all ranks: several stages make a warm-up of the batch size. It replaces
    training.global_batch_size."""
    lr_factor: PositiveFloat | None = None
    """The learning rate is that of [lr_scheduler] times this."""


class Dataset(TextSource):
    """Where the text comes from, and in which order it is read. The keys here describe one source. For a mix, use
    [[dataset.sources]]."""

    dropped = _never_read(weight=1.0)

    max_epochs: NonNegativeInt = 0
    """The run ends, with a checkpoint, once it has read this source this many times. 0: it never ends because of the
    data. Above 0, each rank tokenizes the whole source to know where it ends; only the length of shards is known."""
    sources: Annotated[tuple[DataSource, ...], Field(strict=False)] = ()
    """The sources of a mix, each a table [[dataset.sources]], instead of the keys of one source. Job file only."""
    stages: Annotated[tuple[DataStage, ...], Field(strict=False)] = ()
    """Changes of the weights of the sources, of the batch size and of the learning rate during the run, each a table
    [[dataset.stages]]. Job file only."""
    seed: Seed | None = None
    """Seed of the data order. Left out: training.seed."""
    packing: Literal["concat", "best_fit"] = "concat"
    """concat: documents are joined and cut into rows, so that no token is lost. best_fit: a document that fits into a
    row is never cut, and the rest of each row is padding."""
    document_mask: bool = False
    """Each token attends to its own document only, positions restart with each document, and the last token of a
    document does not predict the next document."""
    on_change: Literal["error", "warn"] = "error"
    """What to do when a run is resumed and its data has changed. error: stop. warn: continue with the new data from the
    same position."""
    on_bad_record: Literal["error", "skip"] = "error"
    """What to do with a record that cannot be read, because it is not JSON, has no text or is not Unicode. error: stop
    the run and save the steps before it. skip: leave the record out, name it once in the log and count it in the
    metrics."""
    num_workers: NonNegativeInt = 1
    """Background processes per rank that read and tokenize. One delivers millions of tokens per second. 0: the trainer
    itself reads."""
    prefetch: PositiveInt = 2
    """Number of global batches that each background process may prepare in advance."""

    def staged(self, key: Callable[[DataStage], Any], done: int, default: Any) -> Any:
        """The value of a key of a stage for the step after `done` steps. Before a stage has it: `default`."""
        stages = sorted(self.stages, key=lambda stage: stage.start_step)
        found = (key(stage) for stage in reversed(stages) if stage.start_step <= done)
        return next((value for value in found if value is not None), default)


class Validation(TextSource):
    """The loss on data that is never trained on. The keys here describe one source. For a mix, use
    [[validation.sources]]."""

    dropped = _never_read(weight=1.0, max_epochs=0, stages=[], document_mask=False)
    dropped |= _never_read(on_change="error", num_workers=1, prefetch=2)

    freq: NonNegativeInt = 0
    """Steps between two validations. One more is done before the first step, and one at the end. 0: no validation."""
    sequences: PositiveInt = 64
    """Rows per validation, each of training.seq_len tokens. The number of ranks does not change it."""
    holdout: BelowOne = 0.0
    """Share of the documents of [dataset] to validate on. They are chosen by a hash of each document and are never
    trained on, not even with freq = 0. Above 0, the keys of the data in this section are not used. 0: validate on the
    data that this section names."""
    sources: Annotated[tuple[ValidationSource, ...], Field(strict=False)] = ()
    """The sources of a mix, each a table [[validation.sources]], instead of the keys of one source. Job file only."""
    seed: Seed | None = None
    """Seed of the choice of documents. Left out: training.seed."""
    packing: Literal["concat", "best_fit"] = "concat"
    """As dataset.packing."""
    on_bad_record: Literal["error", "skip"] = "error"
    """As dataset.on_bad_record."""


class ParameterGroup(Section):
    """Parameters with a learning rate or a weight decay of their own."""

    params: Annotated[Names, Field(min_length=1)]
    """Names of parameters, or patterns with * and ?, such as ["tok_embeddings.*", "layers.*.attention.w?.weight"]. Each
    parameter of the model must be in exactly one of the tables, and each pattern must fit one."""
    lr_factor: NonNegativeFloat = 1.0
    """The learning rate is this times that of the step."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of these parameters, norms and embeddings included. Left out: what they have without tables."""

    def claims(self, name: str) -> bool:
        """Whether a parameter is in this group."""
        return any(fnmatchcase(name, pattern) for pattern in self.params)


class Optimizer(Section):
    """The rule by which gradients change weights; the numbers are AdamW's, with the defaults of the Llama papers."""

    name: Annotated[str, OPTIMIZERS] = "AdamW"
    """The algorithm. Muon is for the matrices of the blocks; AdamW then updates embedding, output, norms and biases.
    AdamW8bit is torchao's: moments of 8 bits. SGD has momentum."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    beta1: BelowOne = 0.9
    """Decay of the first moment per step."""
    beta2: BelowOne = 0.95
    """Decay of the second moment per step. With 0.95 a spike is forgotten in about 20 steps, with 0.999 in about
    1,000."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment, so that the update is never divided by 0."""
    momentum: BelowOne = 0.95
    """Decay of the momentum per step, of Muon's matrices and of SGD. Other algorithms do not read it."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of all matrices. The weights of norms are never decayed."""
    decay_embeddings: bool = True
    """Apply weight decay to the embedding, too."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """fused is the fastest on CPU and GPU. The others are there for comparison: with them the host waits for a GPU in
    each step, because it must know whether the step is skipped (see [guards]). stochastic_rounding, another state_dtype
    and a compiled optimizer have an implementation of their own."""
    state_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the two moments. Left out: training.dtype. bfloat16 halves their memory. With a beta above 0.99 it needs
    stochastic_rounding, because without it small changes of a moment are rounded away. If it differs from
    training.dtype, the update is compiled on a GPU (see compile.components)."""
    stochastic_rounding: bool = False
    """Round weights and moments that are kept in bfloat16 (training.dtype, state_dtype) up or down at random, so that
    small updates are not lost. The random bits depend on the step and the element only: they are the same on any number
    of ranks and after a restart. The update is compiled on a GPU (see compile.components)."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Rates and decays of groups of parameters, each a table [[optimizer.groups]]. With tables, every parameter must be
    in exactly one. Job file only."""


class LRScheduler(Section):
    """Warmup, then a stable rate, then decay (WSD): a pure function of the step."""

    name: Annotated[str, SCHEDULES] = "wsd"
    """The schedule. A registered one of a plugin is given the keys here, too."""
    warmup_steps: NonNegativeInt | None = None
    """Steps in which the rate rises linearly from 0 to its peak. Left out: 200, or a tenth of training.steps if that is
    less."""
    total_steps: Steps | None = None
    """Steps of the whole schedule, where training.steps are only its first ones. Left out: training.steps."""
    decay_ratio: Fraction | None = None
    """Share of all steps that decay takes; it is at the end of the run. Left out: all steps after warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """Rate at which decay ends, right after the last step, as a share of the peak rate."""


class Parallelism(Section):
    """How the ranks of the world are laid out."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Number of replicas of the sharded model (HSDP). Parameters are gathered within a replica, and gradients are
    reduced across the replicas."""
    data_parallel_shard_degree: AutoInt = -1
    """Number of ranks that the parameters of a replica are sharded over (FSDP2). -1: all ranks that the other degrees
    leave."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed after the forward pass and gathered again for the backward pass. always:
    yes. never: no. default: yes, with two exceptions. The last group (norm and output) stays, because the backward pass
    begins with it. All blocks stay if they are so small that they share one group, or if there is a single rank and
    they have fewer than 16 times fsdp_min_num_params together."""
    fsdp_min_num_params: NonNegativeInt = 1_000_000
    """Consecutive blocks are grouped until a group has this many parameters, and each group has one all-gather and one
    reduction. A model with fewer parameters has one group. 0: each block is a group, however small it is."""
    fsdp_reduce: Literal["step", "microbatch"] = "step"
    """When gradients are reduced. step: once per step, with the last microbatch; until then each rank keeps the
    gradients of all parameters, 4 bytes per parameter. microbatch: after each microbatch, so that a rank keeps its
    shard of the gradients only; the traffic grows with the number of microbatches."""
    fsdp_forward_prefetch: NonNegativeInt = 0
    """Number of groups of blocks whose all-gather is issued ahead of the current group in the forward pass. 0: one,
    as FSDP's own implicit order has it."""
    fsdp_backward_prefetch: NonNegativeInt = 0
    """Number of groups of blocks whose all-gather is issued ahead in the backward pass. 0: FSDP's own implicit prefetch
    of one group."""
    tensor_parallel_degree: PositiveInt = 1
    """Number of ranks that share every matmul. Between the matmuls each rank has a part of the sequence (sequence
    parallelism), and the loss is computed over shards of the vocabulary. The computation waits for this traffic, so
    keep the degree within one machine."""
    enable_async_tensor_parallel: bool = False
    """Overlap the traffic of tensor parallelism with its matmuls, through symmetric memory. Needs compile.enable and a
    GPU."""
    context_parallel_degree: PositiveInt = 1
    """Number of ranks that share every row. Each rank has one chunk from the front of the row and one from the back, so
    that all ranks have the same work in causal attention. The ranks gather each other's keys and values."""
    pipeline_parallel_degree: PositiveInt = 1
    """Number of ranks that the blocks are spread over. The microbatches of a step pass through them one after the
    other. There are global_batch_size / data-parallel degree / local_batch_size of them."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Order of forward and backward passes. 1F1B and GPipe have one stage per rank. The others have two, or as many as
    pipeline_parallel_split_points gives. The zero bubble schedules delay the gradients of weights."""
    pipeline_parallel_split_points: Blocks = ()
    """First block of each stage except the first stage, such as ["layers.4", "layers.8"]. Empty: the stages have equal
    cost, with the embedding and the output included."""


class ActivationCheckpoint(Section):
    """Save activation memory by recomputing activations in the backward pass."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """none: keep all activations. full: keep only the input of each block. selective: see selective_ac_option.
    memory_budget: the compiler chooses what to keep; needs compile.enable."""
    selective_ac_option: Annotated[str, Field(pattern=r"^(op|[1-9][0-9]*)$")] = "op"
    """op: keep the results of attention and of every second matmul except the last, which is not needed again, and
    recompute the rest. A number n: every n-th block keeps its input only and is recomputed."""
    memory_budget: Fraction = 0.5
    """For mode memory_budget: share of the activation memory that may be kept. 0: everything is recomputed. 1: nothing
    is."""


class Compile(Section):
    """torch.compile."""

    enable: bool = False
    """Compile the listed components. The first step then takes half a minute or more."""
    components: Annotated[tuple[Component, ...], Field(strict=False)] = ("model", "loss")
    """model: the transformer blocks (one compilation serves all of them), and the cast of weights before an FP8
    all-gather. loss: the softmax and the gradient of the loss. optimizer: the update, by titanlite's own AdamW instead
    of torch's fused one. clip: the gradient norm. optimizer.stochastic_rounding and optimizer.state_dtype need
    titanlite's own AdamW. On a GPU it is compiled even if enable is false, because without compilation it needs 72
    kernels per tensor."""


class Float8(Section):
    """FP8 matmuls by torchao's Float8Linear."""

    enable: bool = False
    """Convert the linear layers to Float8Linear."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """tensorwise: one scale per tensor, the fastest. rowwise: one scale per row, more accurate. rowwise_with_gw_hp: as
    rowwise, with the gradient of the weights in high precision."""
    enable_fsdp_float8_all_gather: bool = False
    """All-gather weights in FP8, which is half the traffic of bfloat16. It has an effect with recipe_name =
    "tensorwise" only."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights with one all-reduce after the optimizer step. It has an effect with
    enable_fsdp_float8_all_gather only."""
    min_features: NonNegativeInt = 1024
    """Layers with fewer inputs or outputs than this stay in high precision, because casting their tensors costs about
    as much as the faster matmul saves. 0: all layers are converted."""
    filter_fqns: Names = ()
    """Layers whose name contains one of these texts stay in high precision. The output projection always does, because
    it is sensitive and its logits are computed in chunks."""
    emulate: bool = False
    """Emulate FP8 in high precision. Hardware without FP8 does so always, and the log says it."""


class Checkpoint(Section):
    """Saving and resuming."""

    dropped: ClassVar = {"create_seed_checkpoint": (False, "is gone: each layout starts from the same weights anyway.")}

    enable: bool = True
    """Save every `interval` steps and at the end. At the start, resume from the newest checkpoint."""
    folder: PathText = "checkpoint"
    """Folder of the checkpoints inside job.dump_folder."""
    interval: PositiveInt = 500
    """Steps between two saves. A crash loses at most this many steps."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """disabled: training stops while a checkpoint is written. async (also in place of "process" of titanlite 0.2):
    training stops only for a copy to host memory, and a thread writes the copy; the host needs memory for one more
    copy of weights and optimizer state.
    async_with_pinned_mem: as async, but the copy is made during the next step; needs a GPU."""
    keep_latest_k: NonNegativeInt = 10
    """Number of newest checkpoints to keep. Older ones are removed after a save. 0: all are kept."""
    keep_every_n_steps: NonNegativeInt = 0
    """Checkpoints whose step is a multiple of this are never removed, whatever keep_latest_k says. 0: there are
    none."""
    keep_best: bool = False
    """Never remove the checkpoint with the lowest validation loss. The link `best` in the folder leads to it. A
    validation with a lower loss than all before is followed by a save, so choose validation.freq with that in mind. The
    weights before the first step do not count."""
    load_step: Annotated[int, Field(ge=-1)] = -1
    """Go back to the checkpoint of this step, once. Later checkpoints are renamed. Another start with the same value
    resumes from what was saved since. -1: resume from the newest checkpoint."""
    exclude_from_loading: Annotated[tuple[Literal["optimizer", "data", "rng"], ...], Field(strict=False)] = ()
    """Parts of a checkpoint that are not loaded, once: the optimizer's state, the position in the data, the random
    state. They start afresh. A checkpoint that was saved with the same value is loaded whole."""
    initial_load_path: PathText | None = None
    """Checkpoint whose weights a new run starts from, at step 0: the folder of one step, the folder of all steps, or
    the output folder of a run. Also a URL. It is ignored if there is a checkpoint to resume from."""
    initial_load_in_hf: bool = False
    """initial_load_path is a Hugging Face folder. Each rank reads only its own slices of the .safetensors files."""
    last_save_model_only: bool = False
    """The save after the last step has the weights only, a third of the size. It is written to `final` beside the
    folder, so that no run resumes from it."""
    last_save_in_hf: bool = False
    """After the last step, also write `final_hf` beside the folder, in the format that transformers loads."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights in `final_hf`. float32 is exact; bfloat16 halves the size."""
    timeout_seconds: PositiveInt = 1800
    """Longest wait for the slowest rank in a save, a load or an export, in seconds. A rank that takes longer counts as
    lost."""
    mirror: PathText | None = None
    """URL of a folder, such as "s3://bucket/my_run", that gets a copy of each checkpoint while training goes on. A
    start whose own folder is empty, or older, goes on from there. S3 needs the package s3fs; any other storage that
    fsspec reads will do, too."""
    mirror_mbps: NonNegativeFloat = 0.0
    """Megabits a second that the copies to the mirror may take. 0: as many as they can."""


class Metrics(Section):
    """What is measured and where it is written."""

    log_freq: PositiveInt = 10
    """Steps between two log lines. The host waits for the device once per line."""
    enable_tensorboard: bool = True
    """Write TensorBoard files to <dump_folder>/tb."""
    enable_wandb: bool = False
    """Send TensorBoard's curves to Weights & Biases (pip install 'wandb>=0.19'). Its environment variables say
    where: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline for files in <dump_folder>/wandb only."""
    writers: Annotated[tuple[Annotated[str, WRITERS], ...], Field(strict=False)] = ()
    """Further places for the numbers: registered writers of plugins."""
    details: Annotated[tuple[Literal["gradients", "updates"], ...], Field(strict=False)] = ()
    """More numbers of a logged step, each by group of parameters, such as attention.wq of all blocks. For what "float8"
    of titanlite 0.2 told, compare the loss with that of a run without float8. In logged steps they read what they
    measure once more, and need an all-reduce. gradients: the norm before clipping, and in
    TensorBoard a histogram over the blocks. updates: the norm of the update, without weight decay, as a share of that
    of the weights; it needs memory for three copies of the largest weight of a rank."""


class Profiling(Section):
    """Where the time and the memory of a step go. Files are written to <dump_folder>/profile."""

    enable_profiling: bool = False
    """Trace steps on the schedule below, for Perfetto, and log which operators take the most time."""
    profile_freq: Steps = 10
    """A cycle of the schedule, in steps. Its last steps are the warm-up and the traced steps."""
    profiler_warmup: NonNegativeInt = 3
    """Steps before the traced ones in which the profiler runs and keeps nothing, because its own first steps are
    slow."""
    profiler_active: PositiveInt = 1
    """Steps that are traced in a cycle."""
    profiler_repeat: NonNegativeInt = 0
    """Cycles of a start of the run, after which the schedule ends. 0: it goes on to the end."""
    profiler_ranks: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = (0,)
    """Ranks that are traced. One tells most; traces of two show which one waits for the other. Empty: all ranks."""
    enable_memory_snapshot: bool = False
    """Show what is in memory, on the same schedule and ranks: each allocation, in the trace. On a GPU also the
    allocator's blocks with their history, for pytorch.org/memory_viz, and also when any rank runs out of memory."""


class Samples(Section):
    """Prompts that the model completes during training, for a person to read."""

    freq: NonNegativeInt = 0
    """Steps between two times. The completions go to the log, to TensorBoard and to samples.jsonl. 0: never."""
    prompts: Names = ()
    """Texts to complete, such as ["def __init__(self", "import os"]. An empty text is the beginning of a document."""
    max_new_tokens: PositiveInt = 50
    """Longest completion, in tokens. All ranks compute each token together, by a forward pass over the whole text, so
    this many passes are made. It ends earlier if the model ends the document, or at training.seq_len."""
    temperature: NonNegativeFloat = 0.8
    """0: take the most likely token each time. 1: sample from the model's probabilities. Higher: more random."""
    top_k: NonNegativeInt = 50
    """Sample from the k most likely tokens only. 0: from all."""
    seed: Seed = 0
    """Seed of the sampling, the same at each step and for each prompt."""


class Guards(Section):
    """What a run does where its numbers go wrong."""

    max_skipped: NonNegativeInt = 3
    """Steps in a row that may be skipped. A step whose loss or gradient is not finite changes neither weights nor
    optimizer; the log names it, and the run goes on. One more than this ends the run with exit code 3, because then
    the cause is not a single batch. 0: the first one ends it."""
    on_spike: Literal["warn", "skip", "roll_back"] = "warn"
    """What to do with a step whose loss or gradient norm is a spike. warn: the log names it, and the metrics count it.
    skip: it changes neither weights nor optimizer, too, and counts for max_skipped. roll_back: once the host knows of
    it, with the next line of the log, save or validation, weights and optimizer become those of the newest checkpoint.
    The steps since then count as done, so their data is passed over."""
    max_roll_backs: NonNegativeInt = 3
    """How often a run goes back. One more spike ends it with exit code 3. The newest checkpoint stays."""
    spike_deviations: PositiveFloat = 10.0
    """A number is a spike if it is above the median of the last steps by more than this many deviations. A deviation
    is 1.4826 times the median distance from the median, and at least 1% of the median."""
    spike_history: Annotated[int, Field(ge=3, le=10_000)] = 100
    """Number of last steps that a step is compared with. Skipped ones are left out. The first so many steps of a run
    are no spikes."""
    compare_every: PositiveInt = 1000
    """Steps between two comparisons of weights that several ranks hold: those of HSDP's replicas, and the norms of
    tensor ranks. If a bit differs, the run ends with exit code 3 and names the rank and its machine. The host waits for
    the device, which reads the weights once."""


class Ema(Section):
    """An exponential moving average of the weights. Checkpoints have it, and `titanlite eval`, `generate` and `export`
    take it with --ema."""

    decay: BelowOne = 0.0
    """Share of the average that a step keeps, such as 0.999: it then covers about the last 1 / (1 - decay) steps. It
    takes 4 bytes per parameter, sharded as the weights are. 0: none."""


class Comm(Section):
    """Process groups."""

    init_timeout_seconds: PositiveInt = 300
    """Longest wait in seconds for all ranks to start, and for any collective of the first step, in which kernels are
    compiled."""
    train_timeout_seconds: PositiveInt = 100
    """Longest wait in seconds for any collective of a later step. If one takes longer, a rank is lost or hangs."""
    preemption_seconds: PositiveInt = 3600
    """Seconds that ranks have to finish their step and save after a signal asked them to stop. Then they are killed.
    The default, an hour, is enough for the largest checkpoints. With a scheduler that kills by itself it can stay."""


class Whole(Section):
    """Base of what is read as a whole: a job, or the options of a command.

    Raises:
        WrongJob: values that are not allowed, all of them in one message.
    """

    place: ClassVar[str] = "JobConfig"  # where they are

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as failure:
            errors = failure.errors(include_url=False)
            raise WrongJob([mistake(cls, error) for error in errors], cls.place) from None


class JobConfig(Whole):
    """One training run."""

    dropped: ClassVar = {"dry_run": (None, "is gone: `titanlite profile` measures a few steps of a job.")}

    job: Job = Job()
    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
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
    samples: Samples = Samples()
    guards: Guards = Guards()
    ema: Ema = Ema()
    comm: Comm = Comm()

    @classmethod
    def read(cls, tables: dict[str, Any]) -> tuple[Self, Sequence[Mistake]]:
        """The job of these tables, with a default in place of each wrong value, and what is wrong."""
        try:
            return cls.model_validate(tables), ()
        except WrongJob as wrong:
            return cls.model_validate(without(tables, wrong.mistakes)), wrong.mistakes


SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in JobConfig.model_fields.items()}  # type: ignore[misc]
"""Section -> its model."""
KEYS: dict[str, FieldInfo] = {
    f"{name}.{key}": field for name, section in SECTIONS.items() for key, field in section.model_fields.items()
}
"""section.key -> its annotation and its help."""


def add_section(name: str, section: type[Section]) -> None:
    """Let jobs have a table more, from now on. Raises ValueError: the name is taken or is none."""
    if name in SECTIONS or not name.isidentifier():
        raise ValueError(f"[{name}] is a table of a job already, or no name for one")
    JobConfig.model_fields[name] = FieldInfo.from_annotated_attribute(section, section())
    JobConfig.model_rebuild(force=True)
    SECTIONS[name] = section
    KEYS.update({f"{name}.{key}": field for key, field in section.model_fields.items()})
