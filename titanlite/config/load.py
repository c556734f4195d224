"""Load a job from a job file and the command line.

A job is the complete configuration of a training run. The command line takes precedence over the
job file, and the job file over the defaults of the schema.

Invariant: all mistakes are collected and reported together. Loading a job only reads files and
never writes any.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import typing
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from pydantic.fields import FieldInfo

from titanlite.config.errors import UserError
from titanlite.config.files import read_file
from titanlite.config.mistakes import (
    COMMAND_LINE,
    ConfigError,
    Mistake,
    describe_unknown_name,
    find_table_model,
    find_types,
    format_value,
)
from titanlite.config.other_formats import parse_toml
from titanlite.config.registry import load_plugins, require_plugins
from titanlite.config.schema import (
    LENGTH_KEYS,
    RENAMED_KEYS,
    SECTIONS,
    JobConfig,
    list_keys,
    rename_keys,
)
from titanlite.config.storage import get_local_copy

PACKAGE = Path(__file__).resolve().parents[1]
JOB_FILES = (PACKAGE / "train_configs").resolve()  # a link to the folder in the repository
DEFAULT_JOB_FILE = "debug_model.toml"
MAX_JOB_FILE_BYTES = 1 << 22  # a mixture of 10,000 sources takes 1 MB
CONFIG_FILE = "job.config_file"
PLUGINS = "job.plugins"
DEFAULT = "default"

Tables = dict[str, Any]
"""Sections of a job as in a TOML job file: a table of keys and values for each section name."""


class ParsedJob(NamedTuple):
    """A job read from a job file and a command line, with the mistakes in them.

    Attributes:
        job: The job, in which invalid values are replaced by their defaults.
        mistakes: Descriptions of all invalid values. If there are any, do not use the job.
        origins: Where each "section.key" was set: the path of the job file, `COMMAND_LINE` or
            `DEFAULT`.
        lines: Number of the line in the job file that sets each key or table, by its full name.
        source: Path of the job file, or another description of where the job comes from, such as
            "--from".
    """

    job: JobConfig
    mistakes: Sequence[Mistake]
    origins: Mapping[str, str]
    lines: Mapping[str, int]
    source: str

    def error(self, mistakes: Sequence[Mistake]) -> ConfigError:
        """Create an error that lists `mistakes`, each with the file and line that sets its key."""
        origins = {"OMP_NUM_THREADS": "environment variable"}
        origins |= {name: f"{self.source}:{line}" for name, line in self.lines.items()}
        for key, origin in self.origins.items():
            if origin != self.source:
                origins[key] = origin
        return ConfigError(mistakes, self.source, origins)


class Arguments(NamedTuple):
    """Parsed command line of a command that takes the keys of a job as options.

    Attributes:
        values: Values by "section.key", with the types that they would have in a job file.
        help_topics: Words that follow `--help`. None if the command line has no `--help`.
        mistakes: Invalid options.
        renamed: Options that use the former name of a key.
    """

    values: dict[str, Any]
    help_topics: list[str] | None
    mistakes: list[Mistake]
    renamed: list[str]


def load_job(argv: Sequence[str], trusted: bool = True) -> JobConfig:
    """Load the job described by a command line such as `["--job.config_file", "llama_8b.toml"]`.

    This validates only single values. Use `titanlite.load_run.load_run` to also apply the rules
    that involve several keys, the number of ranks, or files.

    Args:
        argv: Words of the command line.
        trusted: Whether to import the plugins that the job file lists, which runs their code. If
            not, these plugins must already be loaded.

    Raises:
        UserError: If a value is invalid (the message lists all mistakes), the job file cannot be
            read, or a plugin is missing.
    """
    parsed = parse_job([str(word) for word in argv], trusted)
    if parsed.mistakes:
        raise parsed.error(parsed.mistakes)
    return parsed.job


def parse_job(
    argv: Sequence[str],
    trusted: bool = True,
    build_base: Callable[[], Mapping[str, Tables]] | None = None,
) -> ParsedJob:
    """Read the job file and the command line, and return the job and all mistakes in them.

    An invalid value does not raise an error. If `argv` contains `--help` and no invalid option,
    print the help and exit with code 0.

    Args:
        argv: Words of the command line.
        trusted: Whether to import the plugins that the job file lists, as in `load_job`.
        build_base: Function that returns sections with values to use instead of the schema
            defaults. `--from` uses it for values that follow from a pretrained model. It is called
            after plugins are imported. If it is None and `argv` names no job file, the default job
            file is read.

    Raises:
        UserError: If the job file cannot be read, or one of its plugins cannot be imported.
    """
    arguments = parse_arguments(argv)
    has_file = build_base is None or CONFIG_FILE in arguments.values
    tables: Tables = {}
    lines: dict[str, int] = {}
    source = "--from"
    if has_file:
        path = find_job_file(str(arguments.values.get(CONFIG_FILE, DEFAULT_JOB_FILE)))
        tables, lines = _read_job_file(path)
        source = str(path)

    _load_plugins_of(tables, arguments.values, trusted, source)
    arguments = parse_arguments(argv)  # parse again, because plugins have added keys
    renamed_in_file = rename_keys(tables)  # also replaces the former names in `tables`
    _warn_about_renamed_keys([*arguments.renamed, *renamed_in_file])
    origins = _find_origins(tables, arguments, source)

    # Add defaults after `_find_origins`, which counts all keys in `tables` as set by the job file.
    if has_file:
        _add_defaults(tables, {"job": {"config_file": source}})
    if build_base is not None:
        base = build_base()
        if has_file:  # the job file determines the output folder
            base = {name: table for name, table in base.items() if name != "job"}
        _add_defaults(tables, base)

    if arguments.help_topics is not None and not arguments.mistakes:
        from titanlite.config.help import print_help

        # If the user names a job file, the help shows its values as the defaults.
        job, _ = JobConfig.read(tables if CONFIG_FILE in arguments.values else {})
        print_help(job, arguments.help_topics)
        sys.exit(0)

    _set_values(tables, arguments.values)
    job, mistakes = JobConfig.read(tables)
    return ParsedJob(job, [*arguments.mistakes, *mistakes], origins, lines, source)


def _find_origins(tables: Tables, arguments: Arguments, source: str) -> dict[str, str]:
    """Return where each key was set, for error messages.

    Args:
        tables: Sections of the job file.
        arguments: The parsed command line.
        source: Path of the job file.

    Returns:
        `source`, `COMMAND_LINE` or `DEFAULT` for each "section.key".
    """
    origins = dict.fromkeys(list_keys(), DEFAULT)

    # The job file takes precedence over the defaults.
    for section, table in tables.items():
        if isinstance(table, dict):  # `JobConfig.read` reports a section that is not a table
            for key in table:
                origins[f"{section}.{key}"] = source

    # The command line takes precedence over the job file. Include its invalid options, because
    # errors about them must name the command line as well.
    invalid_options = [mistake.name for mistake in arguments.mistakes]
    for name in (*arguments.values, *invalid_options):
        if name != CONFIG_FILE:
            origins[name] = COMMAND_LINE
    return origins


def _add_defaults(tables: Tables, defaults: Mapping[str, Tables]) -> None:
    """Add the keys in `defaults` that are missing in `tables`, in place.

    If a section in `tables` is not a table, skip it. A later validation reports it.
    """
    for section, table in defaults.items():
        current = tables.setdefault(section, {})
        if isinstance(current, dict):
            tables[section] = table | current


def _set_values(tables: Tables, values: Mapping[str, Any]) -> None:
    """Override values of a job file with values of the command line, in place.

    If the command line sets the length of the run, ignore the length in the job file. For example,
    "training.steps" on the command line removes "training.tokens".

    Args:
        tables: Sections of the job file.
        values: Values of the command line by "section.key". None, as in `--training.tokens None`,
            unsets a key.
    """
    sets_length = any(values.get(f"training.{name}") is not None for name in LENGTH_KEYS)
    if sets_length:
        _remove_length(tables)

    for key, value in values.items():
        if key == CONFIG_FILE:
            continue  # `tables` already contains the path of the job file
        section, name = key.split(".")
        table = tables.setdefault(section, {})
        if isinstance(table, dict):  # `JobConfig.read` reports a section that is not a table
            table[name] = value


def _remove_length(tables: Tables) -> None:
    """Remove the keys that set the length of the run from a job, in place."""
    training = tables.get("training")
    if isinstance(training, dict):  # `JobConfig.read` reports a section that is not a table
        tables["training"] = {key: training[key] for key in training if key not in LENGTH_KEYS}


def _load_plugins_of(tables: Tables, values: Mapping[str, Any], trusted: bool, source: str) -> None:
    """Import the plugins that a job lists or, if it is not trusted, check that they are loaded.

    Importing a plugin runs its code, which an untrusted job file must not cause.

    Args:
        tables: Sections of the job file.
        values: Values of the command line by "section.key". Plugins listed there replace
            the plugins of the job file, and are always imported.
        trusted: Whether the job file may import plugins.
        source: Path of the job file, for error messages.
    """
    if PLUGINS in values:
        load_plugins(values[PLUGINS])
    elif trusted:
        load_plugins(_get_plugin_names(tables))
    else:
        require_plugins(_get_plugin_names(tables), source)


def _get_plugin_names(tables: Tables) -> list[str]:
    """Return the value of job.plugins in a job file, or [] if it is missing or invalid.

    A later validation reports an invalid value.
    """
    job_section = tables.get("job")
    names = job_section.get("plugins") if isinstance(job_section, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return []
    return names


def find_job_file(name: str) -> Path:
    """Return the path of the job file called `name`, which may omit the suffix .toml.

    Searches the current folder, ./train_configs, and the job files that are installed with
    titanlite, in this order.

    Raises:
        UserError: If there is no such file.
    """
    expanded = os.path.expanduser(name)
    for folder in (Path(), Path("train_configs"), JOB_FILES):
        for file in (folder / expanded, folder / f"{expanded}.toml"):
            if os.path.isfile(file):
                return file
    known = ", ".join(sorted(file.stem for file in JOB_FILES.glob("*.toml")))
    raise UserError(
        f"{CONFIG_FILE} = {format_value(name)} is not a file here, in ./train_configs/ or in "
        f"{JOB_FILES}/. Files there: {known}."
    )


def _read_job_file(path: Path) -> tuple[Tables, dict[str, int]]:
    """Read a job file.

    Returns:
        The sections of the job, and the line number of each key and table for error messages.

    Raises:
        UserError: If the file cannot be read or is not TOML.
    """
    content = read_file(path, MAX_JOB_FILE_BYTES)
    try:
        return parse_toml(content), find_key_lines(content.decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


_TABLE_HEADER = re.compile(r"\s*\[\s*([\w.-]+)\s*\]")  # [table]
_LIST_HEADER = re.compile(r"\s*\[\[\s*([\w.-]+)\s*\]")  # [[list]], which starts a table in a list
_ASSIGNMENT = re.compile(r"\s*([\w.-]+)\s*=")  # key = value


def find_key_lines(text: str) -> dict[str, int]:
    """Return the line number of each key and table in a TOML text, for error messages.

    If a name occurs several times, its first line counts. Tables in a list are numbered. For
    example, "[[dataset.sources]]" in line 7 and "path = 1" in line 8 give {"dataset.sources": 7,
    "dataset.sources.0": 7, "dataset.sources.0.path": 8}.

    Lines of a multi-line string that look like a key or a table are also included.
    """
    lines: dict[str, int] = {}
    list_lengths: Counter[str] = Counter()  # number of tables so far in each list
    table = ""  # full name of the current table, such as "dataset.sources.0"
    for number, line in enumerate(text.splitlines(), start=1):
        table_header = _TABLE_HEADER.match(line)
        list_header = _LIST_HEADER.match(line)
        assignment = _ASSIGNMENT.match(line)

        if table_header:  # [table]
            table = table_header[1]
            lines.setdefault(table, number)
        elif list_header:  # [[list]], which starts the next table in the list
            list_name = list_header[1]
            index = list_lengths[list_name]
            list_lengths[list_name] += 1
            table = f"{list_name}.{index}"
            lines.setdefault(list_name, number)
            lines[table] = number
        elif assignment:  # key = value
            key = assignment[1]
            full_name = f"{table}.{key}" if table else key
            lines.setdefault(full_name, number)
    return lines


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse a command line whose options set keys of a job, such as `--training.steps 100`.

    Invalid options are collected in the result instead of raising an error.
    """
    stray_words, options = _split_options(argv)
    mistakes = [_describe_stray_word(word) for word in stray_words]
    values: dict[str, Any] = {}
    renamed: list[str] = []
    help_topics = None

    keys = list_keys()
    for flag, words in options:
        if flag in ("-h", "--help"):
            help_topics = words
            continue

        # Find the key that the option sets. Former names of keys are still accepted.
        name = flag.removeprefix("--").replace("-", "_")
        if name in RENAMED_KEYS:
            renamed.append(name)
            name = RENAMED_KEYS[name]
        key, is_negated = _find_key(name, keys)

        # Convert the words after the option to the type of the key.
        try:
            annotation = _get_annotation(key, flag, keys)
            values[key] = _parse_option(key, is_negated, words, annotation)
        except ValueError as error:
            mistakes.append(Mistake(key, flag, value="", problem=str(error)))
    return Arguments(values, help_topics, mistakes, renamed)


def _describe_stray_word(word: str) -> Mistake:
    """Create the error for a word before the first option, such as a job file without a flag."""
    problem = f"is not an option. To pass a job file, write --{CONFIG_FILE} {word}."
    return Mistake(key="", name=word, value="", problem=problem)


def _split_options(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Split a command line into the words before the first option, and options with their words.

    For example, `x --a.b=1 --c 2 3` gives ["x"] and [("--a.b", ["1"]), ("--c", ["2", "3"])].
    """
    stray_words: list[str] = []
    options: list[tuple[str, list[str]]] = []
    for argument in argv:
        # Replace undecodable bytes, which cannot be written to config.toml.
        word = argument.encode(errors="replace").decode()
        if word.startswith("--") or word == "-h":
            flag, equals_sign, value = word.partition("=")
            values = [value] if equals_sign else []
            options.append((flag, values))
        elif options:
            _, last_values = options[-1]
            last_values.append(word)
        else:
            stray_words.append(word)
    return stray_words, options


def _find_key(name: str, keys: Collection[str]) -> tuple[str, bool]:
    """Return the key that an option sets, and whether the option negates it with "no_".

    For example, "training.steps" gives ("training.steps", False). Both "no_compile.enable" and
    "compile.no_enable" give ("compile.enable", True). The returned key may not exist.

    Args:
        name: Name of the option, without "--" and with "_" instead of "-".
        keys: Full names of all keys of a job.
    """
    if name in keys:
        return name, False

    # Remove "no_" from the start of the section or, if it is not there, from the start of the key.
    positive_key = re.sub(r"(^|\.)no_", r"\1", name, count=1)
    is_negated = positive_key != name
    return positive_key, is_negated


def _get_annotation(key: str, flag: str, keys: Mapping[str, FieldInfo]) -> Any:
    """Return the type annotation of the key that an option sets.

    Args:
        key: Name of the key, such as "compile.enable".
        flag: The option as written, such as "--no-compile.enable".
        keys: Pydantic field of each key of a job, by its full name.

    Raises:
        ValueError: If there is no such key. The message, such as "is unknown. Did you mean
            training.steps?", is meant to follow the flag.
    """
    if key in keys:
        return keys[key].annotation
    if key == "config":  # `--config FILE` of other trainers
        raise ValueError(f"is unknown. Did you mean {CONFIG_FILE}?")
    if key in SECTIONS:
        options = ", ".join(f"{flag}.{name}" for name in SECTIONS[key].model_fields)
        raise ValueError(f"is a section. Its keys are {options}.")
    raise ValueError(_describe_unknown_key(key))


def _describe_unknown_key(name: str) -> str:
    """Return an error message for an unknown key, which suggests keys with similar names."""
    return describe_unknown_name(JobConfig, name).problem


def _parse_option(key: str, is_negated: bool, words: list[str], annotation: Any) -> Any:
    """Return the value that an option gives to its key, such as 5 for `--training.steps 5`.

    Args:
        key: Key that the option sets, such as "training.steps".
        is_negated: Whether the option has a "no-", as in `--compile.no-enable`.
        words: Words that follow the option.
        annotation: Type annotation of the key.

    Raises:
        ValueError: If the option does not suit the type of the key, or has the wrong number of
            values. The message is the rest of a sentence that starts with the option.
    """
    is_boolean_key = bool in find_types(annotation)
    if is_boolean_key:
        return _parse_switch(key, is_negated, words)
    if is_negated:
        section, name = key.split(".")
        raise ValueError(_describe_unknown_key(f"{section}.no_{name}"))

    is_list_of_tables = find_table_model(annotation) is not None
    if is_list_of_tables:
        raise ValueError(f"is a list of tables. Write [[{key}]] in a job file.")
    return _parse_words(words, annotation)


def _parse_switch(key: str, is_negated: bool, words: list[str]) -> bool:
    """Return the value of a boolean key: True for `--compile.enable`, False for its negation.

    Raises:
        ValueError: If any words follow the option. The message is the rest of a sentence that
            starts with the option.
    """
    if words:
        section, name = key.split(".")
        raise ValueError(f"takes no value. Write --{key} or --{section}.no-{name}.")
    return not is_negated


def _parse_words(words: list[str], annotation: Any) -> Any:
    """Convert the words after an option to the value of its key.

    Args:
        words: The words. A key that is a list takes any number of words, and any other key takes
            one.
        annotation: Type annotation of the key.

    Raises:
        ValueError: If the key is not a list, and `words` does not contain exactly one word.
    """
    types = find_types(annotation)
    if typing.get_origin(annotation) is tuple:
        return [_parse_value(word, types) for word in words]
    if len(words) != 1:
        raise ValueError(f"must have one value, not {' '.join(words) or 'none'}.")
    return _parse_value(words[0], types)


def _warn_about_renamed_keys(former_keys: Collection[str]) -> None:
    """Warn about each renamed key that a job uses, with its current name. Only rank 0 logs.

    Args:
        former_keys: Keys that the job sets by their former names.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for key in former_keys:
        logging.getLogger("titanlite").warning(f"{key} is now called {RENAMED_KEYS[key]}.")


def _parse_value(word: str, types: set[type]) -> Any:
    """Convert a word of the command line to None, an integer or a float, if the key accepts it.

    Any other word is returned unchanged. A later validation reports it if it is invalid.

    Args:
        word: The word, such as "100".
        types: Types that the key accepts.
    """
    if word == "None" and type(None) in types:
        return None
    for number_type in (int, float):
        if number_type in types:
            try:
                return number_type(word)
            except ValueError:
                continue
    return word


def dump_config(job: JobConfig, without: Collection[str] = ()) -> str:
    """Format a job as the text of a TOML job file. Loading this text gives an equal job.

    Args:
        job: Job to format.
        without: Names of sections to omit.
    """
    return tomlkit.dumps(job.model_dump(exclude_none=True, exclude={*without}))


def resolve_path(path: str) -> Path:
    """Return the local path of a tokenizer.

    Args:
        path: Path or URL. A relative path that does not exist in the current folder is looked up in
            the titanlite package. A file at a URL is downloaded to the cache.

    Raises:
        UserError: If the URL cannot be read.
    """
    local_path = get_local_copy(os.path.expanduser(path), extra_file="tokenizer_config.json")
    packaged_path = PACKAGE / local_path
    return packaged_path if packaged_path.exists() and not local_path.exists() else local_path
