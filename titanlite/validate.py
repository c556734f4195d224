"""Rules that span keys, the world size and files on disk.

Invariant: everything that can be known wrong before the start is reported at once, in a fraction of a second, before
torch is imported or a folder is made.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from titanlite.config.errors import UserError
from titanlite.config.files import not_writable
from titanlite.config.load import COMMAND_LINE, read_job, resolve_path, with_folder
from titanlite.config.mistakes import block, report, shown
from titanlite.config.schema import Dataset, DataSource, JobConfig, TextSource, Validation
from titanlite.data.sources import find_files
from titanlite.data.tokenizer import read_vocab_size
from titanlite.model.flavors import FLAVORS, Architecture, architecture, fit_vocabulary
from titanlite.observe.outputs import FILES
from titanlite.parallel.constraints import divisors, fills_world, layout_problems, nearest
from titanlite.parallel.layout import degrees


@dataclass(frozen=True)
class Context:
    """What rules look at.

    Attributes:
        arch: The architecture, or None if the flavor or a field of it is wrong.
        world_size: Number of ranks.
        origins: "section.key" -> where the value was set; defaults are absent.
    """

    job: JobConfig
    arch: Architecture | None
    world_size: int
    origins: Mapping[str, str] = field(default_factory=dict)

    def wrong(self, key: str, *sentences: str) -> str:
        """The report's block about a key: where it was set, its value (or the flavor's), the text."""
        section, name = key.split(".")
        value = getattr(getattr(self.job, section), name)
        origin = self.origin(key)
        if section == "model" and key not in self.origins and self.arch is not None and name != "flavor":
            value, origin = getattr(self.arch, name), f"flavor {self.job.model.flavor}"
        return block(origin, f"{key} = {shown(value)}", *sentences)

    def origin(self, *keys: str) -> str:
        """Where the first of `keys` that was set was set; else the job file, which leaves them at their defaults."""
        default = f"{self.job.job.config_file or 'JobConfig'} (default)"
        return next((self.origins[key] for key in keys if key in self.origins), default)


Rule = Callable[[Context], Iterator[str]]
RULES: list[tuple[tuple[str, ...], Rule]] = []


def rule(*keys: str) -> Callable[[Rule], Rule]:
    """Register a rule over `keys`. It is skipped where one of them is invalid; "model" stands for a whole section."""

    def register(check: Rule) -> Rule:
        RULES.append((keys, check))
        return check

    return register


def load_and_check(argv: Sequence[str], world_size: int) -> JobConfig:
    """The job of a command line, checked by the schema and by the rules below.

    Raises:
        UserError: anything wrong, all mistakes in one message.
    """
    draft = read_job(argv)
    job = complete(draft.job)
    errors = draft.errors + check_job(job, world_size, draft.invalid, draft.origins)
    if errors:
        raise UserError(report(errors))
    return job


def checked(job: JobConfig, world_size: int) -> JobConfig:
    """A job that was made in Python, checked as one of a command line is, and completed.

    Raises:
        UserError: wrong values, such as `model_copy(update=...)` lets in, or rules that the job breaks; all in one
            message.
    """
    job = with_folder(JobConfig.model_validate(job))
    set_keys = {f"{name}.{key}": "JobConfig" for name, section in job for key in section.model_fields_set}
    job = complete(job)
    if errors := check_job(job, world_size, origins=set_keys):
        raise UserError(report(errors))
    return job


def world_size() -> int:
    """Ranks of the world that a launcher's environment describes; 1 without it.

    Raises:
        UserError: WORLD_SIZE, or a rank in that world, is no such number.
    """
    size = _variable("WORLD_SIZE", 1)
    local_size = _variable("LOCAL_WORLD_SIZE", 1, size)
    _variable("RANK", 0, size - 1)
    _variable("LOCAL_RANK", 0, local_size - 1)
    return size


def _variable(name: str, least: int, most: int | None = None) -> int:
    """The number in an environment variable that launchers set; `least` without it."""
    text = os.environ.get(name, str(least))
    if not (text.isdecimal() and text.isascii() and least <= int(text) <= (int(text) if most is None else most)):
        upper = "" if most is None else f" and at most {most}"
        raise UserError(f'{name} "{text}": a whole number of at least {least}{upper} is allowed. A launcher sets it.')
    return int(text)


def complete(job: JobConfig) -> JobConfig:
    """`job` with what the files that it names decide, the size of the vocabulary; a complete job as it is."""
    try:
        size = _vocabulary(job)
    except UserError:  # tokenizer_file reports it
        return job
    return job.model_copy(update={"model": fit_vocabulary(job.model, size)})


def _vocabulary(job: JobConfig) -> int:
    """Ids of the job's tokenizer. Raises UserError."""
    path = resolve_path(job.tokenizer.path)
    with suppress(OSError):  # read_vocab_size reports it
        return _read_vocabulary(path, path.stat().st_mtime_ns)
    return read_vocab_size(path)


@lru_cache(maxsize=1)
def _read_vocabulary(path: Path, _changed: int) -> int:
    return read_vocab_size(path)


def check_job(
    job: JobConfig,
    world_size: int,
    invalid: Collection[str] = frozenset(),
    origins: Mapping[str, str] | None = None,
) -> list[str]:
    """One block of text for each broken rule; none if the job can run on `world_size` ranks.

    Args:
        invalid: Keys of `job` whose value is a stand-in, because what the user wrote was reported already.
        origins: "section.key" -> where its value was set.
    """
    arch = architecture(job.model) if job.model.flavor in FLAVORS else None
    context = Context(job, arch, world_size, origins or {})
    errors: list[str] = []
    for keys, check in RULES:
        needs_architecture = "model" in keys
        if needs_architecture and arch is None:
            continue
        if not any(key in keys or key.split(".")[0] in keys for key in invalid):
            errors += check(context)
    return errors


# --------------------------------------------------------------------------------------------------------------- model


@rule("model.flavor")
def known_flavor(context: Context) -> Iterator[str]:
    flavor = context.job.model.flavor
    if flavor not in FLAVORS:
        near = difflib.get_close_matches(flavor.lower(), FLAVORS, n=1)
        hint = f"Did you mean {shown(near[0])}?" if near else ""
        yield context.wrong("model.flavor", f"must be one of {', '.join(FLAVORS)}.", hint)


@rule("model")
def heads(context: Context) -> Iterator[str]:
    arch = context.arch
    assert arch is not None
    if arch.dim % arch.n_heads:
        near = _nearest_divisors(arch.dim, arch.n_heads)
        yield context.wrong("model.n_heads", f"must divide model.dim = {arch.dim}. Near ones that do: {near}.")
    elif arch.head_dim % 2:
        text = f"gives heads of width {arch.head_dim} at model.dim = {arch.dim}; rotary embeddings need an even width."
        even = [n for n in divisors(arch.dim) if arch.dim // n % 2 == 0]
        remedy = f"Choose one of {', '.join(map(str, even))}." if even else "Choose an even model.dim."
        yield context.wrong("model.n_heads", text, remedy)
    elif arch.n_heads % arch.n_kv_heads:
        near = _nearest_divisors(arch.n_heads, arch.n_kv_heads)
        text = f"must divide model.n_heads = {arch.n_heads}. Near ones that do: {near}."
        yield context.wrong("model.n_kv_heads", text)


@rule("model")
def rope_factors(context: Context) -> Iterator[str]:
    arch = context.arch
    assert arch is not None
    if arch.rope_scaling_factor > 1 and arch.rope_low_freq_factor >= arch.rope_high_freq_factor:
        text = f"must be less than model.rope_high_freq_factor = {arch.rope_high_freq_factor}: frequencies between "
        yield context.wrong("model.rope_low_freq_factor", text + "the two are blended. Llama 3.1 has 1 and 4.")


@rule("model", "training.seq_len")
def sequence_fits_model(context: Context) -> Iterator[str]:
    arch = context.arch
    assert arch is not None
    if context.job.training.seq_len > arch.max_seq_len:
        text = f"must be at most model.max_seq_len = {arch.max_seq_len} (flavor {context.job.model.flavor})."
        yield context.wrong("training.seq_len", text, "Shorten it, or raise model.max_seq_len.")


# ------------------------------------------------------------------------------------------------------ tokenizer, data


@rule("tokenizer.path")
def tokenizer_file(context: Context) -> Iterator[str]:
    path = resolve_path(context.job.tokenizer.path)
    if not path.exists():
        yield context.wrong(
            "tokenizer.path",
            f"there is no such file in the current folder or in {path.parent}.",
            "Place a tiktoken-format tokenizer.model or a Hugging Face tokenizer.json there, or leave the key out: the "
            "default tokenizer comes with titanlite.",
        )
        return
    try:
        _vocabulary(context.job)
    except UserError as error:
        yield context.wrong("tokenizer.path", f"{error}")


@rule("tokenizer.path", "model")
def vocabulary_fits_model(context: Context) -> Iterator[str]:
    assert context.arch is not None
    try:
        size = _vocabulary(context.job)
    except UserError:
        return  # tokenizer_file reports it
    if size > context.arch.vocab_size:
        text = f"must be at least {size}, the vocabulary of {context.job.tokenizer.path}."
        yield context.wrong("model.vocab_size", text, "Raise it, or choose a smaller tokenizer with tokenizer.path.")


@rule("dataset")
def dataset_files(context: Context) -> Iterator[str]:
    yield from _check_sources(context, "dataset", context.job.dataset)


@rule("validation")
def validation_data(context: Context) -> Iterator[str]:
    validation = context.job.validation
    if validation.freq > 0 and validation.holdout == 0:
        if validation.sources or "validation.source" in context.origins:
            yield from _check_sources(context, "validation", validation)
        else:
            text = "needs something to validate on: a share of the training data, such as validation.holdout = 0.01, "
            yield context.wrong("validation.freq", text + "or a validation.source of its own.")
    keys = [*_source_keys(context, "validation"), *["validation.sources"] * bool(validation.sources)]
    if validation.freq == 0 and "validation.freq" not in context.origins:  # 0 in writing is meant
        for key in ["validation.holdout"] if validation.holdout > 0 else keys[:1]:
            text = (
                "is for a validation that never comes: validation.freq is left out, which means 0. Set both, or none."
            )
            yield context.wrong(key, text)
    if validation.holdout > 0:
        for key in keys:
            yield context.wrong(key, "is not used beside validation.holdout, which reads [dataset]. Set one of them.")


def _source_keys(context: Context, section: str) -> list[str]:
    """Keys of one source that were set. A resolved job file names each key: there, a default counts as left out."""
    values, fields = getattr(context.job, section), type(getattr(context.job, section)).model_fields
    names = [name for name in DataSource.model_fields if name in fields]
    keys = {f"{section}.{name}": getattr(values, name) != fields[name].default for name in names}
    return [key for key, differs in keys.items() if differs or context.origins.get(key) == COMMAND_LINE]


def _check_sources(context: Context, section: str, dataset: Dataset | Validation) -> Iterator[str]:
    for key in _source_keys(context, section) if dataset.sources else ():
        yield context.wrong(key, f"is not used beside [[{section}.sources]]. Write it into each table that it is for.")
    for number, source in enumerate(dataset.sources or (dataset,)):
        key = f"{section}.sources.{number}" if dataset.sources else section
        keys = [f"{section}.sources"] if dataset.sources else [f"{section}.path", f"{section}.source"]
        origin = context.origin(*keys)
        problem = _source_problem(source)
        if problem:
            yield block(origin, f"{key}.source = {shown(source.source)}", problem.replace("dataset.", f"{key}.", 1))
    weights = {f"{section}.sources.*.weight": [source.weight for source in dataset.sources] or [1.0]}
    for number, stage in enumerate(dataset.stages if isinstance(dataset, Dataset) else ()):
        weights[key := f"{section}.stages.{number}.weights"] = list(stage.weights)
        if len(stage.weights) != len(dataset.sources):
            text = f"must have {len(dataset.sources)} weights, one for each of {section}.sources."
            yield block(context.origin(f"{section}.stages"), f"{key} = {shown(stage.weights)}", text)
    for key, values in weights.items():
        if not any(values):
            origin = context.origin(".".join(key.split(".")[:2]))
            yield block(origin, f"{key} = {shown(values)}", "are all 0; at least one source needs a weight above 0.")


# Of each key that not all sources read, those that do. A job file often stays as it is once its text is prepared.
_USERS = {
    "path": ("jsonl", "text", "parquet", "arrow", "shards", "huggingface"),
    "config": ("huggingface", "c4", "shards"),
    "split": ("huggingface", "c4", "arrow", "shards"),
    "streaming": ("huggingface", "c4", "shards"),
}


def _source_problem(source: TextSource) -> str | None:
    """What is wrong with a source's keys, or about the place that its documents come from."""
    for name, users in _USERS.items():
        if source.source not in users and getattr(source, name) != TextSource.model_fields[name].default:
            return f"{name} is not used by this source: name another source, or leave {name} out."
    try:
        find_files(source)
    except UserError as error:
        return f"{error}."
    return None


@rule("dataset.stages", "training.steps")
def stages_run(context: Context) -> Iterator[str]:
    steps, starts = context.job.training.steps, [stage.start_step for stage in context.job.dataset.stages]
    cut_short = context.origins.get("training.steps") == COMMAND_LINE
    for number, start in enumerate(starts):
        late, found = start >= steps and not cut_short, f"dataset.stages.{number}.start_step = {start}"
        if late or start in starts[:number]:
            text = f"must be less than training.steps = {steps}" if late else "is that of an earlier stage, too"
            yield block(context.origin("dataset.stages"), found, f"{text}: a stage would never run.")


@rule("job.dump_folder", "checkpoint.folder")
def output_folders(context: Context) -> Iterator[str]:
    run = Path(context.job.job.dump_folder).absolute()
    problems = {"job.dump_folder": not_writable(run) or _wrong_kind(run)}
    if context.job.checkpoint.enable:
        problems["checkpoint.folder"] = not_writable(Path(os.path.normpath(run / context.job.checkpoint.folder)))
    if problems["job.dump_folder"]:
        problems.pop("checkpoint.folder", None)
    for key, problem in problems.items():
        if problem:
            yield context.wrong(key, problem)


def _wrong_kind(run: Path) -> str | None:
    """Which output of a run a folder or a file is in the way of."""
    for name in FILES:
        path = run / name
        if os.path.exists(path) and os.path.isdir(path) != (name == "tb"):
            return f"{path} is {'a file' if name == 'tb' else 'a folder'}, where a run writes its own. Move it away."
    return None


@rule("checkpoint", "job.dump_folder")
def initial_weights(context: Context) -> Iterator[str]:
    checkpoint = context.job.checkpoint
    folder, origin = Path(context.job.job.dump_folder, checkpoint.folder), checkpoint.initial_load_path or "."
    resumes = os.path.isdir(folder) and any(folder.glob("step-*"))  # then nothing is read there
    if checkpoint.enable and not resumes and not os.path.isdir(origin):
        found = "is a file" if os.path.exists(origin) else "does not exist"
        yield context.wrong("checkpoint.initial_load_path", f"{found}; a folder of a checkpoint is needed.")
    if checkpoint.initial_load_in_hf and checkpoint.initial_load_path is None:
        text = "says how to read checkpoint.initial_load_path, which is left out. Set both, or none."
        yield context.wrong("checkpoint.initial_load_in_hf", text)


@rule("checkpoint.folder")
def checkpoint_folder(context: Context) -> Iterator[str]:
    if os.path.normpath(context.job.checkpoint.folder) in (".", "final", "final_hf", *FILES):
        text = "is where a run writes other outputs. Choose a folder for the checkpoints alone, such as checkpoint."
        yield context.wrong("checkpoint.folder", text)
    elif context.job.checkpoint.folder.endswith((".toml", ".json", ".jsonl", ".log")):
        yield context.wrong("checkpoint.folder", "is the name of a file; a folder appears there. Leave the suffix out.")


# -------------------------------------------------------------------------------------------------------------- layout


@rule("parallelism")
def layout_fills_world(context: Context) -> Iterator[str]:
    for problem in fills_world(context.job.parallelism, context.world_size):
        yield context.wrong(*problem)


@rule("parallelism", "model", "training", "compile", "float8")
def layout_works(context: Context) -> Iterator[str]:
    assert context.arch is not None
    if any(layout_fills_world(context)) or any(batch_divides(context)):
        return
    for problem in layout_problems(context.job, context.arch, context.world_size):
        yield context.wrong(*problem)


@rule("training.local_batch_size", "training.global_batch_size", "parallelism")
def batch_divides(context: Context) -> Iterator[str]:
    training = context.job.training
    if training.global_batch_size == -1 or any(layout_fills_world(context)):
        return
    data = degrees(context.job.parallelism, context.world_size).data
    rows = training.local_batch_size * data
    if training.global_batch_size % rows:
        low = training.global_batch_size // rows * rows
        near = f"{low} or {low + rows}" if low else f"{rows}"
        text = f"must be a multiple of local_batch_size = {training.local_batch_size} times the data-parallel degree = "
        yield context.wrong("training.global_batch_size", f"{text}{data}, which is {rows}.", f"Nearest: {near}.")


# -------------------------------------------------------------------------------------------------- schedule and memory


@rule("training.steps", "lr_scheduler.warmup_steps")
def warmup_ends(context: Context) -> Iterator[str]:
    steps, warmup = context.job.training.steps, context.job.lr_scheduler.warmup_steps
    # Cutting a run short from the command line is a way to look at its first steps: the rates stay those of the file.
    cut_short = context.origins.get("training.steps") == COMMAND_LINE
    cut_short = cut_short and context.origins.get("lr_scheduler.warmup_steps") != COMMAND_LINE
    if warmup is not None and warmup > steps and not cut_short:
        text = f"must be at most training.steps = {steps}, or the peak rate is never reached."
        yield context.wrong(
            "lr_scheduler.warmup_steps", text, f"Usual is {max(1, steps // 50)} to {max(1, steps // 10)}."
        )


@rule("activation_checkpoint.mode", "compile.enable", "compile.components")
def memory_budget_compiles(context: Context) -> Iterator[str]:
    compiled = context.job.compile.enable and "model" in context.job.compile.components
    if context.job.activation_checkpoint.mode == "memory_budget" and not compiled:
        text = 'is decided by the compiler: set compile.enable = true with "model" in compile.components, or choose '
        yield context.wrong("activation_checkpoint.mode", text + "another mode (none, selective, full).")


@rule("activation_checkpoint", "model")
def selects_a_block(context: Context) -> Iterator[str]:
    checkpoint, arch = context.job.activation_checkpoint, context.arch
    assert arch is not None
    every = checkpoint.selective_ac_option
    if checkpoint.mode == "selective" and every.isdecimal() and int(every) > arch.n_layers:
        text = f"must be at most model.n_layers = {arch.n_layers}, or no block is checkpointed; mode none says so."
        yield context.wrong("activation_checkpoint.selective_ac_option", text)


# ---------------------------------------------------------------------------------------------------------- optimizer


@rule("optimizer", "training", "compile")
def optimizer_fits(context: Context) -> Iterator[str]:
    optimizer, training, compile = context.job.optimizer, context.job.training, context.job.compile
    state = optimizer.state_dtype or training.dtype
    if optimizer.stochastic_rounding and "bfloat16" not in (state, training.dtype):
        text = f'rounds nothing: training.dtype is "{training.dtype}" and optimizer.state_dtype "{state}". '
        yield context.wrong("optimizer.stochastic_rounding", text + 'Set one to "bfloat16".')
    compiled = compile.enable and "optimizer" in compile.components
    own = optimizer.stochastic_rounding or state != training.dtype or compiled
    if own and optimizer.implementation != "fused":
        text = "is one of torch's, which know no stochastic_rounding, state_dtype or compilation. "
        yield context.wrong("optimizer.implementation", text + 'Leave it at "fused".')


@rule("optimizer", "training")
def moments_move(context: Context) -> Iterator[str]:
    """bfloat16 rounds a change below 2^-8 of a value away; of a moment, each step changes what it is off by 1 - beta.
    At 1 - beta = 0.01 a moment may stop 0.72 to 1.64 times where it should, at 0.004 it never falls again."""
    optimizer, rounded = context.job.optimizer, 2.0**-8
    if (optimizer.state_dtype or context.job.training.dtype) == "float32" or optimizer.stochastic_rounding:
        return
    for key in ("beta1", "beta2"):
        beta = getattr(optimizer, key)
        if beta > 0.99:
            change, least = 1 - beta, 1 / (1 + rounded / (1 - beta))
            text = f"changes a moment by {change:.2g} of what it is off, and bfloat16, in which it is kept, rounds "
            text += f"changes below 2^-8 = {rounded:.2g} of its value away: it can stop at {least:.2f} of what it "
            text += "should be" + (", and never falls. " if change <= rounded else ". ")
            remedy = f"Set optimizer.stochastic_rounding = true, optimizer.{key} to 0.99 or less, or "
            yield context.wrong(f"optimizer.{key}", text, remedy + 'optimizer.state_dtype = "float32".')


# ------------------------------------------------------------------------------------------------------------- float8


@rule("float8")
def float8_all_gather(context: Context) -> Iterator[str]:
    float8 = context.job.float8
    if not float8.enable:
        return
    if float8.enable_fsdp_float8_all_gather and float8.recipe_name != "tensorwise":
        text = f'needs float8.recipe_name = "tensorwise"; it is "{float8.recipe_name}". A row\'s scale is not known to '
        yield context.wrong("float8.enable_fsdp_float8_all_gather", text + "the rank that gathers it.")
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        text = "needs float8.enable_fsdp_float8_all_gather = true: the scales are for the gathered weights."
        yield context.wrong("float8.precompute_float8_dynamic_scale_for_fsdp", text)


@rule("float8", "model")
def float8_sizes(context: Context) -> Iterator[str]:
    arch, float8 = context.arch, context.job.float8
    assert arch is not None
    if not float8.enable:
        return
    sizes = {"wq, wk, wv, wo": {"dim": arch.dim, "n_kv_heads": arch.n_kv_heads * arch.head_dim}}
    sizes |= {"w1, w2, w3": {"dim": arch.dim, "ffn_dim": arch.ffn_dim}}
    if arch.dim < float8.min_features:
        text = f"converts no layer: model.dim = {arch.dim} is less than float8.min_features = {float8.min_features}, "
        remedy = "Set float8.min_features = 0 to convert all, or float8.enable = false."
        yield context.wrong("float8.enable", text + "below which FP8 gains nothing.", remedy)
        return
    odd = {
        key: (size, layers)
        for layers, keys in sizes.items()
        if min(keys.values()) >= float8.min_features
        for key, size in keys.items()
        if size % 16
    }
    for key, (size, layers) in odd.items():
        text = f"gives the layers {layers} a side of {size}; an FP8 matmul takes multiples of 16."
        yield context.wrong(f"model.{key}", text, "Change it, or set float8.enable = false.")
    training = context.job.training
    tokens = training.local_batch_size * training.seq_len // context.job.parallelism.context_parallel_degree
    if tokens % 16 and float8.recipe_name != "rowwise_with_gw_hp":  # which multiplies no gradient of a weight in FP8
        text = f"with training.local_batch_size = {training.local_batch_size} gives {tokens} tokens at a time; "
        remedy = "Change one of them, or set float8.enable = false."
        yield context.wrong("training.seq_len", text + "an FP8 matmul takes multiples of 16.", remedy)


def _nearest_divisors(number: int, to: int) -> str:
    return " and ".join(map(str, nearest(divisors(number), to)))
