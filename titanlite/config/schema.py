"""Every key of a job file: its type, its constraint, its default and why the default is what it is.

Invariant: a `JobConfig` is immutable, and each single value in it is valid on its own. Rules that span keys
or the world size are in `titanlite.config.rules`, those about files in `titanlite.load_run`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from titanlite.config.mistakes import WrongJob, mistakes


def _auto_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be at least 1, or -1 for automatic")
    return value


def usable_path(path: str) -> str:
    """The path with a leading ~ expanded.

    Raises:
        ValueError: the system takes no such name: too long, a NUL byte, or no UTF-8.
    """
    path = os.path.expanduser(path)
    path.encode()
    try:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.stat(path)
    except OSError as error:
        raise ValueError(f"is no path: {error.strerror}") from None
    return path


AutoInt = Annotated[int, AfterValidator(_auto_or_positive)]
PathText = Annotated[str, AfterValidator(usable_path)]
Steps = Annotated[int, Field(gt=0, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists, a frozen section holds a tuple


class Section(BaseModel):
    """Base of all sections: immutable, closed to unknown keys, without silent conversions ("8" is not 8)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        revalidate_instances="always",  # because `model_copy(update=...)` checks nothing
    )

    dropped: ClassVar[dict[str, object]] = {}
    """Keys that an earlier version accepted and nothing read, with their defaults: a job that was saved then names them
    all."""

    @classmethod
    def without_dropped(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`values` without the dropped keys that have their default."""
        return {key: value for key, value in values.items() if key not in cls.dropped or value != cls.dropped[key]}

    @model_validator(mode="before")
    @classmethod
    def _forget_dropped(cls, values: Any) -> Any:
        return cls.without_dropped(values) if isinstance(values, dict) else values


class Job(Section):
    """What this run is and where its outputs go."""

    config_file: PathText | None = None
    """Job file (TOML). A bare name is looked up in the current folder, then in train_configs/."""
    dump_folder: PathText = ""
    """Folder of all outputs. Empty: outputs/<name of the job file>, so that two job files never mix their outputs; for
    a job that is made in Python, outputs/python."""
    description: str = ""
    """Free text, shown in the first line of the log."""


class Model(Section):
    """Which Llama. Every architecture field left out is taken from the flavor."""

    flavor: str = "debugmodel"
    """A name in titanlite/config/flavors.py: debugmodel, 150m, 1b, 3b, 8b, 70b, 405b."""
    dim: PositiveInt | None = None
    """Width of the residual stream."""
    n_layers: PositiveInt | None = None
    """Number of transformer blocks."""
    n_heads: PositiveInt | None = None
    """Number of query heads; must divide dim."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); must divide n_heads."""
    ffn_dim: PositiveInt | None = None
    """Inner width of the SwiGLU feed-forward network."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; at least the tokenizer's vocabulary. Left out: the flavor's, or for debugmodel and 150m
    the tokenizer's, rounded up to a multiple of 128."""
    max_seq_len: PositiveInt | None = None
    """Longest sequence that positions are defined for, in tokens."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of RMSNorm."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies."""
    rope_scaling_factor: Annotated[float, Field(ge=1.0)] | None = None
    """Llama 3.1 frequency scaling: how many times longer the context became. 1 means no scaling."""
    rope_low_freq_factor: PositiveFloat | None = None
    """Frequencies with fewer than this many turns in the original context are scaled in full."""
    rope_high_freq_factor: PositiveFloat | None = None
    """Frequencies with more than this many turns in the original context are left alone."""
    rope_original_max_seq_len: PositiveInt | None = None
    """Context before it was extended, in tokens."""
    tied_embeddings: bool | None = None
    """Use the embedding matrix as output projection, too."""


class Tokenizer(Section):
    """The tokenizer file."""

    path: PathText = "assets/tokenizer/tokenizer.model"
    """A tiktoken-format tokenizer.model (Llama 3), or a Hugging Face tokenizer.json. The default, 4,096 tokens
    trained on Python source, comes with titanlite, so that a fresh machine can train."""


class Training(Section):
    """The size and the numerics of the run."""

    steps: Steps = 10000
    """Optimizer steps."""
    seq_len: PositiveInt = 2048
    """Tokens in a row (a training sequence)."""
    local_batch_size: PositiveInt = 8
    """Rows in one forward pass of one data-parallel rank (a microbatch)."""
    global_batch_size: AutoInt = -1
    """Rows in one optimizer step, over all ranks. -1: local_batch_size times the data-parallel degree. A larger
    multiple of that accumulates gradients."""
    max_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this total L2 norm; 0 turns clipping off. 1 is what Llama was trained with."""
    z_loss: NonNegativeFloat = 0.0
    """Adds this times log(Z)^2 of each token to the loss, where Z is the denominator of the softmax: logits that drift
    apart cannot overflow bfloat16. PaLM used 1e-4. The validation loss is without it."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype in which FSDP all-gathers parameters and computes: half the traffic, and the tensor cores' dtype."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradient reduction. float32, because sums over many ranks lose bits in bfloat16."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the sharded parameters, gradients and optimizer state. bfloat16 halves their memory, but small
    updates are rounded away: see optimizer.stochastic_rounding."""
    init_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which weights are built and sharded before they are cast to `dtype`. bfloat16 halves the peak of
    start-up and equals weights that were published in bfloat16."""
    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory; slow, but fits larger models."""
    seed: Seed = 0
    """Seed of the initial weights and, unless dataset.seed says otherwise, of the data order."""
    deterministic: bool = False
    """Only kernels that give the same bits each time (on a GPU: slower). CPU runs are deterministic anyway."""
    gc_freq: PositiveInt = 50
    """Steps between Python's garbage collections: at the same steps on all ranks, as one that collects by itself holds
    up all others."""
    num_threads: NonNegativeInt = 0
    """CPU threads of one process. 0: OMP_NUM_THREADS, or else the cores of the machine divided by its processes."""


class TextSource(Section):
    """A place where documents come from."""

    source: Literal["python_stdlib", "jsonl", "text", "parquet", "arrow", "huggingface", "c4", "shards"] = (
        "python_stdlib"
    )
    """python_stdlib: the .py files of the running interpreter's standard library. jsonl: one JSON object a line, also
    .gz and .zst. text: plain UTF-8 files. parquet: files. arrow: a folder that `datasets` saved to disk. huggingface:
    anything that `datasets` loads. c4: the same with allenai/c4, en, streaming. shards: what `titanlite prepare`
    made."""
    path: PathText | None = None
    """File or glob for jsonl, text and parquet, for example "data/*.jsonl"; folder for arrow and shards; id on the
    hub or local folder for huggingface."""
    config: str | None = None
    """huggingface: name of the configuration."""
    split: str = "train"
    """huggingface and arrow: the split."""
    text_column: str = "text"
    """The field that holds the text."""
    streaming: bool = False
    """huggingface: read while training instead of downloading first."""


class DataSource(TextSource):
    """One source of a mix."""

    weight: NonNegativeFloat = 1.0
    """Share of the sequences of a mix, relative to the weights of the other sources."""
    max_epochs: NonNegativeInt = 0
    """The run ends, with a checkpoint, once it has read this source so many times; 0: never. Each rank then tokenizes
    all of the source (nothing to pay for shards), so that all of them know where it ends."""


class DataStage(Section):
    """New weights from some step on, for example to anneal on better data."""

    start_step: NonNegativeInt
    """The first global batch of the stage is the one after this step."""
    weights: Annotated[tuple[NonNegativeFloat, ...], Field(strict=False)]
    """One weight for each of dataset.sources, in their order."""


class Dataset(TextSource):
    """Where the text comes from, and in which order. One source stands here; a mix in [[dataset.sources]]."""

    dropped = {"weight": 1.0}

    max_epochs: NonNegativeInt = 0
    """The run ends, with a checkpoint, once it has read this source so many times; 0: never. Each rank then tokenizes
    all of the source (nothing to pay for shards), so that all of them know where it ends."""
    sources: Annotated[tuple[DataSource, ...], Field(strict=False)] = ()
    """A mix: a table [[dataset.sources]] for each source, instead of the keys of one source here. Job file only."""
    stages: Annotated[tuple[DataStage, ...], Field(strict=False)] = ()
    """Changes of the weights in mid-run: a table [[dataset.stages]] for each. Job file only."""
    seed: Seed | None = None
    """Seed of the data order; left out, it is training.seed."""
    packing: Literal["concat", "best_fit"] = "concat"
    """concat: documents are joined and cut into rows, nothing is lost. best_fit: a document starts and ends in one row
    where it fits, and what rows have left is padding."""
    document_mask: bool = False
    """A token attends to its own document only, positions restart there, and no document predicts the next one."""
    on_change: Literal["error", "warn"] = "error"
    """What a resumed run does whose data is not what it was. warn goes on with the new data where the old one stood."""
    on_bad_record: Literal["error", "skip"] = "error"
    """error: a record that cannot be read (not JSON, no text in it, not UTF-8) ends the run; the steps before it are
    saved. skip: such records are left out; each is named once in the log, and the metrics count them."""
    num_workers: NonNegativeInt = 1
    """Background processes of a rank that read and tokenize; one delivers millions of tokens/s. 0: the trainer
    itself."""
    prefetch: PositiveInt = 2
    """Global batches that each background process may be ahead."""


class ValidationSource(TextSource):
    """One source of a mix to validate on."""

    dropped = {"max_epochs": 0}

    weight: NonNegativeFloat = 1.0
    """Share of the sequences, relative to the weights of the other sources."""


class Validation(TextSource):
    """A loss on data that is never trained on. One source stands here; a mix in [[validation.sources]]."""

    dropped = {
        "weight": 1.0,
        "max_epochs": 0,
        "stages": [],
        "document_mask": False,
        "on_change": "error",
        "num_workers": 1,
        "prefetch": 2,
    }

    freq: NonNegativeInt = 0
    """Steps between two validations; there is one more before the first step and one at the end. 0: none at all."""
    sequences: PositiveInt = 64
    """Rows of training.seq_len tokens in each validation, whatever the number of ranks."""
    holdout: BelowOne = 0.0
    """Above 0: validate on this share of the documents of [dataset], chosen by a hash of each one, and never train on
    them, not even with freq = 0. The keys of the data here are not used then."""
    sources: Annotated[tuple[ValidationSource, ...], Field(strict=False)] = ()
    """A mix: a table [[validation.sources]] for each source, instead of the keys of one source here. Job file only."""
    seed: Seed | None = None
    """Seed of the choice of documents; left out, it is training.seed."""
    packing: Literal["concat", "best_fit"] = "concat"
    """As dataset.packing."""
    on_bad_record: Literal["error", "skip"] = "error"
    """As dataset.on_bad_record."""


class Optimizer(Section):
    """AdamW, with the defaults of the Llama papers."""

    name: Literal["AdamW"] = "AdamW"
    """The algorithm."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    beta1: BelowOne = 0.9
    """Decay of the first moment, a step."""
    beta2: BelowOne = 0.95
    """Decay of the second moment, a step. 0.95 forgets a spike in about 20 steps; 0.999 would take 1,000."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of all matrices; norms are never decayed."""
    decay_embeddings: bool = True
    """Whether weight decay applies to the embedding, too."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """fused is the fastest on CPU and GPU; the others are there to compare with."""
    state_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the two moments. Left out: training.dtype. bfloat16 halves their memory; with a beta above 0.99 it needs
    stochastic_rounding, or moments stop short. Where it is not training.dtype, a GPU compiles the update (see
    compile.components)."""
    stochastic_rounding: bool = False
    """Round what is kept in bfloat16 (training.dtype, state_dtype) up or down by chance, so that small updates are not
    lost. The chance is a function of step and element: the same on any number of ranks and after a restart. A GPU
    compiles the update (see compile.components)."""


class LRScheduler(Section):
    """Warmup, then a stable rate, then decay (WSD): a pure function of the step."""

    warmup_steps: NonNegativeInt | None = None
    """Steps of linear rise from 0 to the peak rate. Left out: 200, or a tenth of the steps if that is less."""
    decay_ratio: Fraction | None = None
    """Share of all steps spent in decay, at the end. Left out: decay starts right after warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """Where decay ends, right after the last step, as a share of the peak rate."""


class Parallelism(Section):
    """How the ranks of the world are laid out."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Number of full replicas (HSDP): shards are gathered within a replica, gradients reduced across replicas."""
    data_parallel_shard_degree: AutoInt = -1
    """Number of ranks that a replica's parameters are sharded over (FSDP2). -1: all that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed after the forward pass. default: yes, except the last group (norm
    and output), which the backward pass needs at once, and blocks so small that all share one group, or on a single
    rank have fewer than 16 times fsdp_min_num_params together."""
    fsdp_min_num_params: NonNegativeInt = 1_000_000
    """Consecutive blocks share an all-gather and a reduction until they have so many parameters, and a model with fewer
    has one of each. 0: each block its own, however small."""
    fsdp_reduce: Literal["step", "microbatch"] = "step"
    """When gradients are reduced. step: with the last microbatch, until which a rank keeps those of all parameters, 4
    bytes each. microbatch: after each one, so that a rank keeps its shard only; as many reductions as microbatches."""
    fsdp_forward_prefetch: NonNegativeInt = 0
    """Groups of blocks whose all-gather is issued ahead of the current one in the forward pass. 0: FSDP's own implicit
    order."""
    fsdp_backward_prefetch: NonNegativeInt = 0
    """The same in the backward pass. 0: FSDP's own implicit prefetch of one group."""
    tensor_parallel_degree: PositiveInt = 1
    """Number of ranks that share every matmul, with sequence parallelism between the matmuls and a loss over shards of
    the vocabulary. Its traffic is on the critical path: keep it within one machine."""
    enable_async_tensor_parallel: bool = False
    """Overlap the traffic of tensor parallelism with its matmuls, through symmetric memory; needs compile and a GPU."""
    context_parallel_degree: PositiveInt = 1
    """Number of ranks that share every row. Each holds one chunk from the front and one from the back, which balances
    causal attention, and gathers keys and values."""
    pipeline_parallel_degree: PositiveInt = 1
    """Number of ranks that the blocks are spread over. The microbatches of a step (global_batch_size / data-parallel
    degree / local_batch_size) flow through them."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Order of forward and backward passes. 1F1B and GPipe have one stage a rank, the others two, or as many as
    pipeline_parallel_split_points say. The zero bubble schedules delay the gradients of weights."""
    pipeline_parallel_split_points: Names = ()
    """First block of each stage but the first, such as ["layers.4", "layers.8"]. Empty: stages of equal cost, the
    embedding and the output counted."""


class ActivationCheckpoint(Section):
    """Trade recomputation for activation memory."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """none: save all. full: save only each block's input. selective: see selective_ac_option. memory_budget: let
    the compiler choose; needs compile.enable."""
    selective_ac_option: Annotated[str, Field(pattern=r"^(op|[1-9][0-9]*)$")] = "op"
    """op: save attention and every second matmul, recompute the rest. A number n: checkpoint every n-th block."""
    memory_budget: Fraction = 0.5
    """memory_budget: share of the activation memory that may be kept; 0 is full recomputation, 1 none."""


class Compile(Section):
    """torch.compile."""

    enable: bool = False
    """Compile the listed components; the first step then takes half a minute or more."""
    components: Annotated[tuple[Literal["model", "loss", "optimizer", "clip"], ...], Field(strict=False)] = (
        "model",
        "loss",
    )
    """model: each transformer block (one compilation serves all of them), and the cast of weights before an FP8
    all-gather. loss: softmax and gradient of the loss. optimizer: the update of a tensor by titanlite's own AdamW in
    place of torch's fused one. clip: the gradient norm. On a GPU the own AdamW, which optimizer.stochastic_rounding and
    optimizer.state_dtype need, is compiled even where enable is false: it would be 72 kernels a tensor."""


class Float8(Section):
    """FP8 matmuls by torchao's Float8Linear."""

    enable: bool = False
    """Convert the linear layers."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale a tensor (fastest), one a row (more accurate), or one a row with the weight gradient in high
    precision."""
    enable_fsdp_float8_all_gather: bool = False
    """All-gather weights in FP8: half the traffic of bfloat16. tensorwise only."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights in one all-reduce after the optimizer step; needs the FP8 all-gather."""
    min_features: NonNegativeInt = 1024
    """Layers with fewer inputs or outputs stay in high precision: casting their tensors costs about what the faster
    matmul gains. 0 converts all."""
    filter_fqns: Names = ()
    """Layers whose name contains one of these stay in high precision. The output projection always does: it is
    sensitive, and its logits are never all there at once."""
    emulate: bool = False
    """Compute FP8 in high precision, for hardware without it. Chosen by itself, with a note, where there is none."""


class Checkpoint(Section):
    """Saving and resuming."""

    enable: bool = True
    """Save at the interval and at the end, and resume from the newest checkpoint at start."""
    folder: PathText = "checkpoint"
    """Folder of the checkpoints inside job.dump_folder."""
    interval: PositiveInt = 500
    """Steps between saves: what a crash can cost at most."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem", "process"] = "disabled"
    """disabled: training stops while a checkpoint is written. async: it stops only for a copy to host memory (one more
    copy of weights and optimizer state), and a thread writes. async_with_pinned_mem: that copy, too, runs beside the
    next step; needs a GPU. process: another process writes, so that Python's lock is not shared with what writes."""
    keep_latest_k: NonNegativeInt = 10
    """Older checkpoints are removed after a save; 0 keeps all."""
    keep_every_n_steps: NonNegativeInt = 0
    """Checkpoints whose step is a multiple of this are kept for good, beside keep_latest_k. 0: none is."""
    load_step: Annotated[int, Field(ge=-1)] = -1
    """Go back to this step once; later checkpoints are renamed, and a start with the same value resumes from what was
    saved since. -1: resume from the newest."""
    exclude_from_loading: Annotated[tuple[Literal["optimizer", "data", "rng"], ...], Field(strict=False)] = ()
    """Parts of a checkpoint that a resume starts afresh: the optimizer's state, the place in the data, the random
    state. Once: what was saved with the same value is loaded whole."""
    initial_load_path: PathText | None = None
    """Checkpoint whose weights a new run starts from, at step 0: a step folder, the folder of all, or a run's output
    folder. Only read where there is nothing to resume."""
    initial_load_in_hf: bool = False
    """initial_load_path is a Hugging Face folder; each rank reads only its own slices of the .safetensors files."""
    last_save_model_only: bool = False
    """The save after the last step holds weights only, a third of the size, and goes to `final` beside the folder, so
    that nothing resumes from it."""
    last_save_in_hf: bool = False
    """After the last step, also write `final_hf` beside the folder, which transformers loads."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights in `final_hf`. float32 is exact; bfloat16 halves the size."""
    create_seed_checkpoint: bool = False
    """Save the initial state as step 0 and stop."""
    timeout_seconds: PositiveInt = 1800
    """Longest wait for the slowest rank in a save, a load or an export. One that takes longer is lost or hangs."""


class Metrics(Section):
    """What is measured and where it goes."""

    log_freq: PositiveInt = 10
    """Steps between two log lines. Each one makes the host wait for the device once."""
    enable_tensorboard: bool = True
    """Write TensorBoard files to <dump_folder>/tb."""


class Comm(Section):
    """Process groups."""

    init_timeout_seconds: PositiveInt = 300
    """Longest wait for all ranks to appear, and for any collective of the first step, in which kernels are compiled."""
    train_timeout_seconds: PositiveInt = 100
    """The same for every later step. A collective that takes longer means that a rank is lost or hangs."""
    preemption_seconds: PositiveInt = 3600
    """Time that ranks get to finish their step and save once a signal asked them to stop; then they are killed. A
    scheduler that kills by itself needs no less; an hour suits the largest checkpoints."""


class JobConfig(Section):
    """One training run.

    Raises:
        WrongJob: values that are not allowed, all of them in one message.
    """

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
    comm: Comm = Comm()

    @model_validator(mode="wrap")
    @classmethod
    def _in_words(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as failure:
            raise WrongJob(mistakes(cls, failure)) from None
