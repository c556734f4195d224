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
from titanlite.config.mistakes import WrongJob, block, report, shown, table_within, types_in, unknown
from titanlite.config.schema import KEYS, JobConfig

PACKAGE = Path(__file__).resolve().parents[1]
JOB_FILES = (PACKAGE / "train_configs").resolve()  # in the repository a link to the folder beside the package
DEFAULT_JOB_FILE = "debug_model.toml"
COMMAND_LINE = "command line"
MOST_BYTES = 1 << 22  # of a job file; one with a mix of 10,000 sources has 1 MB
CONFIG_FILE = "job.config_file"

# Keys of torchtitan's that are not ours, and of which each of its job files has some.
_OF_TORCHTITAN = frozenset(
    """
    model.name model.hf_assets_path model.tokenizer_path model.converters training.dataset training.batch_size
    training.compile metrics.save_tb_folder profiling.save_traces_folder job.print_args checkpoint.enable_checkpoint
    checkpoint.last_save_model_weights_only lr_scheduler.lr_min validation.enable quantize.linear debug.seed
    """.split()  # noqa: SIM905
)


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
    values, strays, errors = _command_line([word for word in argv if word not in ("-h", "--help")])
    is_named = CONFIG_FILE in values
    path, raw, problem = _read_file(str(values.pop(CONFIG_FILE, DEFAULT_JOB_FILE)))
    errors = [*problem, *errors]
    unreadable, raw = raw is None, raw or {}
    tables = {section: table for section, table in raw.items() if isinstance(table, dict)}
    advice = _advice(path, tables)
    origins = {f"{section}.{key}": str(path) for section, table in tables.items() for key in table}
    if path is not None and isinstance(raw.setdefault("job", {}), dict):  # a saved config.toml names its original
        raw["job"].setdefault("config_file", str(path))
    if {"-h", "--help"} & {*argv}:
        from titanlite.config.help import print_help

        print_help(_validate(raw, {}, str(path))[0] if is_named else JobConfig(), strays)
    errors += [block(COMMAND_LINE, word, _misplaced(word)) for word in strays]
    for key, value in values.items():
        section, name = key.split(".")
        table = raw.setdefault(section, {})
        if isinstance(table, dict):  # otherwise it is a mistake, which _validate reports
            table[name] = value
        origins[key] = COMMAND_LINE
    job, invalid, schema_errors = _validate(raw, origins, str(path))
    if unreadable:
        invalid = frozenset(KEYS) - frozenset(values)
    return Draft(with_folder(job), errors + schema_errors, invalid, origins, advice)


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


def _read_file(name: str) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """The file that was found, its content, and the errors. The content is None if it cannot be read."""
    path = find_job_file(name)
    if path is None:
        known = ", ".join(sorted(file.stem for file in JOB_FILES.glob("*.toml")))
        text = f"no such file here, in ./train_configs/ or in {JOB_FILES}/. Known there: {known}."
        return None, None, [block(COMMAND_LINE, f"{CONFIG_FILE} = {shown(name)}", text)]
    try:
        return path, tomli.loads(read_file(path, MOST_BYTES).decode("utf-8-sig")), []
    except (UserError, UnicodeDecodeError) as error:
        reason = str(error).rstrip(".")
        return path, None, [block(str(path), "cannot be read", f"{reason}. A job file is a TOML file in UTF-8.")]
    except (ValueError, RecursionError) as error:  # bad TOML, a number of 5,000 digits, or lists 400 deep
        return path, None, [block(str(path), "not valid TOML", f"{error}.")]


def _advice(path: Path | None, tables: dict[str, dict[str, Any]]) -> str:
    """The advice about a file that is torchtitan's. Empty if it is ours."""
    keys = {f"{section}.{key}" for section, table in tables.items() for key in table}
    if not keys & _OF_TORCHTITAN and tables.get("model", {}).get("flavor") not in ("8B", "70B", "405B"):
        return ""
    return f"{path} looks like a job file of torchtitan's; `titanlite migrate {path}` converts it."


# ----------------------------------------------------------------------------------------------------- the command line


def _command_line(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """The values of the options by key, as a job file would have them; the words that belong to no option; and an error
    for each option that is unknown or has too many or too few words."""
    options: list[tuple[str, list[str]]] = []
    strays: list[str] = []
    if odd := [word for word in argv if word != word.encode(errors="ignore").decode()]:
        raise UserError(f"{shown(odd[0])} is no text in UTF-8.")
    for word in argv:
        flag, has_value, value = word.partition("=")
        if word.startswith("--"):
            options.append((flag, [value] if has_value else []))
        elif options and _takes(_key_of(options[-1][0]), options[-1][1]):
            options[-1][1].append(word)
        else:
            strays.append(word)
    values: dict[str, Any] = {}
    errors: list[str] = []
    for flag, words in options:
        key = _key_of(flag)
        section, name = key.split(".", 1)
        no = key not in KEYS and name.startswith("no_")
        field = KEYS.get(f"{section}.{name.removeprefix('no_')}" if no else key)
        kinds = types_in(field.annotation) if field else set()
        if field and table_within(field.annotation):
            errors.append(block(COMMAND_LINE, flag, f"is a list of tables: write [[{key}]] in the job file."))
        elif not field or (no and bool not in kinds):
            errors.append(block(COMMAND_LINE, flag, unknown(JobConfig, section, name)))
        elif bool in kinds and words:
            text = f"takes no value: write --{section}.{name} for true, --{section}.no-{name} for false."
            errors.append(block(COMMAND_LINE, " ".join([flag, *words]), text))
        elif bool in kinds:
            values[f"{section}.{name.removeprefix('no_')}" if no else key] = not no
        elif not words and not _is_list(key):
            errors.append(block(COMMAND_LINE, f"{flag} (no value)", f"needs a value. {field.description}"))
        else:
            found = [_value(word, kinds) for word in words]
            values[key] = found if _is_list(key) else found[0]
    return values, strays, errors


def _key_of(flag: str) -> str:
    """The key that a flag stands for: it has underscores instead of hyphens. --config is another word for
    --job.config_file, which the message about it names."""
    key = flag[2:].replace("-", "_")
    return key if "." in key else f".{'config_file' if key == 'config' else key}"


def _is_list(key: str) -> bool:
    return key in KEYS and typing.get_origin(KEYS[key].annotation) is tuple


def _takes(key: str, words: list[str]) -> bool:
    """Whether one more word may follow an option that has `words` already."""
    return key not in KEYS or _is_list(key) or not words


def _misplaced(word: str) -> str:
    """The message about a word that belongs to no option."""
    if word.endswith(".toml") or find_job_file(word):
        return f"belongs to no option; did you mean --{CONFIG_FILE} {word}?"
    return "expected an option such as --training.steps 100."


def _value(word: str, kinds: set[type]) -> Any:
    """The value that a job file would have for a word, or the word itself, which the schema then refuses."""
    if word == "None" and type(None) in kinds:  # as the help writes it
        return None
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(word)
            except ValueError:
                continue
    return word


# ----------------------------------------------------------------------------------------------------------- the schema


def _validate(raw: dict[str, Any], origins: dict[str, str], file: str) -> tuple[JobConfig, frozenset[str], list[str]]:
    """The job with a default in place of each wrong value, the keys of these values, and an error for each."""
    try:
        return JobConfig.model_validate(raw), frozenset(), []
    except WrongJob as wrong:
        errors = [block(origins.get(each.key, file), each.found, each.remedy) for each in wrong.mistakes]
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
