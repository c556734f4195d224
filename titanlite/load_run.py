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

from titanlite.config.errors import UserError, one_line
from titanlite.config.files import not_writable
from titanlite.config.flavors import fit_vocabulary
from titanlite.config.layout import MOST_RANKS
from titanlite.config.load import COMMAND_LINE, read_job, with_folder
from titanlite.config.mistakes import report, shown
from titanlite.config.rules import Context, Problem, broken_rules, rule
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, JobConfig, Validation
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
    if errors := draft.errors + broken_rules(Context(run, draft.origins), draft.invalid):
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
    _variable("RANK", 0, size - 1)
    _variable("LOCAL_RANK", 0, _variable("LOCAL_WORLD_SIZE", 1, size) - 1)
    return size


def local_world_size() -> int:
    """Number of ranks on this machine, from the environment variable of a launcher. 1 without it. Raises UserError."""
    return _variable("LOCAL_WORLD_SIZE", 1, world_size())


def _variable(name: str, least: int, most: int) -> int:
    """The number in an environment variable that launchers set. `least` if it is not set."""
    text = os.environ.get(name, str(least))
    number = int(text) if re.fullmatch(r"[0-9]{1,16}", text) else -1
    if not least <= number <= most:
        wrong = f'{name} "{one_line(text[:40])}"'
        raise UserError(
            f"{wrong}: a whole number of at least {least} and at most {most} is needed. A launcher sets it."
        )
    return number


def _complete(job: JobConfig) -> JobConfig:
    """`job` with the size of the vocabulary, which the tokenizer's file decides if the job does not."""
    with suppress(UserError):  # the rule about the tokenizer reports it
        return job.model_copy(update={"model": fit_vocabulary(job.model, _vocabulary(Run(job)))})
    return job


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
def tokenizer_file(context: Context) -> Iterator[Problem]:
    try:
        _vocabulary(context.run)
    except UserError as error:
        path = context.run.tokenizer_path
        place = f"there is no such file in the current folder or in {path.parent}."
        remedy = "Place a tokenizer.model (tiktoken) or tokenizer.json there, or leave the key out."
        yield "tokenizer.path", f"{error}" if path.exists() else f"{place} {remedy}"


@rule("tokenizer.path", "model", "samples", "training.seq_len")
def tokenizer_fits(context: Context) -> Iterator[Problem]:
    length, samples = context.job.training.seq_len, context.job.samples
    with suppress(UserError):  # tokenizer_file reports it
        size = _vocabulary(context.run)
        if size > context.run.arch.vocab_size:
            text = f"must be at least {size}, the vocabulary of {context.job.tokenizer.path}."
            yield "model.vocab_size", text, "Raise it, or choose a smaller tokenizer with tokenizer.path."
        if not samples.freq or not samples.prompts:
            return
        tokenizer = load_tokenizer(context.run.tokenizer_path)
        for prompt in samples.prompts:
            tokens = len(tokenizer.encode(prompt)) + (tokenizer.bos_id is not None)
            if not 0 < tokens < length:
                text = f"has a text of {tokens} tokens; 1 to {length - 1} fit into a row (training.seq_len = {length})."
                yield "samples.prompts", text


@rule("dataset")
def dataset(context: Context) -> Iterator[Problem]:
    yield from _sources(context, "dataset", context.job.dataset)
    dataset = context.job.dataset
    for number, stage in enumerate(dataset.stages):
        if len(stage.weights) != len(dataset.sources) or not any(stage.weights):
            text = f"must be {len(dataset.sources)} weights, one for each of dataset.sources, not all 0."
            yield f"dataset.stages.{number}.weights", text


@rule("validation")
def validation(context: Context) -> Iterator[Problem]:
    validation = context.job.validation
    if validation.freq > 0 and validation.holdout == 0:
        if validation.sources or context.is_set("validation.source"):
            yield from _sources(context, "validation", validation)
        else:
            yield "validation.freq", "needs validation.holdout, such as 0.01, or a validation.source of its own."
    keys = _source_keys(context, "validation") + ["validation.sources"] * bool(validation.sources)
    if validation.freq == 0 and not context.is_set("validation.freq"):  # a 0 that the job file sets is intended
        for key in ["validation.holdout"] if validation.holdout > 0 else keys[:1]:
            yield key, "has no effect, because validation.freq is left out, which means 0: no validation. Set both."
    for key in keys if validation.holdout > 0 else ():
        yield key, "is not used beside validation.holdout, which reads [dataset]. Set one of them."


def _source_keys(context: Context, section: str) -> list[str]:
    """Keys of one source that were set. A resolved job file names each key: there, a default counts as left out."""
    values, fields = getattr(context.job, section), type(getattr(context.job, section)).model_fields
    keys = {f"{section}.{name}": name for name in DataSource.model_fields if name in fields}
    differs = {key for key, name in keys.items() if getattr(values, name) != fields[name].default}
    return [key for key in keys if key in differs or context.origins.get(key) == COMMAND_LINE]


# Key -> the sources that read it, for keys that some sources do not read. `shards` is among them, because a job file
# often keeps its keys after its text was prepared.
_USERS = {
    "path": ("jsonl", "text", "parquet", "arrow", "shards", "huggingface"),
    "config": ("huggingface", "c4", "shards"),
    "split": ("huggingface", "c4", "arrow", "shards"),
    "streaming": ("huggingface", "c4", "shards"),
}


def _sources(context: Context, section: str, dataset: Dataset | Validation) -> Iterator[Problem]:
    """What is wrong with the keys of sources, or about the places that their documents come from."""
    for key in _source_keys(context, section) if dataset.sources else ():
        yield key, f"is not used beside [[{section}.sources]]. Write it into each table that it is for."
    for number, source in enumerate(dataset.sources or (dataset,)):
        prefix = f"{section}.sources.{number}" if dataset.sources else section
        unused = [name for name, users in _USERS.items() if source.source not in users]
        if wrong := [name for name in unused if getattr(source, name) != type(source).model_fields[name].default]:
            yield f"{prefix}.source", f"does not use {wrong[0]}: name another source, or leave it out."
            continue
        try:
            find_files(source)
        except UserError as error:
            yield f"{prefix}.source", f"{error}.".replace("dataset.", f"{prefix}.", 1)
    if dataset.sources and not any(source.weight for source in dataset.sources):
        yield f"{section}.sources.0.weight", "is 0, as that of each source; at least one must be above 0."


# -------------------------------------------------------------------------------------------------------------- outputs


@rule("job.dump_folder", "checkpoint.folder")
def output_folders(context: Context) -> Iterator[Problem]:
    folder, checkpoint = context.run.dump_folder.absolute(), context.job.checkpoint
    if problem := not_writable(folder) or _wrong_kind(folder):
        yield "job.dump_folder", problem
    elif checkpoint.enable and (problem := not_writable(Path(os.path.normpath(folder / checkpoint.folder)))):
        yield "checkpoint.folder", problem
    if os.path.normpath(checkpoint.folder) in (".", "final", "final_hf", *FILES):
        yield "checkpoint.folder", "is where a run writes other outputs. Choose a folder for the checkpoints alone."


def _wrong_kind(folder: Path) -> str | None:
    """Which output of a run a folder or a file is in the way of."""
    for name in FILES:
        path = folder / name
        # To open a pipe would wait for a reader.
        if os.path.exists(path) and (path.is_dir() != (name in FOLDERS) or path.is_fifo()):
            return f"{path} is in the way of a run, which writes {'files there' if name in FOLDERS else 'it'}. Move it."
    return None


@rule("metrics")
def writers(context: Context) -> Iterator[Problem]:
    metrics = context.job.metrics
    if metrics.enable_wandb and find_spec("wandb") is None:
        yield "metrics.enable_wandb", "needs the package wandb: pip install 'titanlite[wandb]'."
    for name in dict.fromkeys(metrics.writers):
        if metrics.writers.count(name) > 1:
            yield "metrics.writers", f"names {shown(name)} twice. Name each writer once."
        try:
            load_writer(name)
        except UserError as error:
            yield "metrics.writers", str(error), "CONTRIBUTING.md says how one is made."


@rule("checkpoint", "job.dump_folder")
def initial_weights(context: Context) -> Iterator[Problem]:
    checkpoint, folder = context.job.checkpoint, context.run.checkpoint_folder
    resumes = os.path.isdir(folder) and any(folder.glob("step-*"))  # then initial_load_path is not read
    if checkpoint.enable and not resumes and not os.path.isdir(checkpoint.initial_load_path or "."):
        yield "checkpoint.initial_load_path", "is no folder; the folder of a checkpoint is needed."
    if checkpoint.initial_load_in_hf and checkpoint.initial_load_path is None:
        yield "checkpoint.initial_load_in_hf", "says how to read checkpoint.initial_load_path, which is left out."
