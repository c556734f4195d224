"""Rules that span several keys or need the world size. Each says the key, its value, what is wrong, and what to do.

Invariant: no torch and no file here. `titanlite.load_run` adds the rules about files, and reports all of them together.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from titanlite.config.flavors import FLAVORS
from titanlite.config.load import COMMAND_LINE
from titanlite.config.mistakes import block, shown
from titanlite.config.parallelism_rules import batch_divides, divisors, fills_world, layout_problems, nearest
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig


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

    @property
    def has_architecture(self) -> bool:
        """Whether the flavor exists."""
        return self.job.model.flavor in FLAVORS

    def wrong(self, key: str, *sentences: str) -> str:
        """The block of the report about a key: where it was set, its value (or the flavor's), and the text."""
        section, name = key.split(".")
        value, origin = getattr(getattr(self.job, section), name), self.origin(key)
        if section == "model" and name != "flavor" and key not in self.origins and self.has_architecture:
            value, origin = getattr(self.run.arch, name), f"flavor {self.job.model.flavor}"
        return block(origin, f"{key} = {shown(value)}", *sentences)

    def origin(self, *keys: str) -> str:
        """Where the first of `keys` that is not left at its default was set. If all are, the job file."""
        default = f"{self.job.job.config_file or 'JobConfig'} (default)"
        return next((self.origins[key] for key in keys if key in self.origins), default)


Rule = Callable[[Context], Iterator[str]]
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
    for keys, check in RULES:
        known = context.has_architecture or "model" not in keys
        if known and not any(key in keys or key.split(".")[0] in keys for key in invalid):
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
    arch = context.run.arch
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
    arch = context.run.arch
    if arch.rope_scaling_factor > 1 and arch.rope_low_freq_factor >= arch.rope_high_freq_factor:
        text = f"must be less than model.rope_high_freq_factor = {arch.rope_high_freq_factor}: frequencies between "
        yield context.wrong("model.rope_low_freq_factor", text + "the two are blended. Llama 3.1 has 1 and 4.")


@rule("model", "training.seq_len")
def sequence_fits_model(context: Context) -> Iterator[str]:
    arch = context.run.arch
    if context.job.training.seq_len > arch.max_seq_len:
        text = f"must be at most model.max_seq_len = {arch.max_seq_len} (flavor {context.job.model.flavor})."
        yield context.wrong("training.seq_len", text, "Shorten it, or raise model.max_seq_len.")


# --------------------------------------------------------------------------------------------------------- parallelism


@rule("parallelism")
def degrees_fill_world(context: Context) -> Iterator[str]:
    for problem in fills_world(context.run):
        yield context.wrong(*problem)


@rule("parallelism", "training.local_batch_size", "training.global_batch_size")
def batch_fits_degrees(context: Context) -> Iterator[str]:
    if not any(fills_world(context.run)):
        for problem in batch_divides(context.run):
            yield context.wrong(*problem)


@rule("parallelism", "model", "training", "compile", "float8")
def degrees_work(context: Context) -> Iterator[str]:
    if not any(fills_world(context.run)) and not any(batch_divides(context.run)):
        for problem in layout_problems(context.run):
            yield context.wrong(*problem)


# -------------------------------------------------------------------------------------------------- schedule and memory


@rule("dataset.stages", "training.steps")
def stages_run(context: Context) -> Iterator[str]:
    steps, starts = context.job.training.steps, [stage.start_step for stage in context.job.dataset.stages]
    cut_short = context.origins.get("training.steps") == COMMAND_LINE
    for number, start in enumerate(starts):
        late, found = start >= steps and not cut_short, f"dataset.stages.{number}.start_step = {start}"
        if late or start in starts[:number]:
            text = f"must be less than training.steps = {steps}" if late else "is that of an earlier stage, too"
            yield block(context.origin("dataset.stages"), found, f"{text}: a stage would never run.")


@rule("training.steps", "lr_scheduler.warmup_steps", "lr_scheduler.total_steps")
def schedule_fits(context: Context) -> Iterator[str]:
    steps, warmup, total = (
        context.job.training.steps,
        context.job.lr_scheduler.warmup_steps,
        context.job.lr_scheduler.total_steps,
    )
    if total is not None and total < steps:
        text = f"must be at least training.steps = {steps}, because no rate is known after the schedule."
        yield context.wrong("lr_scheduler.total_steps", text)
    # A user who sets fewer steps on the command line wants to see the first steps of the run, with the rates of the
    # file.
    cut_short = context.origins.get("training.steps") == COMMAND_LINE
    cut_short = cut_short and context.origins.get("lr_scheduler.warmup_steps") != COMMAND_LINE
    if warmup is not None and warmup > (total or steps) and not cut_short:
        text = f"must be at most training.steps = {steps}, because otherwise the peak rate is never reached."
        yield context.wrong(
            "lr_scheduler.warmup_steps", text, f"Usual is {max(1, steps // 50)} to {max(1, steps // 10)}."
        )


@rule("checkpoint", "validation.freq")
def best_is_known(context: Context) -> Iterator[str]:
    checkpoint = context.job.checkpoint
    if checkpoint.keep_best and not checkpoint.enable:
        yield context.wrong("checkpoint.keep_best", "keeps nothing, because checkpoint.enable is false. Set both.")
    elif checkpoint.keep_best and context.job.validation.freq == 0:
        text = "needs the loss of a validation, and validation.freq is 0: no validation. Set it, for example to "
        yield context.wrong("checkpoint.keep_best", f"{text}checkpoint.interval = {checkpoint.interval}.")


@rule("samples")
def samples_have_prompts(context: Context) -> Iterator[str]:
    samples = context.job.samples
    if samples.freq and not samples.prompts:
        text = 'has nothing to complete, because samples.prompts is empty. Name some, such as ["import os"].'
        yield context.wrong("samples.freq", text)
    if samples.prompts and "samples.freq" not in context.origins:  # a 0 that the job file sets is intended
        text = "has no effect, because samples.freq is left out, which means 0: never. Set both, or none."
        yield context.wrong("samples.prompts", text)


@rule("profiling")
def profiles_are_made(context: Context) -> Iterator[str]:
    profiling, ranks = context.job.profiling, context.run.world_size
    if missing := [rank for rank in profiling.profiler_ranks if rank >= ranks]:
        text = f"names rank {missing[0]}, and the last of {ranks} is {ranks - 1}."
        yield context.wrong("profiling.profiler_ranks", text)
    if not (profiling.enable_profiling or profiling.enable_memory_snapshot):
        return
    needed = profiling.profiler_warmup + profiling.profiler_active
    if needed > profiling.profile_freq:
        text = f"must be at least profiler_warmup + profiler_active = {needed}, the steps of a cycle that need the "
        yield context.wrong("profiling.profile_freq", f"{text}profiler.")


@rule("activation_checkpoint.mode", "compile.enable", "compile.components")
def memory_budget_compiles(context: Context) -> Iterator[str]:
    if context.job.activation_checkpoint.mode == "memory_budget" and not context.run.compiles("model"):
        text = 'is decided by the compiler: set compile.enable = true with "model" in compile.components, or choose '
        yield context.wrong("activation_checkpoint.mode", text + "another mode (none, selective, full).")


@rule("activation_checkpoint", "model")
def selects_a_block(context: Context) -> Iterator[str]:
    checkpoint, arch = context.job.activation_checkpoint, context.run.arch
    every = checkpoint.selective_ac_option
    if checkpoint.mode == "selective" and every.isdecimal() and int(every) > arch.n_layers:
        text = f"must be at most model.n_layers = {arch.n_layers}. With a larger one no block is checkpointed. "
        text += 'If you want that, set activation_checkpoint.mode = "none".'
        yield context.wrong("activation_checkpoint.selective_ac_option", text)


# ---------------------------------------------------------------------------------------------------------- optimizer


@rule("optimizer", "training", "compile")
def optimizer_fits(context: Context) -> Iterator[str]:
    optimizer, training, state = context.job.optimizer, context.job.training, context.run.state_dtype
    if optimizer.stochastic_rounding and "bfloat16" not in (state, training.dtype):
        text = f'rounds nothing: training.dtype is "{training.dtype}" and optimizer.state_dtype "{state}". '
        yield context.wrong("optimizer.stochastic_rounding", text + 'Set one to "bfloat16".')
    own = optimizer.stochastic_rounding or state != training.dtype or context.run.compiles("optimizer")
    if own and optimizer.implementation != "fused":
        text = "is one of torch's, which have no stochastic_rounding, state_dtype or compilation. "
        yield context.wrong("optimizer.implementation", text + 'Leave it at "fused".')


@rule("optimizer", "training")
def moments_move(context: Context) -> Iterator[str]:
    """bfloat16 rounds away a change that is below 2^-8 of the value.

    A step changes a moment by (1 - beta) times its distance from the value that it moves to. With 1 - beta = 0.01 a
    moment can stop anywhere between 0.72 and 1.64 times that value. With 0.004 it never falls."""
    optimizer, rounded = context.job.optimizer, 2.0**-8
    if context.run.state_dtype == "float32" or optimizer.stochastic_rounding:
        return
    for key in ("beta1", "beta2"):
        beta = getattr(optimizer, key)
        if beta > 0.99:
            change, least = 1 - beta, 1 / (1 + rounded / (1 - beta))
            text = f"is too high for moments in bfloat16. A step changes a moment by {change:.2g} times its distance "
            text += f"from its target, and bfloat16 rounds away changes below 2^-8 = {rounded:.2g} of the value. So a "
            text += f"moment can stop at {least:.2f} times its target"
            text += ", and never falls. " if change <= rounded else ". "
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
    arch, float8 = context.run.arch, context.job.float8
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
    if tokens % 16 and float8.recipe_name != "rowwise_with_gw_hp":  # whose weight gradients need no FP8
        text = f"with training.local_batch_size = {training.local_batch_size} gives {tokens} tokens at a time; "
        remedy = "Change one of them, or set float8.enable = false."
        yield context.wrong("training.seq_len", text + "an FP8 matmul takes multiples of 16.", remedy)


def _nearest_divisors(number: int, to: int) -> str:
    return " and ".join(map(str, nearest(divisors(number), to)))
