"""Makes a `Run` from a command line, or from a job that was made in Python, and has the rules that span keys, ranks and
files.

Invariant: all mistakes that can be found before the start are reported together, in a fraction of a second, before
torch is imported or a folder is made.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from titanlite.checkpoint import find, step_folders
from titanlite.config import storage
from titanlite.config.errors import UserError
from titanlite.config.files import not_writable
from titanlite.config.flavors import FITTED_TO_TOKENIZER
from titanlite.config.load import Draft, read_job
from titanlite.config.mistakes import COMMAND_LINE, Mistake, WrongJob, shown
from titanlite.config.run import MOST_RANKS, ONE_STAGE_A_RANK, SPLIT_BACKWARD, V_SHAPED, Run, sequence_divisor
from titanlite.config.schema import SECTIONS, Dataset, JobConfig, Optimizer, Validation
from titanlite.data.hub import remedy
from titanlite.data.sources.files import find_files
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.observe.outputs import FILES
from titanlite.pretrained import parted, tables_of

Problems = Iterator[tuple[str, str]]
"""A key, such as "training.steps" or "dataset.sources.0.weight", and what is wrong with its value."""


def load_run(argv: Sequence[str], world_size: int, trusted: bool = True, trains: bool = True) -> Run:
    """The run of a command line, checked by the schema and by all rules; unless it `trains`, not by those about its
    output folder and initial weights. For `trusted` see `load_job`.

    Raises:
        UserError: anything wrong, all mistakes in one message; or the model of `--from` cannot be had.
    """
    model, words = parted(argv)
    return _checked(read_job(words, trusted, None if model is None else partial(tables_of, model)), world_size, trains)


def check_run(job: JobConfig, world_size: int) -> Run:
    """The run of a job that was made in Python. The checks are those of a command line.

    Raises:
        UserError: wrong values, which `model_copy(update=...)` does not refuse, or rules that the job breaks. All of
            them are in one message.
    """
    return _checked(Draft(JobConfig.model_validate(job), (), {}, "JobConfig"), world_size)


def load_data_job(argv: Sequence[str]) -> JobConfig:
    """The job of a command line of which the data alone is used and checked. Raises UserError as `load_run`."""
    draft = read_job(argv)
    if found := [*draft.mistakes, *(mistake_of(Run(draft.job), *each) for each in _dataset(Run(draft.job)))]:
        raise WrongJob(found, draft.file, draft.origins)
    return draft.job


def _checked(draft: Draft, world_size: int, trains: bool = True) -> Run:
    """The run of a draft. Raises WrongJob: its mistakes, and the rules that it breaks."""
    job, origins, rules = draft.job, draft.origins, []
    problems: list[tuple[str, str]] = []
    try:
        tokenizer = load_tokenizer(Run(job).tokenizer_path, job)
        if job.model.vocab_size is None and job.model.flavor in FITTED_TO_TOKENIZER:
            rows = -(-tokenizer.vocab_size // 128) * 128  # suits matmuls, and tensor parallelism can divide it
            job = job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": rows})})
        rules.append(_tokenizer(Run(job), tokenizer))
    except UserError as error:
        problems.append(("tokenizer.path", f"cannot be used: {error}{_tokenizer_remedy(Run(job))}"))
    run = Run(job, world_size)
    rules += [*_of_keys(run, origins), _dataset(run), _validation(run), *([_files(run)] if trains else [])]
    # A value that has been refused is taken out of the job, which goes no further: a rule that reads it ends there.
    for mistake in draft.mistakes:
        section, _, name = mistake.key.partition(".")
        if section in SECTIONS:
            vars(getattr(job, section) if name else job).pop(name or section, None)
    for rule in rules:
        with suppress(AttributeError) if draft.mistakes else nullcontext():
            problems.extend(rule)
    if found := [*draft.mistakes, *(mistake_of(run, *problem) for problem in problems)]:
        raise WrongJob(found, draft.file, origins)
    return run


def mistake_of(run: Run, key: str, remedy: str) -> Mistake:
    """A problem as the report has it: with the value of its key, or the flavor's."""
    section, name, *_ = parts = key.split(".")
    value: Any = run.job
    for part in parts:
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    value = getattr(run.arch, name) if value is None and section == "model" else value
    return Mistake(f"{section}.{name}", f"{key} = {shown(value)}", remedy)


def world_size() -> int:
    """Number of ranks, from the environment variables of a launcher. 1 without them.

    Raises:
        UserError: WORLD_SIZE, or the rank of this process, is not a valid number.
    """
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    with suppress(ValueError):
        if 0 <= int(rank) < int(size) <= MOST_RANKS:
            return int(size)
    raise UserError(f"WORLD_SIZE={size[:40]}, RANK={rank[:40]}: a rank must be a number from 0, below WORLD_SIZE.")


# ------------------------------------------------------------------------------------------------- rules that span keys


def broken_rules(run: Run) -> list[tuple[str, str]]:
    """What is wrong with a run, but for files. Each is a key, and what is wrong with its value."""
    return list(chain(*_of_keys(run, {})))


def _of_keys(run: Run, origins: Mapping[str, str]) -> list[Problems]:
    rules = [_model(run), layout_rules(run), _schedules(run, origins), _precision(run), _float8(run), _others(run)]
    return [*rules, _optimizer(run), _without_effect(run)]


def _model(run: Run) -> Problems:
    arch = run.arch
    if arch.head_dim % 2 and run.job.model.head_dim:
        yield "model.head_dim", "must be even, because rotary positions turn pairs of channels."
    elif arch.head_dim % 2:
        yield "model.n_heads", f"must divide model.dim = {arch.dim} into heads of an even width. Or set head_dim."
    elif arch.n_heads % arch.n_kv_heads:
        yield "model.n_kv_heads", f"must divide model.n_heads = {arch.n_heads}."
    if run.job.training.seq_len > arch.max_seq_len:
        yield "training.seq_len", f"must be at most model.max_seq_len = {arch.max_seq_len}. Change one of them."


def layout_rules(run: Run) -> Problems:
    """What is wrong with the degrees of a run; where they do not fill the world, or cannot divide the batch, that
    alone."""
    training, degree, arch = run.job.training, run.degrees, run.arch
    if degree.world != run.world_size:
        degrees = [name for name, _ in run.job.parallelism if name.endswith("_degree")]
        key = max(degrees, key=lambda name: getattr(run.job.parallelism, name))
        text = f"makes {degree.world} ranks with the other degrees; the world has {run.world_size} (NGPU times NNODES)."
        yield f"parallelism.{key}", text
        return
    unit = training.local_batch_size * degree.data
    if wrong := [(key, size) for key, size in _batch_sizes(run) if size % unit or not size]:
        text = f"must be a multiple of {unit}: local_batch_size times data-parallel degree = {degree.data}. Nearest: "
        yield from ((key, f"{text}{_multiples(size, unit)}.") for key, size in wrong)
        return
    if arch.n_kv_heads % degree.tensor or arch.ffn_dim % degree.tensor:
        text = f"must divide model.n_kv_heads = {arch.n_kv_heads} and model.ffn_dim = {arch.ffn_dim}."
        yield "parallelism.tensor_parallel_degree", text
    if training.seq_len % (unit := sequence_divisor(degree)):
        text = f"must be a multiple of {unit}, because context and tensor ranks cut rows. Nearest: "
        yield "training.seq_len", f"{text}{_multiples(training.seq_len, unit)}."
    if degree.pipeline > 1:
        yield from _pipeline(run)


def _pipeline(run: Run) -> Problems:
    """Each stage needs a block, there must be enough microbatches, and a schedule cannot do everything."""
    job, config, layers, ranks = run.job, run.job.parallelism, run.arch.n_layers, run.degrees.pipeline
    schedule, points = config.pipeline_parallel_schedule, config.pipeline_parallel_split_points
    of_rank, cuts = 1 if schedule in ONE_STAGE_A_RANK else 2, [int(point.removeprefix("layers.")) for point in points]
    stages, fixed = len(cuts) + 1 if cuts else of_rank * ranks, schedule in (*ONE_STAGE_A_RANK, *V_SHAPED)
    uneven = stages != of_rank * ranks if fixed else stages % ranks
    if cuts and (uneven or any(a >= b for a, b in pairwise([0, *cuts, layers]))):
        text = f"must rise to at most layers.{layers - 1}, and make {of_rank} stages for each of {ranks} ranks."
        yield "parallelism.pipeline_parallel_split_points", text
    elif stages > layers:
        yield "parallelism.pipeline_parallel_degree", f"makes {stages} stages, and the model has {layers} blocks."
    if run.arch.tied_embeddings:
        yield "model.tied_embeddings", "does not go with a pipeline: its first and last stage would share a matrix."
    if config.fsdp_reduce == "microbatch":
        yield "parallelism.fsdp_reduce", 'must be "step" with a pipeline, whose stages reduce with the last microbatch.'
    in_rounds = schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    unit = job.training.local_batch_size * run.degrees.data
    for key, count in ((key, size // unit) for key, size in _batch_sizes(run)):
        if count < ranks or (in_rounds and count % (count // ranks)):
            text = f"makes {count} microbatches; a pipeline needs {ranks}, or a multiple. Nearest: "
            yield key, f"{text}{_multiples(count * unit, ranks * unit)}."
    # Of a compiled block the second backward pass fails, because the first one gave its buffers away (torch 2.13; with
    # donated_buffer = False the loss is 1.4e-3 off after ten fp32 steps), and so does that of a block of which some
    # operators are recomputed. Before torch 2.13, stages of one rank that send to each other fail, too, and FP8 weights
    # cannot wait for their gradients.
    recompute = job.activation_checkpoint
    by_operator = recompute.mode == "selective" and recompute.selective_ac_option == "op"
    old = tuple(map(int, version("torch").split(".")[:2])) < (2, 13) and (schedule in V_SHAPED or job.float8.enable)
    if schedule in SPLIT_BACKWARD and (run.compiles("model") or by_operator or old):
        text = 'needs compile.enable = false, activation_checkpoint.mode "full" or "none"; torch 2.13 for FP8 or a V.'
        yield "parallelism.pipeline_parallel_schedule", text


def _batch_sizes(run: Run) -> list[tuple[str, int]]:
    """Each key that sets a global batch size, and that size."""
    stages = ((f"dataset.stages.{i}", stage.global_batch_size) for i, stage in enumerate(run.job.dataset.stages))
    found = [(f"{table}.global_batch_size", size) for table, size in stages if size is not None]
    return [("training.global_batch_size", run.global_batch_size), *found]


def _multiples(number: int, of: int) -> str:
    """The multiples of `of` on both sides of `number`."""
    low = number // of * of
    return f"{low} or {low + of}" if low else f"{of}"


def _schedules(run: Run, origins: Mapping[str, str]) -> Problems:
    steps, schedule = run.job.training.steps, run.job.lr_scheduler
    total = schedule.total_steps or steps
    if total < steps:
        yield "lr_scheduler.total_steps", f"must be at least training.steps = {steps}: no rate is known after it."
    # --training.steps alone asks for the first steps of the run, with the rates of the file. The run's own config.toml,
    # which names another file, has both.
    origin, warmup = (origins.get(key, "default") for key in ("training.steps", "lr_scheduler.warmup_steps"))
    is_look = origin == COMMAND_LINE != warmup or origin not in (COMMAND_LINE, "default", run.job.job.config_file)
    if (schedule.warmup_steps or 0) > total and not is_look:
        yield "lr_scheduler.warmup_steps", f"must be at most training.steps = {steps}: the peak rate is never reached."


def _precision(run: Run) -> Problems:
    """bfloat16 rounds away a change that is below 2^-8 of the value.

    A step changes a moment by (1 - beta) times its distance from the value that it moves to. With 1 - beta = 0.01 a
    moment can stop anywhere between 0.72 and 1.64 times that value. With 0.004 it never falls."""
    optimizer = run.job.optimizer
    for key in ("beta1", "beta2") if run.state_dtype == "bfloat16" and not optimizer.stochastic_rounding else ():
        if getattr(optimizer, key) > 0.99:
            text = "must be at most 0.99 with moments in bfloat16, which are rounded, or stochastic_rounding = true."
            yield f"optimizer.{key}", text


UNREAD = {
    "AdamW": ("momentum",),
    "Muon": ("implementation", "stochastic_rounding"),
    "AdamW8bit": ("momentum", "implementation", "state_dtype", "stochastic_rounding"),
    "Lion": ("momentum", "implementation", "eps"),
    "SGD": ("beta1", "beta2", "eps", "implementation"),
}
"""optimizer.name -> keys of [optimizer] that it does not read."""


def _optimizer(run: Run) -> Problems:
    job, optimizer = run.job, run.job.optimizer
    for key in UNREAD.get(optimizer.name, ()):
        if getattr(optimizer, key) != Optimizer.model_fields[key].default:
            yield f"optimizer.{key}", f'is not read with optimizer.name = "{optimizer.name}". Leave it out.'
    if "updates" in job.metrics.details and optimizer.name != "AdamW":
        yield "metrics.details", '"updates" needs the moments of optimizer.name = "AdamW". Leave it out.'
    if optimizer.name == "AdamW8bit" and (run.degrees.tensor > 1 or job.training.enable_cpu_offload):
        yield "optimizer.name", "does not go with tensor parallelism or CPU offload: its blocks are whole rows."
    tables, names = optimizer.groups, run.arch.parameter_names if optimizer.groups else []
    for number, table in enumerate(tables):
        for pattern in (each for each in table.params if not fnmatch.filter(names, each)):
            yield f"optimizer.groups.{number}.params", f'"{pattern}" fits no parameter, such as {names[1]}.'
    for words, wrong in ("none of the tables", lambda count: count == 0), ("two tables", lambda count: count > 1):
        if found := [name for name in names if wrong(sum(table.claims(name) for table in tables))]:
            more = f" and {len(found) - 1} more" * (len(found) > 1)
            yield f"optimizer.groups.{len(tables) - 1}.params", f"{found[0]}{more}: in {words}, and must be in one."


def _float8(run: Run) -> Problems:
    arch, float8, training, tensor = run.arch, run.job.float8, run.job.training, run.degrees.tensor
    if not float8.enable:
        return
    if arch.dim < float8.min_features:
        yield "float8.enable", f"converts no layer: float8.min_features is above model.dim = {arch.dim}. Set it to 0."
        return
    sides = dict.fromkeys((arch.dim, arch.q_dim, arch.kv_dim, arch.ffn_dim))
    sides = [size for size in sides if size >= float8.min_features and size % 16 == 0]
    if any(side // tensor % 16 for side in sides):
        text = f"must divide the sides of FP8 layers, {sides}, into multiples of 16."
        yield "parallelism.tensor_parallel_degree", text
    tokens = training.local_batch_size * training.seq_len // run.degrees.context
    if tokens % 16 and float8.recipe_name != "rowwise_with_gw_hp":  # whose weight gradients need no FP8
        yield "training.seq_len", f"makes {tokens} tokens of a batch, and an FP8 matmul takes multiples of 16."


def _others(run: Run) -> Problems:
    profiling = run.job.profiling
    if run.job.activation_checkpoint.mode == "memory_budget" and not run.compiles("model"):
        yield "activation_checkpoint.mode", 'needs compile.enable = true, with "model" in compile.components.'
    if (needed := profiling.profiler_warmup + profiling.profiler_active) > profiling.profile_freq:
        yield "profiling.profile_freq", f"must be at least profiler_warmup + profiler_active = {needed}."
    if any(rank >= run.world_size for rank in profiling.profiler_ranks):
        yield "profiling.profiler_ranks", f"names a rank that is not there: the last one is {run.world_size - 1}."


def _without_effect(run: Run) -> Problems:
    """Keys that ask for something which another key keeps from happening."""
    job, layout, float8, validation = run.job, run.job.parallelism, run.job.float8, run.job.validation
    no_freq = not validation.freq and "freq" not in validation.model_fields_set
    has_bfloat16 = "bfloat16" in (run.state_dtype, job.training.dtype)
    compiled = run.degrees.tensor > 1 and run.compiles("model")
    gathers, scales = float8.enable_fsdp_float8_all_gather, float8.precompute_float8_dynamic_scale_for_fsdp
    for key, has_no_effect, needed in (
        ("samples.freq", job.samples.freq and not job.samples.prompts, "samples.prompts"),
        ("validation.source", (validation.path or validation.sources) and no_freq, "validation.freq"),
        ("checkpoint.keep_best", job.checkpoint.keep_best and not validation.freq, "validation.freq"),
        ("checkpoint.keep_best", job.checkpoint.keep_best and not job.checkpoint.enable, "checkpoint.enable"),
        ("guards.on_spike", job.guards.on_spike == "roll_back" and not job.checkpoint.enable, "checkpoint.enable"),
        ("checkpoint.mirror", job.checkpoint.mirror and not job.checkpoint.enable, "checkpoint.enable"),
        ("float8.enable_fsdp_float8_all_gather", gathers and float8.recipe_name != "tensorwise", "tensorwise scales"),
        ("float8.precompute_float8_dynamic_scale_for_fsdp", scales and not gathers, "enable_fsdp_float8_all_gather"),
        ("optimizer.stochastic_rounding", job.optimizer.stochastic_rounding and not has_bfloat16, "bfloat16 state"),
        ("parallelism.enable_async_tensor_parallel", layout.enable_async_tensor_parallel and not compiled,
         "tensor parallelism of a compiled model"),
        ("parallelism.pipeline_parallel_split_points",
         layout.pipeline_parallel_split_points and run.degrees.pipeline == 1, "pipeline_parallel_degree > 1"),
    ):  # fmt: skip
        if has_no_effect:
            yield key, f"has no effect without {needed}. Set both, or leave it out."


# ------------------------------------------------------------------------------------------------ rules that read files


def _tokenizer(run: Run, tokenizer: Tokenizer) -> Problems:
    length, size = run.job.training.seq_len, tokenizer.vocab_size
    if size > run.arch.vocab_size:
        yield "model.vocab_size", f"must be at least {size}, the vocabulary of {run.job.tokenizer.path}. Raise it."
    for prompt in run.job.samples.prompts if run.job.samples.freq else ():
        tokens = len(tokenizer.encode(prompt)) + (tokenizer.bos_id is not None)
        if not 0 < tokens < length:
            yield "samples.prompts", f"has a text of {tokens} tokens; 1 to {length - 1} fit into training.seq_len."


def _tokenizer_remedy(run: Run) -> str:
    """How to get or make a tokenizer that is not there."""
    path, job, rows = run.job.tokenizer.path, run.job.job.config_file, run.arch.vocab_size
    if storage.url_of(path) or os.path.isfile(run.tokenizer_path):
        return ""
    if run.job.checkpoint.initial_load_in_hf:
        return " Bring the tokenizer that the model was trained with there, or name it."
    if os.path.isdir(run.tokenizer_path):
        return f" Name the file in it, such as {os.path.join(path, 'tokenizer.json')}."
    out, name = os.path.split(path)
    out = out if name in ("tokenizer.json", "tokenizer.model") else os.path.splitext(path)[0]
    train = f"`titanlite tokenizer train --job.config_file {job} --vocab-size {rows} --out {out}`"
    return remedy("tokenizer", path, rows) or f"; {train} makes {out}/tokenizer.json of the text of this job"


def _dataset(run: Run) -> Problems:
    sources = run.job.dataset.sources
    yield from _sources("dataset", run.job.dataset)
    for number, stage in enumerate(run.job.dataset.stages):
        if stage.weights is not None and (len(stage.weights) != len(sources) or not any(stage.weights)):
            yield f"dataset.stages.{number}.weights", f"must be {len(sources)} weights, one a source, not all 0."


def _validation(run: Run) -> Problems:
    validation = run.job.validation
    if validation.holdout > 0 and (validation.path or validation.sources):
        yield "validation.source", "is not used beside validation.holdout, which reads [dataset]. Set one of them."
    elif validation.freq > 0 and validation.holdout == 0:
        if validation.sources or "source" in validation.model_fields_set:
            yield from _sources("validation", validation)
        else:
            yield "validation.freq", "needs validation.holdout, such as 0.01, or a validation.source of its own."


def _sources(section: str, dataset: Dataset | Validation) -> Problems:
    """What is wrong with the keys of sources, or about the places that their documents come from."""
    if dataset.sources and dataset.path is not None:
        yield f"{section}.path", f"is not used beside [[{section}.sources]]. Write it into the table that it is for."
    if dataset.sources and not any(source.weight for source in dataset.sources):
        yield f"{section}.sources.0.weight", "is 0, as that of each source; at least one must be above 0."
    for number, source in enumerate(dataset.sources or (dataset,)):
        prefix = f"{section}.sources.{number}" if dataset.sources else section
        try:
            if source.path is not None and source.source in ("python_stdlib", "c4"):
                text = f'is not read: {prefix}.source is "{source.source}". Set that, too, such as "text" or "jsonl"'
                raise UserError(text)
            find_files(source)
        except UserError as error:
            key = "source" if source.path is None else "path"
            yield f"{prefix}.{key}", f"{str(error).rstrip('.')}.".replace("dataset.", f"{prefix}.")


def _files(run: Run) -> Problems:
    """Outputs and initial weights."""
    folder, checkpoint, metrics = run.dump_folder.absolute(), run.job.checkpoint, run.job.metrics
    saves = Path(os.path.normpath(folder / checkpoint.folder))
    if problem := not_writable(folder):
        yield "job.dump_folder", problem
    elif checkpoint.enable and (problem := not_writable(saves)):
        yield "checkpoint.folder", problem
    if saves in (folder, *(folder / name for name in ("final", "final_hf", *FILES))):
        yield "checkpoint.folder", "is where a run writes other outputs. Choose a folder for the checkpoints alone."
    saved = step_folders.list_checkpoints(saves) if os.path.isdir(saves) else []
    path, step = None if saved else checkpoint.initial_load_path, checkpoint.load_step  # of a resume it is not read
    remote = {"mirror": checkpoint.mirror, "initial_load_path": path}
    for key, url in remote.items() if os.environ.get("RANK", "0") == "0" else ():  # one rank asks a storage for all
        if checkpoint.enable and storage.url_of(url) and (refusal := storage.problem(str(url), write=key == "mirror")):
            yield f"checkpoint.{key}", f"cannot be used: {refusal}"
    if checkpoint.mirror is not None and storage.url_of(checkpoint.mirror) is None:
        yield "checkpoint.mirror", "is no URL, such as s3://bucket/my_run or file:///mnt/copies/my_run."
    scheme, _, place = (checkpoint.mirror or "").partition("://")
    if scheme == "memory" or (scheme == "file" and Path(place).resolve().is_relative_to(folder.resolve())):
        yield "checkpoint.mirror", "is to outlive the run: name a place that is neither memory nor in job.dump_folder."
    if checkpoint.enable and path is not None and not storage.url_of(path):
        try:
            if not checkpoint.initial_load_in_hf or not os.path.isdir(path):
                find.use_newest(Path(path), step_folders.read_manifest, check=lambda step_folder: None)
        except UserError as error:
            yield "checkpoint.initial_load_path", str(error)
    is_there = step in (-1, *map(step_folders.step_of, saved)) or find.went_back(saved, step)
    if checkpoint.enable and not checkpoint.mirror and not is_there:
        yield "checkpoint.load_step", f"is not in {saves}; there: {', '.join(path.name for path in saved) or 'none'}."
    if metrics.enable_wandb and find_spec("wandb") is None:
        yield "metrics.enable_wandb", "needs the package wandb: pip install 'wandb>=0.19'."
