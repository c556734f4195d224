"""Makes a `Run` from a command line, or from a job that was made in Python.

Invariant: all mistakes that can be found before the start are reported together, in a fraction of a second, before
torch is imported or a folder is made. This module has the rules about files; `titanlite.config.rules` has those about
keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from titanlite.config.degrees import MOST_RANKS
from titanlite.config.errors import UserError, one_line
from titanlite.config.files import not_writable
from titanlite.config.flavors import fit_vocabulary
from titanlite.config.load import COMMAND_LINE, read_job, with_folder
from titanlite.config.mistakes import block, report, shown
from titanlite.config.rules import Context, broken_rules, rule
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, JobConfig, TextSource, Validation
from titanlite.data.sources import find_files
from titanlite.data.tokenizer import load_tokenizer
from titanlite.observe.outputs import FILES, FOLDERS
from titanlite.observe.writers import load_writer


def load_run(argv: Sequence[str], world_size: int) -> Run:
    """The run of a command line, checked by the schema and by all rules.

    Raises:
        UserError: anything wrong, all mistakes in one message.
    """
    draft = read_job(argv)
    run = Run(_complete(draft.job), world_size)
    errors = draft.errors + broken_rules(Context(run, draft.origins), draft.invalid)
    if errors:
        raise UserError(report(errors, draft.advice))
    return run


def check_run(job: JobConfig, world_size: int) -> Run:
    """The run of a job that was made in Python. The checks are those of a command line.

    Raises:
        UserError: wrong values, which `model_copy(update=...)` does not refuse, or rules that the job breaks. All of
            them are in one message.
    """
    job = with_folder(JobConfig.model_validate(job))
    set_keys = {f"{name}.{key}": "JobConfig" for name, section in job for key in section.model_fields_set}
    run = Run(_complete(job), world_size)
    if errors := broken_rules(Context(run, set_keys)):
        raise UserError(report(errors))
    return run


def world_size() -> int:
    """Number of ranks, from the environment variables of a launcher. 1 without them.

    Raises:
        UserError: WORLD_SIZE, or the rank of this process, is not a valid number.
    """
    size = _variable("WORLD_SIZE", 1, MOST_RANKS)
    local_size = _variable("LOCAL_WORLD_SIZE", 1, size)
    _variable("RANK", 0, size - 1)
    _variable("LOCAL_RANK", 0, local_size - 1)
    return size


def local_world_size() -> int:
    """Number of ranks on this machine, from the environment variable of a launcher. 1 without it. Raises UserError."""
    return _variable("LOCAL_WORLD_SIZE", 1, world_size())


def _variable(name: str, least: int, most: int | None = None) -> int:
    """The number in an environment variable that launchers set. `least` if it is not set."""
    text = os.environ.get(name, str(least))
    number = int(text) if re.fullmatch(r"[0-9]{1,16}", text) else -1
    if number < least or (most is not None and number > most):
        upper = "" if most is None else f" and at most {most}"
        wrong = f'{name} "{one_line(text[:40])}"'
        raise UserError(f"{wrong}: a whole number of at least {least}{upper} is allowed. A launcher sets it.")
    return number


def _complete(job: JobConfig) -> JobConfig:
    """`job` with the size of the vocabulary, which the tokenizer's file decides if the job does not."""
    try:
        size = _vocabulary(Run(job))
    except UserError:  # tokenizer_file reports it
        return job
    return job.model_copy(update={"model": fit_vocabulary(job.model, size)})


def _vocabulary(run: Run) -> int:
    """Number of ids of the run's tokenizer. Raises UserError."""
    path = run.tokenizer_path
    with suppress(OSError):  # load_tokenizer reports it
        return _read_vocabulary(path, path.stat().st_mtime_ns)
    return load_tokenizer(path).vocab_size


@lru_cache(maxsize=1)
def _read_vocabulary(path: Path, _changed: int) -> int:
    return load_tokenizer(path).vocab_size


# ------------------------------------------------------------------------------------------------------ tokenizer, data


@rule("tokenizer.path")
def tokenizer_file(context: Context) -> Iterator[str]:
    path = context.run.tokenizer_path
    if not path.exists():
        yield context.wrong(
            "tokenizer.path",
            f"there is no such file in the current folder or in {path.parent}.",
            "Place a tiktoken-format tokenizer.model or a Hugging Face tokenizer.json there, or leave the key out: the "
            "default tokenizer comes with titanlite.",
        )
        return
    try:
        _vocabulary(context.run)
    except UserError as error:
        yield context.wrong("tokenizer.path", f"{error}")


@rule("samples", "training.seq_len", "tokenizer.path")
def prompts_fit(context: Context) -> Iterator[str]:
    length, samples = context.job.training.seq_len, context.job.samples
    if not samples.freq:
        return
    try:
        tokenizer = load_tokenizer(context.run.tokenizer_path)
    except UserError:  # tokenizer_file reports it
        return
    for prompt in samples.prompts:
        tokens = len(tokenizer.encode(prompt)) + (tokenizer.bos_id is not None)
        if tokens >= length:
            text = f"has a text of {tokens} tokens; at most {length - 1} fit into a row (training.seq_len = {length})."
            yield context.wrong("samples.prompts", text)
        elif not tokens:
            text = "has an empty text, and this tokenizer has no token that begins a document. Give it a character."
            yield context.wrong("samples.prompts", text)


@rule("tokenizer.path", "model")
def vocabulary_fits_model(context: Context) -> Iterator[str]:
    try:
        size = _vocabulary(context.run)
    except UserError:
        return  # tokenizer_file reports it
    if size > context.run.arch.vocab_size:
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
    keys = list(_source_keys(context, "validation"))
    if validation.sources:
        keys.append("validation.sources")
    if validation.freq == 0 and "validation.freq" not in context.origins:  # a 0 that the job file sets is intended
        for key in ["validation.holdout"] if validation.holdout > 0 else keys[:1]:
            text = (
                "has no effect, because validation.freq is left out, which means 0: no validation. Set both, or none."
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


# Key -> the sources that read it, for keys that some sources do not read. `shards` is among them, because a job file
# often keeps its keys after its text was prepared.
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


@rule("job.dump_folder", "checkpoint.folder")
def output_folders(context: Context) -> Iterator[str]:
    folder = context.run.dump_folder.absolute()
    problems = {"job.dump_folder": not_writable(folder) or _wrong_kind(folder)}
    if context.job.checkpoint.enable:
        problems["checkpoint.folder"] = not_writable(Path(os.path.normpath(folder / context.job.checkpoint.folder)))
    if problems["job.dump_folder"]:
        problems.pop("checkpoint.folder", None)
    for key, problem in problems.items():
        if problem:
            yield context.wrong(key, problem)


def _wrong_kind(folder: Path) -> str | None:
    """Which output of a run a folder or a file is in the way of."""
    for name in FILES:
        path = folder / name
        if os.path.exists(path) and os.path.isdir(path) != (name in FOLDERS):
            return f"{path} is {'a file' if name in FOLDERS else 'a folder'}, where a run writes its own. Move it away."
        if path.is_fifo():  # to open it would wait for a reader
            return f"{path} is a pipe, where a run writes a file. Move it away."
    return None


@rule("metrics")
def writers(context: Context) -> Iterator[str]:
    metrics = context.job.metrics
    if metrics.enable_wandb and find_spec("wandb") is None:
        yield context.wrong("metrics.enable_wandb", "needs the package wandb: pip install 'titanlite[wandb]'.")
    for name in dict.fromkeys(metrics.writers):
        if metrics.writers.count(name) > 1:
            yield context.wrong("metrics.writers", f"names {shown(name)} twice. Name each writer once.")
        try:
            load_writer(name)
        except UserError as error:
            yield context.wrong("metrics.writers", str(error), "CONTRIBUTING.md says how one is made.")


@rule("checkpoint", "job.dump_folder")
def initial_weights(context: Context) -> Iterator[str]:
    checkpoint = context.job.checkpoint
    folder, origin = context.run.checkpoint_folder, checkpoint.initial_load_path or "."
    resumes = os.path.isdir(folder) and any(folder.glob("step-*"))  # then initial_load_path is not read
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
