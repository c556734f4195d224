"""Rules that span several keys or need the world size. Each says the key, its value, what is wrong, and what to do.

Invariant: no torch and no file here. `titanlite.load_run` adds the rules about files, and reports all of them together.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from titanlite.config.flavors import FLAVORS
from titanlite.config.layout import ONE_STAGE_A_RANK, SPLIT_BACKWARD, V_SHAPED, sequence_divisor
from titanlite.config.load import COMMAND_LINE
from titanlite.config.mistakes import block, shown
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig

Problem = tuple[str, ...]
"""A key, such as "training.steps" or "dataset.sources.0.weight", and the sentences about its value."""


@dataclass(frozen=True)
class Context:
    """What the rules read.

    Attributes:
        run: The job on its ranks. It may be invalid.
        origins: "section.key" -> where the value was set. Keys with their default are absent.
    """

    run: Run
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def job(self) -> JobConfig:
        return self.run.job

    def wrong(self, key: str, *sentences: str) -> str:
        """The block of the report about a key: where it was set, its value (or the flavor's), and the text."""
        section, name, *_ = key.split(".")
        value: Any = self.job.model_dump(mode="json")
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        origin = self.origins.get(f"{section}.{name}", f"{self.job.job.config_file or 'JobConfig'} (default)")
        if section == "model" and value is None:
            value, origin = getattr(self.run.arch, name), f"flavor {self.job.model.flavor}"
        return block(origin, f"{key} = {shown(value)}", *sentences)

    def is_set(self, key: str) -> bool:
        """Whether the file or the command line has the key."""
        return key in self.origins


Rule = Callable[[Context], Iterator[Problem]]
RULES: list[tuple[tuple[str, ...], Rule]] = []


def rule(*keys: str) -> Callable[[Rule], Rule]:
    """Registers a rule that reads `keys`. It is skipped if one of them is invalid. A name such as "model" is a whole
    section."""

    def register(check: Rule) -> Rule:
        RULES.append((keys, check))
        return check

    return register


def broken_rules(context: Context, invalid: Collection[str] = frozenset()) -> list[str]:
    """One block of text for each mistake.

    Args:
        invalid: Keys whose value is a default, because what the user wrote has been reported already.
    """
    errors: list[str] = []
    flavor = context.job.model.flavor
    if flavor not in FLAVORS:
        near = difflib.get_close_matches(flavor.lower(), FLAVORS, n=1)
        hint = f"Did you mean {shown(near[0])}?" if near else ""
        errors.append(context.wrong("model.flavor", f"must be one of {', '.join(FLAVORS)}.", hint))
        invalid = {*invalid, "model.flavor"}
    unread = {*invalid, *(key.split(".")[0] for key in invalid)}  # a rule that reads a section reads all of its keys
    for keys, check in RULES:
        if not unread.intersection(keys):
            errors += [context.wrong(*problem) for problem in check(context)]
    return errors


# --------------------------------------------------------------------------------------------------------------- model


@rule("model", "training.seq_len")
def model(context: Context) -> Iterator[Problem]:
    arch = context.run.arch
    if arch.dim % arch.n_heads or arch.head_dim % 2:
        near = _near((n for n in _divisors(arch.dim) if arch.dim // n % 2 == 0), arch.n_heads)
        yield "model.n_heads", f"must divide model.dim = {arch.dim} into heads of an even width. Near ones: {near}."
    elif arch.n_heads % arch.n_kv_heads:
        near = _near(_divisors(arch.n_heads), arch.n_kv_heads)
        yield "model.n_kv_heads", f"must divide model.n_heads = {arch.n_heads}. Near ones that do: {near}."
    if arch.rope_scaling_factor > 1 and arch.rope_low_freq_factor >= arch.rope_high_freq_factor:
        text = f"must be less than model.rope_high_freq_factor = {arch.rope_high_freq_factor}. Llama 3.1 has 1 and 4."
        yield "model.rope_low_freq_factor", text
    if context.job.training.seq_len > arch.max_seq_len:
        yield "training.seq_len", f"must be at most model.max_seq_len = {arch.max_seq_len}. Change one of them."


# -------------------------------------------------------------------------------------------------------------- layout


@rule("parallelism", "model", "training", "compile", "float8", "activation_checkpoint")
def layout(context: Context) -> Iterator[Problem]:
    yield from layout_problems(context.run)


def layout_problems(run: Run) -> list[Problem]:
    """What is wrong with the degrees of a run. Those of later steps are not looked for where the degrees do not fill
    the world or the batch cannot be divided."""
    problems = list(_world(run)) or list(_batch(run))
    return problems or [*_tensor(run), *_sequence(run), *_pipeline(run)]


def _world(run: Run) -> Iterator[Problem]:
    """The degrees must multiply to the number of ranks."""
    config, degree, world = run.job.parallelism, run.degrees, run.world_size
    names = ("data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel")
    named = {f"{name}_degree": getattr(config, f"{name}_degree") for name in names}
    others = degree.world // degree.shard
    product = " times ".join(f"{name} = {value}" for name, value in named.items() if value > 1)
    product = product or "data_parallel_replicate_degree = 1"
    here = f"The world is {world} rank{'s' if world > 1 else ''} (NGPU times NNODES)."
    if config.data_parallel_shard_degree == -1 and world % others:
        worst = max(named, key=lambda name: (world % named[name] != 0, named[name]))
        text = f"does not fit: {product} is {others}, which must divide the number of ranks."
        yield f"parallelism.{worst}", f"{text} {here} Start {others} ranks, or a multiple of that."
    elif degree.world != world:
        fits = f" or {world // others}" if world % others == 0 else ""
        text = f"times {product} is {degree.world}. {here} Set it to -1 (all that are left){fits}, or start "
        yield "parallelism.data_parallel_shard_degree", f"{text}{degree.world} ranks."


def _batch(run: Run) -> Iterator[Problem]:
    """A global batch consists of whole microbatches of each data-parallel rank."""
    size, local, data = run.global_batch_size, run.job.training.local_batch_size, run.degrees.data
    if size % (local * data):
        text = f"must be a multiple of local_batch_size = {local} times the data-parallel degree = {data}. "
        yield "training.global_batch_size", f"{text}Nearest: {_multiples(size, local * data)}."


def _tensor(run: Run) -> Iterator[Problem]:
    """Each rank needs whole heads, an equal part of the feed-forward network, and at least one row of the
    vocabulary."""
    job, arch, tensor = run.job, run.arch, run.degrees.tensor

    def works(n: int) -> bool:
        part = -(-arch.vocab_size // n)
        return arch.n_kv_heads % n == 0 and arch.ffn_dim % n == 0 and part * (n - 1) < arch.vocab_size

    if not works(tensor):
        text = f"must divide model.n_kv_heads = {arch.n_kv_heads} and model.ffn_dim = {arch.ffn_dim}."
        near = _near(filter(works, range(1, arch.n_kv_heads + 1)), tensor)
        yield "parallelism.tensor_parallel_degree", f"{text} Nearest: {near}."
    elif job.float8.enable and tensor > 1 and any(n // tensor % 16 for n in (arch.kv_dim, arch.dim, arch.ffn_dim)):
        text = "leaves a rank a side that is no multiple of 16, which an FP8 matmul needs."
        yield "parallelism.tensor_parallel_degree", text, "Nearest: a lower one, or float8.enable = false."
    if job.parallelism.enable_async_tensor_parallel and (tensor == 1 or not run.compiles("model")):
        text = 'needs tensor_parallel_degree > 1, and compile.enable = true with "model" in compile.components.'
        yield "parallelism.enable_async_tensor_parallel", text


def _sequence(run: Run) -> Iterator[Problem]:
    """Tensor and context ranks divide each row."""
    degree, length, divisor = run.degrees, run.job.training.seq_len, sequence_divisor(run.degrees)
    if length % divisor:
        text = (
            f"must be a multiple of {divisor}, because context and tensor ranks ({degree.context} and {degree.tensor}) "
        )
        yield "training.seq_len", f"{text}cut rows. Nearest: {_multiples(length, divisor)}."


def _pipeline(run: Run) -> Iterator[Problem]:
    """Each stage needs a block, the split points must be valid, and there must be enough microbatches."""
    job, config, layers, ranks = run.job, run.job.parallelism, run.arch.n_layers, run.degrees.pipeline
    schedule, points = config.pipeline_parallel_schedule, config.pipeline_parallel_split_points
    key, stages = "parallelism.pipeline_parallel_split_points", len(points) + 1
    if ranks == 1:
        if points:
            yield key, "needs pipeline_parallel_degree > 1."
        return
    cuts = [int(point.removeprefix("layers.")) for point in points if re.fullmatch(r"layers\.\d{1,9}", point)]
    a_rank = 1 if schedule in ONE_STAGE_A_RANK else 2
    if len(cuts) < len(points) or any(a >= b for a, b in pairwise([0, *cuts, layers])):
        text = 'must name the first block of each stage but the first, such as ["layers.4", "layers.8"], rising to at '
        yield key, f"{text}most layers.{layers - 1}."
    elif points and (stages % ranks or (schedule in (*ONE_STAGE_A_RANK, *V_SHAPED) and stages != a_rank * ranks)):
        text = f"gives {stages} stages; {schedule} on {ranks} ranks has {a_rank} on each: {a_rank * ranks - 1} points."
        yield key, text
    elif not points and ranks * a_rank > layers:
        text = f"gives {ranks * a_rank} stages ({a_rank} a rank), and the model has {layers} blocks."
        yield "parallelism.pipeline_parallel_degree", f"{text} Nearest: {layers // a_rank}."
    if run.arch.tied_embeddings:
        text = "does not go with model.tied_embeddings = true: the first and the last stage would share a matrix."
        yield "parallelism.pipeline_parallel_degree", text, "Use tensor or data parallelism."
    if config.fsdp_reduce == "microbatch":
        yield "parallelism.fsdp_reduce", 'must be "step" with a pipeline, whose stages reduce with the last microbatch.'
    for reason, remedy in _schedule_lacks(job, run.compiles("model")):
        yield "parallelism.pipeline_parallel_schedule", reason, f'Nearest: "Interleaved1F1B", or {remedy}.'
    count, rows = run.microbatches, job.training.local_batch_size * run.degrees.data
    in_rounds = schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    if count < ranks or (in_rounds and count % (count // ranks)):
        text = (
            f"gives a data-parallel rank {count} microbatches of {job.training.local_batch_size} rows; a pipeline of "
        )
        text += f"{ranks} ranks needs at least {ranks}" + (f", in equal rounds of {ranks}." if in_rounds else ".")
        yield "training.global_batch_size", text, f"Nearest: {_multiples(count * rows, ranks * rows)}."


def _schedule_lacks(job: JobConfig, compiled: bool) -> Iterator[tuple[str, str]]:
    """What a schedule of a pipeline cannot do, and what to change besides the schedule."""
    schedule, recompute = job.parallelism.pipeline_parallel_schedule, job.activation_checkpoint
    torch = version("torch")
    if schedule not in SPLIT_BACKWARD:
        return
    old = tuple(map(int, torch.split(".")[:2])) < (2, 13)
    if old and (schedule in V_SHAPED or job.float8.enable):
        what = "stages of one rank that send to each other fail" if schedule in V_SHAPED else "FP8 weights cannot wait"
        yield f"needs torch 2.13 or newer: in {torch} {what}.", "upgrade torch"
    if compiled:
        # Measured with torch 2.13: the second backward pass over a compiled block fails, because the first one gave its
        # buffers away. With donated_buffer = False it keeps them, but then the loss is 1.4e-3 off after ten fp32 steps.
        text = "delays the gradients of weights, which a compiled block computes together with those of its input."
        yield text, "compile.enable = false"
    if recompute.mode == "selective" and recompute.selective_ac_option == "op":
        text = "runs two backward passes over each block, and what selective checkpointing of operations saved is gone "
        yield f"{text}after the first.", 'activation_checkpoint.mode = "full" or "none"'


# -------------------------------------------------------------------------------------------------- schedule and memory


@rule("dataset.stages", "training.steps", "lr_scheduler")
def steps(context: Context) -> Iterator[Problem]:
    steps, schedule = context.job.training.steps, context.job.lr_scheduler
    # A user who sets fewer steps on the command line wants to see the first steps of the run, with the rates of the
    # file.
    cut_short = context.origins.get("training.steps") == COMMAND_LINE
    starts = [stage.start_step for stage in context.job.dataset.stages]
    for number, start in enumerate(starts):
        if (start >= steps and not cut_short) or start in starts[:number]:
            text = f"must be less than training.steps = {steps}, and not that of another stage: it would never run."
            yield f"dataset.stages.{number}.start_step", text
    total, warmup = schedule.total_steps or steps, schedule.warmup_steps or 0
    if total < steps:
        text = f"must be at least training.steps = {steps}, because no rate is known after the schedule."
        yield "lr_scheduler.total_steps", text
    cut_short = cut_short and context.origins.get("lr_scheduler.warmup_steps") != COMMAND_LINE
    if warmup > total and not cut_short:
        text = f"must be at most training.steps = {steps}, because otherwise the peak rate is never reached."
        yield "lr_scheduler.warmup_steps", text, f"Usual is {max(1, steps // 50)} to {max(1, steps // 10)}."


@rule("checkpoint", "validation.freq", "samples")
def what_has_no_effect(context: Context) -> Iterator[Problem]:
    checkpoint, samples = context.job.checkpoint, context.job.samples
    if checkpoint.keep_best and not checkpoint.enable:
        yield "checkpoint.keep_best", "keeps nothing, because checkpoint.enable is false. Set both."
    elif checkpoint.keep_best and context.job.validation.freq == 0:
        yield "checkpoint.keep_best", "needs the loss of a validation, and validation.freq is 0. Set it."
    if samples.freq and not samples.prompts:
        yield "samples.freq", "has nothing to complete: samples.prompts is empty."
    if samples.prompts and not context.is_set("samples.freq"):  # a 0 that the job file sets is intended
        yield "samples.prompts", "has no effect, because samples.freq is left out, which means 0: never. Set both."


@rule("profiling")
def profiles(context: Context) -> Iterator[Problem]:
    profiling, ranks = context.job.profiling, context.run.world_size
    if missing := [rank for rank in profiling.profiler_ranks if rank >= ranks]:
        yield "profiling.profiler_ranks", f"names rank {missing[0]}, and the last of {ranks} is {ranks - 1}."
    needed = profiling.profiler_warmup + profiling.profiler_active
    if (profiling.enable_profiling or profiling.enable_memory_snapshot) and needed > profiling.profile_freq:
        yield "profiling.profile_freq", f"must be at least profiler_warmup + profiler_active = {needed}."


@rule("activation_checkpoint", "compile", "model")
def recomputation(context: Context) -> Iterator[Problem]:
    checkpoint, layers = context.job.activation_checkpoint, context.run.arch.n_layers
    if checkpoint.mode == "memory_budget" and not context.run.compiles("model"):
        text = 'is decided by the compiler: it needs compile.enable = true with "model" in compile.components.'
        yield "activation_checkpoint.mode", text
    every = checkpoint.selective_ac_option
    if checkpoint.mode == "selective" and every.isdecimal() and int(every) > layers:
        text = f'must be at most model.n_layers = {layers}. For none: activation_checkpoint.mode = "none".'
        yield "activation_checkpoint.selective_ac_option", text


# ------------------------------------------------------------------------------------------------ optimizer and float8


@rule("optimizer", "training", "compile")
def optimizer(context: Context) -> Iterator[Problem]:
    """bfloat16 rounds away a change that is below 2^-8 of the value.

    A step changes a moment by (1 - beta) times its distance from the value that it moves to. With 1 - beta = 0.01 a
    moment can stop anywhere between 0.72 and 1.64 times that value. With 0.004 it never falls."""
    optimizer, training, state = context.job.optimizer, context.job.training, context.run.state_dtype
    if optimizer.stochastic_rounding and "bfloat16" not in (state, training.dtype):
        text = 'rounds nothing: set training.dtype or optimizer.state_dtype to "bfloat16".'
        yield "optimizer.stochastic_rounding", text
    own = optimizer.stochastic_rounding or state != training.dtype or context.run.compiles("optimizer")
    if own and optimizer.implementation != "fused":
        text = 'must be "fused" with stochastic_rounding, a state_dtype of its own, or a compiled optimizer.'
        yield "optimizer.implementation", text
    for key in ("beta1", "beta2") if state == "bfloat16" and not optimizer.stochastic_rounding else ():
        if (beta := getattr(optimizer, key)) > 0.99:
            stop = f"{1 / (1 + 2.0**-8 / (1 - beta)):.2f}"
            text = (
                f"is too high for moments in bfloat16, whose rounding lets them stop at {stop} times their target. Set "
            )
            text += f"optimizer.stochastic_rounding = true, optimizer.{key} to 0.99 or less, or "
            yield f"optimizer.{key}", text + 'optimizer.state_dtype = "float32".'


@rule("float8", "model", "training", "parallelism")
def float8(context: Context) -> Iterator[Problem]:
    arch, float8, training = context.run.arch, context.job.float8, context.job.training
    if not float8.enable:
        return
    if float8.enable_fsdp_float8_all_gather and float8.recipe_name != "tensorwise":
        yield "float8.enable_fsdp_float8_all_gather", 'needs float8.recipe_name = "tensorwise".'
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        text = "needs float8.enable_fsdp_float8_all_gather = true."
        yield "float8.precompute_float8_dynamic_scale_for_fsdp", text
    if arch.dim < float8.min_features:
        text = f"converts no layer: model.dim = {arch.dim} is less than float8.min_features = {float8.min_features}."
        yield "float8.enable", text, "Set float8.min_features = 0 to convert all."
        return
    for key, size in (("dim", arch.dim), ("n_kv_heads", arch.kv_dim), ("ffn_dim", arch.ffn_dim)):
        if size >= float8.min_features and size % 16:
            yield f"model.{key}", f"gives FP8 layers a side of {size}; an FP8 matmul takes multiples of 16."
    tokens = training.local_batch_size * training.seq_len // context.job.parallelism.context_parallel_degree
    if tokens % 16 and float8.recipe_name != "rowwise_with_gw_hp":  # whose weight gradients need no FP8
        text = f"times training.local_batch_size gives {tokens} tokens; an FP8 matmul takes multiples of 16."
        yield "training.seq_len", text


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 10_000) + 1) if number % n == 0]


def _near(choices: Iterable[int], to: int) -> str:
    """The two of `choices` that are closest to `to`, in ascending order."""
    return " and ".join(map(str, sorted(sorted(choices, key=lambda choice: abs(choice - to))[:2])))


def _multiples(number: int, of: int) -> str:
    """The multiples of `of` on both sides of `number`."""
    low = number // of * of
    return f"{low} or {low + of}" if low else f"{of}"
