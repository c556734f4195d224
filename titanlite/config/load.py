"""A job file plus the command line, as one validated `JobConfig`.

Invariant: every mistake is collected and reported once, together, and nothing but files is read. The command line wins
over the file, the file over the schema's defaults. May import tomli, tomli_w, pydantic, tyro and titanlite.config.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import textwrap
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli
import tomli_w
from pydantic import BaseModel, ValidationError

from titanlite.config.errors import UserError
from titanlite.config.schema import JobConfig, Section

PACKAGE = Path(__file__).resolve().parents[1]
JOB_FILES = (PACKAGE / "train_configs").resolve()  # in the repository a link to the folder beside the package
DEFAULT_JOB_FILE = "debug_model.toml"
COMMAND_LINE = "command line"
CONFIG_FILE = "job.config_file"

SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in JobConfig.model_fields.items()}  # type: ignore[misc]
KEYS: dict[str, Any] = {
    f"{name}.{key}": field for name, section in SECTIONS.items() for key, field in section.model_fields.items()
}


@dataclasses.dataclass(frozen=True)
class Draft:
    """What was read, mistakes included.

    Attributes:
        job: A valid job: each wrong value is replaced by its default, so that rules that span keys can still run.
        errors: One readable block for each mistake.
        invalid: "section.key" of each value in `job` that is not what the user wrote.
        origins: "section.key" -> where its value was set (the file or the command line); defaults are absent.
    """

    job: JobConfig
    errors: list[str]
    invalid: frozenset[str]
    origins: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Option:
    """One `--section.key words...` of the command line; `key` has underscores and no "no_"."""

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
    draft = read_job(argv)
    if draft.errors:
        raise UserError(report(draft.errors))
    return draft.job


def report(errors: Sequence[str]) -> str:
    """All blocks under one heading."""
    heading = "1 mistake in the job:" if len(errors) == 1 else f"{len(errors)} mistakes in the job:"
    return "\n".join([heading, *errors, "`titanlite train --help` explains every key."])


def block(origin: str, what: str, *sentences: str) -> str:
    """One mistake: where it stands and what was found, then what is allowed and the remedy."""
    text = textwrap.fill(" ".join(sentences), 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {origin}: {what}\n{text}"


def shown(value: object) -> str:
    """A value as it would be written in TOML, which has no word for none."""
    if value is None:
        return "none"
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)


def read_job(argv: Sequence[str]) -> Draft:
    """Read everything and collect the mistakes. Exits 0 after printing the help when `argv` asks for it."""
    options, strays, errors = _split(argv)
    chosen = [option.words for option in options if option.key == CONFIG_FILE]
    path, raw, file_errors = _read_file(chosen[-1][0] if chosen and chosen[-1] else None)
    unreadable = raw is None
    raw, unknown = _dropunknown(raw or {}, str(path))
    errors = file_errors + unknown + errors

    origins = {f"{section}.{key}": str(path) for section, table in raw.items() for key in table}
    if path is not None:
        raw.setdefault("job", {}).setdefault("config_file", str(path))
    if any(word in ("-h", "--help") for word in argv):
        from titanlite.config.help import print_help

        print_help(_validate(raw, {})[0] if chosen else JobConfig(), strays)
    errors += [block(COMMAND_LINE, word, _misplaced(word)) for word in strays]

    values, invalid, value_errors = _parse(options)
    if CONFIG_FILE in values and path is not None:
        del values[CONFIG_FILE]  # already there; a resolved copy keeps the name of its original
    for key, value in values.items():
        section, name = key.split(".")
        raw.setdefault(section, {})[name] = value
        origins[key] = COMMAND_LINE
    job, wrong, schema_errors = _validate(raw, origins)
    if not job.job.dump_folder:
        folder = f"outputs/{Path(job.job.config_file or DEFAULT_JOB_FILE).stem}"
        job = job.model_copy(update={"job": job.job.model_copy(update={"dump_folder": folder})})
    invalid = frozenset(KEYS) - frozenset(values) if unreadable else invalid | wrong
    return Draft(job, errors + value_errors + schema_errors, invalid, origins)


# ------------------------------------------------------------------------------------------------------------- the file


def find_job_file(name: str) -> Path | None:
    """`name` as given, in ./train_configs, or in titanlite's own train_configs; the suffix .toml may be left out."""
    name = os.path.expanduser(name)
    for folder in (Path(), Path("train_configs"), JOB_FILES):
        for candidate in (folder / name, folder / f"{name}.toml"):
            if os.path.isfile(candidate):  # Path.is_file raises where the name is too long
                return candidate
    return None


def _read_file(name: str | None) -> tuple[Path | None, dict[str, Any] | None, list[str]]:
    """The located file and its content; None instead of a content that cannot be had, and why."""
    name = DEFAULT_JOB_FILE if name is None else name
    path = find_job_file(name)
    if path is None:
        known = sorted(file.stem for file in JOB_FILES.glob("*.toml"))
        text = f"no such file here, in ./train_configs/ or in {JOB_FILES}/."
        hint = f"Known there: {', '.join(known)}." if known else ""
        return None, None, [block(COMMAND_LINE, f"{CONFIG_FILE} = {shown(name)}", text, hint)]
    try:
        return path, tomli.loads(path.read_text(encoding="utf-8-sig")), []
    except (OSError, UnicodeDecodeError) as error:
        return path, None, [block(str(path), "cannot be read", f"{error}. A job file is a TOML file in UTF-8.")]
    except (ValueError, RecursionError) as error:  # the parser's own, a number of 5,000 digits, or lists 400 deep
        return path, None, [block(str(path), "not valid TOML", f"{error}.")]


def _dropunknown(raw: dict[str, Any], origin: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    known: dict[str, dict[str, Any]] = {}
    errors: list[str] = []
    for section, table in raw.items():
        if section not in SECTIONS and isinstance(table, dict):
            near = difflib.get_close_matches(section, SECTIONS, n=1)
            hint = f"did you mean [{near[0]}]?" if near else f"sections are {', '.join(SECTIONS)}."
            errors.append(block(origin, f"[{section}]", "unknown section;", hint))
        elif section not in SECTIONS:
            errors.append(block(origin, f"{section} = {shown(table)}", unknown("", section)))
        elif not isinstance(table, dict):
            text = f"must be a table: write [{section}] on a line of its own, and its keys below."
            errors.append(block(origin, f"{section} = {shown(table)}", text))
        else:
            fields = SECTIONS[section].model_fields
            table = SECTIONS[section].without_dropped(table)
            known[section] = {key: value for key, value in table.items() if key in fields}
            errors += [
                block(origin, f"{section}.{key} = {shown(value)}", unknown(section, key))
                for key, value in table.items()
                if key not in fields
            ]
    return known, errors


def unknown(section: str, key: str) -> str:
    """What to say about an unknown key: the nearest known one, wherever it lives."""
    if section in SECTIONS and key in SECTIONS[section].dropped:
        return "is no longer a key, because nothing read it. Remove it."
    section = section if section in SECTIONS else next(iter(difflib.get_close_matches(section, SECTIONS, n=1)), "")
    near = [known for known in KEYS if known.endswith(f".{key}")]
    if not 1 <= len(near) <= 3:
        near = [f"{section}.{name}" for name in difflib.get_close_matches(key, _names(section), n=1)]
    if not near:
        elsewhere = difflib.get_close_matches(key, {known.split(".")[1] for known in KEYS}, n=1)
        near = [known for known in KEYS if known.split(".")[1] in elsewhere]
    if near:
        return f"unknown key; did you mean {' or '.join(near[:3])}?"
    return f"unknown key; [{section}] has {', '.join(_names(section))}." if section else "unknown key."


def _names(section: str) -> list[str]:
    return list(SECTIONS[section].model_fields) if section in SECTIONS else []


# ----------------------------------------------------------------------------------------------------- the command line


def _split(argv: Sequence[str]) -> tuple[list[_Option], list[str], list[str]]:
    """Options with the words after each, words that belong to no option, and an error for each unknown option."""
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
                hint = unknown(section, name) if name else unknown("", section)
            errors.append(block(COMMAND_LINE, flag, hint))
        else:
            options.append(_Option(flag, key, words, negated))
    return options, strays, errors


def _misplaced(word: str) -> str:
    """What to say about a word that belongs to no option."""
    if word.endswith(".toml") or find_job_file(word):
        return f"belongs to no option; did you mean --{CONFIG_FILE} {word}?"
    return "expected an option such as --training.steps 100."


def _parse(options: Sequence[_Option]) -> tuple[dict[str, Any], frozenset[str], list[str]]:
    """Values of the options by key, the keys whose value could not be converted, and why."""
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
            errors.append(block(COMMAND_LINE, found, _must_be(SECTIONS[section], name)))
    invalid = frozenset(option.key for option in options) - frozenset(values)
    return values, invalid, errors


def _value(option: _Option) -> Any:
    """The words as a job file would hold them; whether the value is allowed is for the schema to say.

    Raises:
        ValueError: no number where one is needed, no word at all, or no UTF-8.
    """
    section, name = option.key.split(".")
    schema = json_schema(SECTIONS[section])["properties"][name]
    kinds = [kind.get("type") for kind in schema.get("anyOf", [schema])]
    "".join(option.words).encode()
    if "array" in kinds:
        return option.words
    (word,) = option.words
    if word == "None" and "null" in kinds:  # as the help writes it
        return None
    return int(word) if "integer" in kinds else float(word) if "number" in kinds else word


def on_command_line(annotation: Any) -> bool:
    """False for tables within a section: they are written in the file only."""
    return table_within(annotation) is None


def is_flag(key: str) -> bool:
    return KEYS[key].annotation in (bool, bool | None)


# ----------------------------------------------------------------------------------------------------------- the schema


def _validate(raw: dict[str, dict[str, Any]], origins: dict[str, str]) -> tuple[JobConfig, frozenset[str], list[str]]:
    """The job with each wrong value replaced by its default, the keys of those, and an error for each."""
    sections: dict[str, Section] = {}
    invalid: set[str] = set()
    errors: list[str] = []
    for name, table in raw.items():
        try:
            sections[name] = SECTIONS[name].model_validate(table)
        except ValidationError as failure:
            wrong: set[str] = set()
            for error in failure.errors(include_url=False):
                path = ".".join([name, *map(str, error["loc"])])
                key = ".".join(path.split(".")[:2])
                wrong.add(key)
                origin = origins.get(key, name)
                errors.append(block(origin, f"{path} = {shown(error['input'])}", explain(SECTIONS[name], error)))
            valid = {key: value for key, value in table.items() if f"{name}.{key}" not in wrong and name not in wrong}
            sections[name] = SECTIONS[name].model_validate(valid)
            invalid |= wrong
    return JobConfig(**sections), frozenset(invalid), errors  # type: ignore[arg-type]


def explain(model: type[BaseModel], error: Any) -> str:
    """What is allowed at the place of a pydantic error, which may be in a table within `model`."""
    name = str(error["loc"][0])
    for part in error["loc"][1:]:
        inner = table_within(model.model_fields[name].annotation) if name in model.model_fields else None
        if inner is not None and isinstance(part, str):
            model, name = inner, part
    if error["type"] == "missing":
        return f"is missing. {model.model_fields[name].description}"
    if error["type"] == "extra_forbidden" and name in getattr(model, "dropped", {}):
        return "is no longer a key, because nothing read it. Remove it."
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, model.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(model.model_fields)}."
        return f"unknown key; {hint}"
    if error["type"] == "value_error":  # a validator of ours: its message is the rule
        text = error["msg"].removeprefix("Value error, ")
        return f"{text}. {model.model_fields[name].description if name in model.model_fields else ''}"
    return _must_be(model, name, isinstance(error["loc"][-1], int))


def table_within(annotation: Any) -> type[BaseModel] | None:
    """The model of a list of tables such as tuple[DataSource, ...]."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next(filter(None, map(table_within, typing.get_args(annotation))), None)


def _must_be(model: type[BaseModel], name: str, within: bool = False) -> str:
    """What is allowed for a field, or within the list that it is, from its schema, and its help text."""
    schema = json_schema(model)["properties"][name]
    return f"must be {_allowed(schema['items'] if within else schema)}. {model.model_fields[name].description or ''}"


@functools.cache
def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a section."""
    return model.model_json_schema()


def _allowed(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_allowed(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(shown(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"a list, each {_allowed(schema.get('items', {}))}"
    if "$ref" in schema:
        return "a table"
    kinds = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a text"}
    limits = {"exclusiveMinimum": "greater than", "minimum": "at least", "exclusiveMaximum": "less than"}
    limits |= {"maximum": "at most", "pattern": "matching"}
    rules = [f"{words} {schema[name]}" for name, words in limits.items() if name in schema]
    return f"{kinds.get(schema.get('type', ''), 'as described')} {' and '.join(rules)}".strip()


# ---------------------------------------------------------------------------------------------------- writing and paths


def dump_config(job: JobConfig) -> str:
    """The job as TOML; a file with this text loads to an equal `JobConfig`."""
    return tomli_w.dumps(job.model_dump(exclude_none=True))


def resolve_path(path: str) -> Path:
    """A relative path in the current folder if it exists there, else relative to titanlite's own folder."""
    here = Path(os.path.expanduser(path))
    return here if here.is_absolute() or here.exists() else PACKAGE / here
