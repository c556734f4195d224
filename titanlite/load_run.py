"""Load and validate a `Run` from a command line, or from a job that was created in Python.

A `Run` is a job (the complete configuration) together with the number of ranks.

Invariant: all mistakes that can be found before training are reported together, before any folder
is created. This usually takes a fraction of a second, because most rules do not import torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from functools import partial

from titanlite.config.errors import UserError
from titanlite.config.flavors import FITTED_TO_TOKENIZER
from titanlite.config.load import DEFAULT, ParsedJob, parse_job
from titanlite.config.mistakes import COMMAND_LINE, Mistake, format_value
from titanlite.config.run import MOST_RANKS, Run
from titanlite.config.schema import LENGTH_KEYS, SECTIONS, JobConfig, list_keys
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.lengths import DECAY, WARMUP, resolve_lengths
from titanlite.pretrained import build_job_tables, split_from_option
from titanlite.rules import (
    DATA_RULES,
    KEY_RULES,
    OUTPUT_RULES,
    Problem,
    check_dataset,
    check_tokenizer,
    check_warmup,
    make_mistake,
    suggest_tokenizer,
)

THREADS = "OMP_NUM_THREADS"
_LAUNCHER_VARIABLES = {
    "WORLD_SIZE": (1, MOST_RANKS),
    "RANK": (0, MOST_RANKS - 1),
    "LOCAL_WORLD_SIZE": (1, MOST_RANKS),
    "LOCAL_RANK": (0, MOST_RANKS - 1),
}
"""Environment variables that launchers set for each rank, with their smallest and largest value.
All are optional.
"""


def load_run(
    argv: Sequence[str], world_size: int, *, trusted: bool = True, trains: bool = True
) -> Run:
    """Load and validate the run that a command line describes.

    Args:
        argv: Options of `titanlite train`.
        world_size: Number of ranks, over all nodes.
        trusted: Whether to import the plugins that the job file lists, which runs their code.
        trains: Whether the run will train. If so, also check the output folder and the initial
            weights.

    Raises:
        UserError: If anything is invalid (the message lists all mistakes), or the model given by
            `--from` is not available.
    """
    parsed_job = parse_train_options(argv, trusted)
    return build_run(parsed_job, world_size, check_outputs=trains)


def parse_train_options(argv: Sequence[str], trusted: bool = True) -> ParsedJob:
    """Parse the options of `titanlite train` into a job and a list of all mistakes.

    With `--from MODEL`, the model determines the default values of the job.
    """
    pretrained_model, job_options = split_from_option(argv)
    build_base = None
    if pretrained_model is not None:
        # `parse_job` calls this after it has imported plugins, because the model may need them.
        build_base = partial(build_job_tables, pretrained_model)
    return parse_job(job_options, trusted, build_base)


def check_run(job: JobConfig, world_size: int) -> Run:
    """Validate a job that was created in Python, and return it as a run on `world_size` ranks.

    All values are validated again, in case `model_copy(update=...)` has set invalid ones.

    Raises:
        UserError: If anything is invalid. The message lists all mistakes.
    """
    parsed = ParsedJob(JobConfig.model_validate(job), (), {}, {}, "JobConfig")
    return build_run(parsed, world_size)


def load_data_job(argv: Sequence[str]) -> JobConfig:
    """Load a job for a command that only reads the training data, such as `titanlite prepare`.

    This validates individual values and the data in [dataset], but applies no other rules.

    Args:
        argv: Options of `titanlite train`.

    Raises:
        UserError: If anything is invalid. The message lists all mistakes.
    """
    parsed = parse_job(argv)
    run = Run(parsed.job)
    mistakes = list(parsed.mistakes)
    mistakes += [make_mistake(run, problem) for problem in check_dataset(run)]
    if mistakes:
        raise parsed.error(mistakes)
    return parsed.job


def build_run(parsed: ParsedJob, world_size: int, *, check_outputs: bool = True) -> Run:
    """Validate a parsed job for `world_size` ranks and return the resulting run.

    This loads the tokenizer, converts lengths in tokens to steps, and applies all rules of
    `titanlite.rules`.

    Args:
        parsed: The job and the mistakes found so far.
        world_size: Number of ranks, over all nodes.
        check_outputs: Whether to check the output folder and the initial weights.

    Raises:
        ConfigError: If anything is invalid. The message lists all mistakes.
    """
    # Fit the vocabulary size to the tokenizer, and convert lengths in tokens to steps.
    run_as_written, tokenizer_problems = _fit_to_tokenizer(Run(parsed.job, world_size))
    run, length_problems = resolve_lengths(run_as_written)

    # Check the run, except for sections in which a value was replaced.
    invalid_sections = _find_invalid_sections([*parsed.mistakes, *length_problems])
    rule_problems = _apply_rules(run, parsed, invalid_sections, check_outputs)

    # Report everything. The mistakes show lengths as the user wrote them, such as "2B" tokens, not
    # in steps.
    certain_length_problems = _omit_uncertain(length_problems, parsed.mistakes)
    problems = [*certain_length_problems, *tokenizer_problems, *rule_problems]
    mistakes = [*parsed.mistakes, *_check_environment()]
    mistakes += [make_mistake(run_as_written, problem) for problem in problems]
    if mistakes:
        raise parsed.error(mistakes)
    return run


def _omit_uncertain(length_problems: list[Problem], mistakes: Sequence[Mistake]) -> list[Problem]:
    """Return `length_problems`, or [] if they may only be consequences of other mistakes.

    Invalid values were replaced with defaults before lengths were converted from tokens to steps.
    If this affects a section such as [training], the problems may be wrong.
    """
    invalid_sections = _find_invalid_sections(mistakes)
    can_count_tokens = invalid_sections.isdisjoint(("model", "training", "parallelism", "dataset"))
    return length_problems if can_count_tokens else []


def _find_invalid_sections(errors: Sequence[Mistake | Problem]) -> set[str]:
    """Return the sections of the job that contain an invalid value, such as {"training"}.

    These values were replaced, for example with their defaults. Errors about unknown sections and
    keys are ignored, because these have no value.
    """
    known_names = {*SECTIONS, *list_keys()}
    return {error.key.partition(".")[0] for error in errors if error.key in known_names}


def _fit_to_tokenizer(run: Run) -> tuple[Run, list[Problem]]:
    """Check the tokenizer of a run, and fit the vocabulary size of a small test model to it.

    Returns:
        The run with this vocabulary size, and the problems with the tokenizer. If the tokenizer
        cannot be loaded, the run is unchanged.
    """
    try:
        tokenizer = load_tokenizer(run.tokenizer_path, run.job)
    except UserError as error:
        text = f"cannot be used: {str(error).rstrip('.')}{suggest_tokenizer(run)}."
        return run, [Problem("tokenizer.path", text)]
    run = Run(fit_vocab_size(run.job, tokenizer), run.world_size)
    return run, list(check_tokenizer(run, tokenizer))


def _apply_rules(
    run: Run, parsed: ParsedJob, invalid_sections: set[str], check_outputs: bool
) -> list[Problem]:
    """Apply the rules of `titanlite.rules` to a run and return all problems.

    Rules that read a section with an invalid value are skipped, so that they do not report problems
    with the value that replaces it.

    Args:
        run: The run.
        parsed: The parsed job that the run was built from.
        invalid_sections: Sections in which an invalid value was replaced.
        check_outputs: Whether to check the output folder and the initial weights.
    """
    # Each rule is a function, with the sections that it reads.
    rules = KEY_RULES | DATA_RULES
    if check_outputs:
        rules |= OUTPUT_RULES
    # The rule for the warmup also depends on which keys the command line sets.
    check_warmup_of_job = partial(check_warmup, is_preview=_is_preview(parsed))
    rules[check_warmup_of_job] = ("training", "lr_scheduler")

    problems: list[Problem] = []
    for check, sections in rules.items():
        if invalid_sections.isdisjoint(sections):
            problems += check(run)
    return problems


def fit_vocab_size(job: JobConfig, tokenizer: Tokenizer) -> JobConfig:
    """Set the vocabulary size of a small test model from the tokenizer.

    The size is rounded up to a multiple of 128, which suits matmuls and tensor parallelism. If the
    job sets `model.vocab_size` or trains a published architecture, return the job unchanged.
    """
    if job.model.vocab_size is not None or job.model.flavor not in FITTED_TO_TOKENIZER:
        return job
    vocab_size = math.ceil(tokenizer.vocab_size / 128) * 128
    return job.with_section("model", vocab_size=vocab_size)


def _is_preview(parsed: ParsedJob) -> bool:
    """Return whether a job is a preview: the first steps of the run in its job file.

    The command line of a preview sets the length of the run, for example `--training.steps 10`, but
    not the number of warmup or decay steps, which may then exceed this length. A job that is loaded
    from the config.toml of a run also counts as a preview, because the run may have been one.
    """
    origins = parsed.origins
    length_origins = {origins.get(f"training.{name}", DEFAULT) for name in LENGTH_KEYS}
    if COMMAND_LINE in length_origins:
        return COMMAND_LINE not in {origins.get(WARMUP), origins.get(DECAY)}
    # A config.toml sets the length, but its key job.config_file names the original job file.
    usual_origins = {DEFAULT, parsed.job.job.config_file}
    return not length_origins.issubset(usual_origins)


def _check_environment() -> list[Mistake]:
    """Check the environment variable OMP_NUM_THREADS.

    OpenMP would ignore an invalid value, so that all ranks would compete for all CPU cores.

    Returns:
        A list with one mistake, or [] if the variable is valid or not set.
    """
    threads = os.environ.get(THREADS) or "1"
    if re.fullmatch(r" *[1-9][0-9]{0,3} *(, *[1-9][0-9]{0,3} *)*", threads):
        return []
    problem = "must be a number of threads from 1, such as 8."
    return [Mistake(THREADS, THREADS, format_value(threads), problem)]


def read_world_size() -> int:
    """Return the number of ranks from the environment variable WORLD_SIZE, by default 1.

    Raises:
        UserError: If WORLD_SIZE or another variable that launchers set, such as RANK, is invalid.
    """
    values: dict[str, int] = {}
    for name, (smallest, largest) in _LAUNCHER_VARIABLES.items():
        values[name] = _read_integer(name, smallest, largest)

    rank = values["RANK"]
    world_size = values["WORLD_SIZE"]
    if rank >= world_size:
        raise UserError(f"RANK={rank} must be less than WORLD_SIZE={world_size}.")
    return world_size


def _read_integer(name: str, smallest: int, largest: int) -> int:
    """Return the value of an environment variable, or `smallest` if it is not set.

    Raises:
        UserError: If the value is not an integer from `smallest` to `largest`.
    """
    text = os.environ.get(name, str(smallest))
    try:
        value: int | None = int(text)
    except ValueError:
        value = None
    if value is None or not smallest <= value <= largest:
        raise UserError(f"{name}={text[:40]} must be an integer from {smallest} to {largest}.")
    return value
