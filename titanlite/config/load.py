"""Reads a job file and the command line into one validated `JobConfig`.

Invariant: all mistakes are collected and reported together, and only files are read. A value on the command line wins
over the file, and a value in the file wins over the default of the schema.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli
import tomlkit

from titanlite.config.errors import UserError
from titanlite.config.files import read_file
from titanlite.config.keys import KEYS, SECTIONS, is_flag, on_command_line
from titanlite.config.mistakes import WrongJob, block, json_schema, must_be, report, shown, unknown
from titanlite.config.schema import JobConfig

PACKAGE = Path(__file__).resolve().parents[1]
JOB_FILES = (PACKAGE / "train_configs").resolve()  # in the repository a link to the folder beside the package
DEFAULT_JOB_FILE = "debug_model.toml"
COMMAND_LINE = "command line"
MOST_BYTES = 1 << 22  # of a job file; one with a mix of 10,000 sources has 1 MB
CONFIG_FILE = "job.config_file"


@dataclasses.dataclass(frozen=True)
class Draft:
    """What was read, together with the mistakes in it.

    Attributes:
        job: A valid job. Each wrong value is replaced by its default, so that the rules that span keys can still be
            checked.
        errors: One readable block for each mistake.
        invalid: "section.key" of each value in `job` that differs from what the user wrote.
        origins: "section.key" -> where its value was set: the file or the command line. Keys with their default are
            absent.
        advice: What to do about the mistakes of the file as a whole. Mostly empty.
    """

    job: JobConfig
    errors: list[str]
    invalid: frozenset[str]
    origins: dict[str, str]
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class _Option:
    """One `--section.key words...` of the command line. `key` has underscores instead of hyphens, and no prefix
    "no_"."""

    flag: str
    key: str
    words: list[str]
    negated: bool

    def __str__(self) -> str:
        return " ".join([self.flag, *self.words])


def load_job(argv: Sequence[str]) -> JobConfig:
    """The job of a command line such as `["--job.config_file", "llama_8b.toml", "--training.steps", "100"]`.

    Raises:
        UserError: anything wrong, all mistakes in one message.
    """
    if isinstance(argv, str):
        raise UserError(f"{shown(argv)}: a list of words is needed, such as {shown(argv.split())}.")
    draft = read_job([str(word) for word in argv])  # a program may give numbers
    if draft.errors:
        raise UserError(report(draft.errors, draft.advice))
    return draft.job


def read_job(argv: Sequence[str]) -> Draft:
    """Reads everything and collects the mistakes. If `argv` asks for the help, it is printed and the process exits with
    0."""
    options, strays, errors = _split(argv)
    chosen = [option.words for option in options if option.key == CONFIG_FILE]
    path, raw, file_errors = _read_file(chosen[-1][0] if chosen and chosen[-1] else None)
    unreadable, raw = raw is None, raw or {}
    advice = _advice(path, raw)
    tables = {section: table for section, table in raw.items() if isinstance(table, dict)}
    origins = {f"{section}.{key}": str(path) for section, table in tables.items() for key in table}
    if path is not None:
        raw = {"job": {}, **raw}
        if isinstance(raw["job"], dict):
            raw["job"].setdefault("config_file", str(path))
    if any(word in ("-h", "--help") for word in argv):
        from titanlite.config.help import print_help

        print_help(_validate(raw, {}, str(path))[0] if chosen else JobConfig(), strays)
    errors = file_errors + errors + [block(COMMAND_LINE, word, _misplaced(word)) for word in strays]

    values, invalid, value_errors = _parse(options)
    if CONFIG_FILE in values and path is not None:
        del values[CONFIG_FILE]  # a saved config.toml names its original job file, and that name is kept
    for key, value in values.items():
        section, name = key.split(".")
        table = raw.setdefault(section, {})
        if isinstance(table, dict):  # otherwise it is a mistake, which _validate reports
            table[name] = value
        origins[key] = COMMAND_LINE
    job, wrong, schema_errors = _validate(raw, origins, str(path))
    invalid = frozenset(KEYS) - frozenset(values) if unreadable else invalid | wrong
    return Draft(with_folder(job), errors + value_errors + schema_errors, invalid, origins, advice)


def with_folder(job: JobConfig) -> JobConfig:
    """`job` with a folder of its outputs. If it names none: outputs/<name of the job file>, or outputs/python."""
    if job.job.dump_folder:
        return job
    folder = f"outputs/{Path(job.job.config_file or 'python').stem}"
    return job.model_copy(update={"job": job.job.model_copy(update={"dump_folder": folder})})


# ------------------------------------------------------------------------------------------------------------- the file


def find_job_file(name: str) -> Path | None:
    """The file `name` as given, in ./train_configs, or in titanlite's own train_configs. The suffix .toml may be
    missing."""
    name = os.path.expanduser(name)
    for folder in (Path(), Path("train_configs"), JOB_FILES):
        for candidate in (folder / name, folder / f"{name}.toml"):
            if os.path.isfile(candidate):  # Path.is_file raises if the name is too long
                return candidate
    return None


def _read_file(name: str | None) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """The file that was found, its content, and the errors. The content is None if it cannot be read."""
    name = DEFAULT_JOB_FILE if name is None else name
    path = find_job_file(name)
    if path is None:
        known = sorted(file.stem for file in JOB_FILES.glob("*.toml"))
        text = f"no such file here, in ./train_configs/ or in {JOB_FILES}/."
        hint = f"Known there: {', '.join(known)}." if known else ""
        return None, None, [block(COMMAND_LINE, f"{CONFIG_FILE} = {shown(name)}", text, hint)]
    try:
        return path, tomli.loads(read_file(path, MOST_BYTES).decode("utf-8-sig")), []
    except (UserError, UnicodeDecodeError) as error:
        reason = str(error).rstrip(".")
        return path, None, [block(str(path), "cannot be read", f"{reason}. A job file is a TOML file in UTF-8.")]
    except (ValueError, RecursionError) as error:  # bad TOML, a number of 5,000 digits, or lists 400 deep
        return path, None, [block(str(path), "not valid TOML", f"{error}.")]


# Keys of torchtitan's that are not ours, and of which each of its job files has some.
_OF_TORCHTITAN = frozenset(
    """
    model.name model.hf_assets_path model.tokenizer_path model.converters training.dataset training.batch_size
    training.compile metrics.save_tb_folder profiling.save_traces_folder job.print_args checkpoint.enable_checkpoint
    checkpoint.last_save_model_weights_only lr_scheduler.lr_min validation.enable quantize.linear debug.seed
    """.split()  # noqa: SIM905
)


def _advice(path: Path | None, raw: dict[str, Any]) -> str:
    """The advice about a file that is torchtitan's. Empty if it is ours."""
    keys = {f"{section}.{key}" for section, table in raw.items() if isinstance(table, dict) for key in table}
    model = raw.get("model")
    flavor = model.get("flavor") if isinstance(model, dict) else None
    if not keys & _OF_TORCHTITAN and flavor not in ("8B", "70B", "405B"):
        return ""
    return f"{path} looks like a job file of torchtitan's; `titanlite migrate {path}` converts it."


# ----------------------------------------------------------------------------------------------------- the command line


def _split(argv: Sequence[str]) -> tuple[list[_Option], list[str], list[str]]:
    """The options with the words after each, the words that belong to no option, and an error per unknown option."""
    options: list[_Option] = []
    strays: list[str] = []
    errors: list[str] = []
    words: list[str] | None = None  # of the option that is being read
    takes_one = False
    for word in argv:
        if word in ("-h", "--help"):
            continue
        if not word.startswith("--"):
            if words is None or (takes_one and words):
                strays.append(word)
            else:
                words.append(word)
            continue
        flag, has_value, value = word.partition("=")
        words = [value] if has_value else []
        section, _, name = flag[2:].replace("-", "_").partition(".")
        negated = f"{section}.{name}" not in KEYS and name.startswith("no_")
        key = f"{section}.{name.removeprefix('no_') if negated else name}"
        known = key in KEYS and on_command_line(KEYS[key].annotation) and (is_flag(key) or not negated)
        takes_one = known and typing.get_origin(KEYS[key].annotation) not in (tuple, list)
        if key in KEYS and not negated and not known:
            errors.append(block(COMMAND_LINE, flag, f"is a list of tables: write [[{key}]] in the job file."))
        elif not known:
            if not name and section in ("config", "config_file", "job"):
                hint = f"unknown option; did you mean --{CONFIG_FILE}?"
            else:
                hint = unknown(JobConfig, section if name else "", name or section)
            errors.append(block(COMMAND_LINE, flag, hint))
        else:
            options.append(_Option(flag, key, words, negated))
    return options, strays, errors


def _misplaced(word: str) -> str:
    """The message about a word that belongs to no option."""
    if word.endswith(".toml") or find_job_file(word):
        return f"belongs to no option; did you mean --{CONFIG_FILE} {word}?"
    return "expected an option such as --training.steps 100."


def _parse(options: Sequence[_Option]) -> tuple[dict[str, Any], frozenset[str], list[str]]:
    """The values of the options by key, the keys whose values could not be converted, and an error for each."""
    values: dict[str, Any] = {}
    errors: list[str] = []
    for option in options:
        section, name = option.key.split(".")
        if is_flag(option.key) and option.words:
            text = f"takes no value: write --{section}.{name} for true, --{section}.no-{name} for false."
            errors.append(block(COMMAND_LINE, str(option), text))
            continue
        try:
            values[option.key] = not option.negated if is_flag(option.key) else _value(option)
        except ValueError:
            found = f"{option.key} = {shown(' '.join(option.words))}" if option.words else f"{option.flag} (no value)"
            errors.append(block(COMMAND_LINE, found, must_be(SECTIONS[section], name)))
    invalid = frozenset(option.key for option in options) - frozenset(values)
    return values, invalid, errors


def _value(option: _Option) -> Any:
    """The value that a job file would have for these words. The schema checks later whether it is allowed.

    Raises:
        ValueError: a number is needed and the word is none, there is no word, or it is not UTF-8.
    """
    section, name = option.key.split(".")
    schema = json_schema(SECTIONS[section])["properties"][name]
    kinds = [kind.get("type") for kind in schema.get("anyOf", [schema])]
    "".join(option.words).encode()
    if "array" in kinds:
        return [int(word) for word in option.words] if schema["items"].get("type") == "integer" else option.words
    (word,) = option.words
    if word == "None" and "null" in kinds:  # as the help writes it
        return None
    if "integer" in kinds:
        return int(word)
    if "number" in kinds:
        return float(word)
    return word


# ----------------------------------------------------------------------------------------------------------- the schema


def _validate(raw: dict[str, Any], origins: dict[str, str], file: str) -> tuple[JobConfig, frozenset[str], list[str]]:
    """The job with a default in place of each wrong value, the keys of these values, and an error for each."""
    try:
        return JobConfig.model_validate(raw), frozenset(), []
    except WrongJob as wrong:
        errors = [mistake.block(origins.get(mistake.key, file)) for mistake in wrong.mistakes]
        invalid = frozenset(mistake.key for mistake in wrong.mistakes)
    valid: dict[str, dict[str, Any]] = {}
    for section, table in raw.items():
        if section not in invalid:
            valid[section] = {key: value for key, value in table.items() if f"{section}.{key}" not in invalid}
    return JobConfig.model_validate(valid), invalid & frozenset(KEYS), errors


# ---------------------------------------------------------------------------------------------------- writing and paths


def dump_config(job: JobConfig) -> str:
    """The job as TOML. A file with this text gives an equal `JobConfig` when it is loaded."""
    return tomlkit.dumps(job.model_dump(exclude_none=True))


def resolve_path(path: str) -> Path:
    """The path itself if it is absolute or exists in the current folder, otherwise the path within titanlite's own
    folder."""
    here = Path(os.path.expanduser(path))
    return here if here.is_absolute() or here.exists() else PACKAGE / here
