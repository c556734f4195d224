"""Describe invalid values: where they are set, what is wrong, and how to fix it.

Invariant: an invalid value gets the same message whether it comes from a job file, the command
line, Python, or another file. All mistakes in a job are reported together. `synonyms.toml` lists
the names that other trainers use for the titanlite keys.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from titanlite.config.errors import UserError
from titanlite.config.registry import SECTIONS

COMMAND_LINE = "command line"
UNKNOWN_NAME = "extra_forbidden"  # type of pydantic's error for an unknown name
REMOVED_NAME = "removed"  # for names that earlier versions of titanlite had
_SYNONYMS = Path(__file__).with_name("synonyms.toml")
# Parts of pydantic's messages, and what titanlite writes instead.
_PHRASES = {
    "Value error, ": "",
    "Input should be ": "must be ",
    "Tuple should ": "must ",
    "String should ": "must ",
    "Field required": "is required",
    "a valid integer": "an integer",
    "a valid string": "a string",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "a valid dictionary": "a table",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


class Mistake(NamedTuple):
    """One invalid value in a job, in the options of a command, or in a file.

    Attributes:
        key: "section.key", or only the section if all of it is invalid. Empty if the value belongs
            to no key.
        name: Name that the message uses, such as dataset.sources.0.path, [modle] or --step.
        value: The invalid value, as written in a job file. Empty if the message does not need it.
        problem: Rest of the sentence that starts with the name, such as "must be an integer."
        kind: Type of the pydantic error, such as `UNKNOWN_NAME`, or `REMOVED_NAME`.
    """

    key: str
    name: str
    value: str
    problem: str
    kind: str = ""

    def describe(self) -> str:
        """Return the error message, such as: training.steps must be an integer, got "five"."""
        if not self.value:
            return f"{self.name} {self.problem}"
        value = shorten(self.value)
        if not self.problem.startswith("must "):
            return f"{self.name} = {value} {self.problem}"
        # Insert the value at the end of the first sentence: "must be at least 1, got 0. Remove it."
        requirement, _, remedy = f"{self.problem} ".partition(". ")
        return f"{self.name} {requirement.rstrip()}, got {value}. {remedy}".rstrip()


class ConfigError(UserError):
    """Raised if a job, or the options of a command, are invalid.

    The message lists all mistakes, one per line.

    Args:
        mistakes: All mistakes.
        source: Path of the file that contains the values, or another description of where they come
            from.
        origins: "section.key" -> file and line that set the key, or "command line". For all other
            keys, the message names `source`.
    """

    def __init__(
        self, mistakes: Sequence[Mistake], source: str, origins: Mapping[str, str] | None = None
    ) -> None:
        origins = origins or {}
        lines = []
        for mistake in mistakes:
            # The name is more precise than the key, unless it is a flag or the name of a section.
            origin = _find_origin(mistake.name, origins) or _find_origin(mistake.key, origins)
            lines.append(f"{origin or source}: {mistake.describe()}")
        if len(lines) > 1:
            lines = [f"{len(lines)} mistakes:", *(f"  {line}" for line in lines)]
        super().__init__("\n".join(lines))
        self.mistakes = mistakes


def _find_origin(name: str, origins: Mapping[str, str]) -> str | None:
    """Return the file and line that set a key, for example "train.toml:14".

    If this is unknown, return the line of the innermost known table around the key, or None.

    Args:
        name: Full name of the key, such as "dataset.sources.0.path".
        origins: File and line of each key and table, by its full name.
    """
    while name:
        if name in origins:
            return origins[name]
        name, _, _ = name.rpartition(".")
    return None


def format_value(value: object) -> str:
    """Format a value as in a TOML file. None, which TOML does not have, becomes "none"."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, default=_convert_to_json, ensure_ascii=False)


def _convert_to_json(value: object) -> object:
    """Convert a table to its keys without defaults, and any other object to a string."""
    return value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else str(value)


def build_mistake(root: type[BaseModel], error: ErrorDetails) -> Mistake:
    """Convert a pydantic error to a `Mistake`, which has a clearer message.

    Args:
        root: Model that was validated: a job, the options of a command, or the content of a file.
        error: An item of `ValidationError.errors()`.
    """
    location = [str(part) for part in error["loc"]]  # such as ["dataset", "sources", "0", "path"]
    value = error["input"]
    kind = error["type"]
    if kind == UNKNOWN_NAME:
        # This is None if a file uses the name of a Python field instead of its alias.
        unknown = _find_unknown_name(root, location)
        if unknown is not None:
            return _describe_unknown(unknown, root, location, value)

    problem = _rephrase(error["msg"])
    hint = _suggest_value(problem, value, location)  # starts with a space, or is empty
    return Mistake(
        key=_get_key(location),
        name=_get_displayed_name(root, location),
        value="" if kind == "missing" else format_value(value),
        problem=f"{problem}.{hint}",
        kind=kind,
    )


def _get_displayed_name(root: type[BaseModel], location: list[str]) -> str:
    """Return the name of a value in messages: "training.steps" in a job, "--step" for an option.

    Args:
        root: Model of a job, the options of a command, or the content of a file.
        location: Names that lead to the value, such as ["training", "steps"].
    """
    # Only the base class of command options, which this module cannot import, has this method.
    get_option_name = getattr(root, "name_on_command_line", None)
    return get_option_name(location[0]) if get_option_name else ".".join(location)


def describe_unknown_name(root: type[BaseModel], name: str) -> Mistake:
    """Describe the mistake that a name is unknown, and suggest a similar name.

    Args:
        root: Model of a job, the options of a command, or the content of a file.
        name: Name that does not exist in `root`, such as "training.stepz".
    """
    location = name.split(".")
    unknown = _find_unknown_name(root, location)
    if unknown is not None:
        return _describe_unknown(unknown, root, location, None)

    # The name exists, but only in a list of tables, such as "dataset.sources.path".
    key = _get_key(location)
    problem = f"belongs to a list of tables. Write [[{key}]] in a job file."
    return Mistake(key, name, value="", problem=problem, kind=UNKNOWN_NAME)


def _get_key(location: list[str]) -> str:
    """Return the key at a location, such as "training.steps" for ["training", "steps"]."""
    return ".".join(location[:2])


class _UnknownName(NamedTuple):
    """A name that does not exist.

    Attributes:
        name: The name, such as "stepz".
        parents: Names of the tables that contain it, such as ["training"].
        table: Pydantic model of the innermost of these tables, such as `Training`. If the name
            follows a key that is not a table, as in "training.steps.seed", this is `BaseModel`.
    """

    name: str
    parents: list[str]
    table: type[BaseModel]


def _find_unknown_name(root: type[BaseModel], location: list[str]) -> _UnknownName | None:
    """Return the first unknown name in a location, or None if all names are known.

    For example, "pth" is unknown in ["dataset", "sources", "0", "pth"], where "0" is the index of a
    table in the list `dataset.sources`.

    Args:
        root: Model of a job, the options of a command, or the content of a file.
        location: Names of the tables around a value, and the name of the value.
    """
    annotation: Any = root  # type of the value that contains `name`
    for depth, name in enumerate(location):
        # A value that is not a table contains no names, like a model without fields.
        table = find_table_model(annotation) or BaseModel
        if name.isdecimal() and _is_list_of_tables(annotation):
            annotation = table  # the index selects one table of the list
            continue

        annotations = _list_annotations(table)
        if name not in annotations:
            return _UnknownName(name, location[:depth], table)
        annotation = annotations[name]
    return None


def _is_list_of_tables(annotation: Any) -> bool:
    """Return whether an annotation is a list of pydantic models: `tuple[DataSource, ...]`."""
    return find_table_model(annotation) not in (None, annotation)


def _list_annotations(table: type[BaseModel]) -> dict[str, Any]:
    """Return the type annotation of each name in a table.

    The names in a job include the sections of plugins.
    """
    annotations = {name: field.annotation for name, field in table.model_fields.items()}
    is_job = table.model_config.get("extra") == "allow"
    return annotations | SECTIONS if is_job else annotations


def _describe_unknown(
    unknown: _UnknownName, root: type[BaseModel], location: list[str], value: object
) -> Mistake:
    """Describe the mistake that a value or table has an unknown name.

    If an earlier version of titanlite had the name, the message explains why it was removed.
    Otherwise, it suggests known names.

    Args:
        unknown: The first unknown name in `location`.
        root: Model of a job, the options of a command, or the content of a file.
        location: Names that lead to the value, such as ["training", "stepz"].
        value: The value or table.
    """
    key = _get_key(location)
    full_name = ".".join(location)
    # Former name -> (default, message). Files of other programs have no removed names.
    removed_names = getattr(unknown.table, "dropped", {})
    if unknown.name in removed_names:
        _default, message = removed_names[unknown.name]
        return Mistake(key, full_name, format_value(value), message, kind=REMOVED_NAME)

    is_table = isinstance(value, dict)
    displayed_name = f"[{key}]" if is_table else full_name
    problem = _explain_unknown_name(unknown, root, location[-1])
    return Mistake(key, displayed_name, value="", problem=problem, kind=UNKNOWN_NAME)


def _rephrase(message: str) -> str:
    """Convert an error message of pydantic to the style of titanlite.

    For example, "Input should be a valid integer" becomes "must be an integer".
    """
    # Shorten messages such as "Tuple should have at least 1 item after validation, not 0".
    text = re.sub(r" (after validation|or instance of).*", "", message)
    # Pydantic writes 1e-30 with 30 digits.
    text = re.sub(r"\b0\.0{6,}\d+", lambda number: f"{float(number[0]):g}", text)
    for phrase, replacement in _PHRASES.items():
        text = text.replace(phrase, replacement)
    return text


def _suggest_value(problem: str, value: object, location: Sequence[str]) -> str:
    """Return a sentence that suggests a valid value, such as " Write 10.", or an empty string.

    Args:
        problem: Error message, such as "must be an integer", which can list the allowed values.
        value: Invalid value.
        location: Names of the sections and keys that lead to the value.
    """
    if isinstance(value, float) and "integer" in problem and value.is_integer():
        return f" Write {value:.0f}."  # 10 instead of 10.0
    if not isinstance(value, str):
        return ""

    is_list_item = bool(location) and location[-1].isdecimal()
    if is_list_item and "," in value:
        return _suggest_list(value)
    return _suggest_choice(problem, value)


def _suggest_list(text: str) -> str:
    """Return a sentence that explains how to write a list that the user wrote as a string.

    Args:
        text: The string, such as "0,1" or "[0, 1]".
    """
    items = re.findall(r"[^\s,\[\]]+", text)
    on_command_line = " ".join(items)
    in_file = ", ".join(items)
    return f" Write a list as {on_command_line} on the command line, and [{in_file}] in a file."


def _suggest_choice(problem: str, value: str) -> str:
    """Return a sentence that suggests the most similar allowed value, or an empty string.

    For example, the problem "must be 'float32' or 'bfloat16'" lists the allowed values, and
    "bflot16" gives " Did you mean bfloat16?".
    """
    if not problem.startswith("must be "):
        return ""
    # Choices are quoted, or listed after "one of". Words after the first sentence are no choices.
    requirement = problem.partition(". ")[0]
    words = re.findall(r"['\"]([\w.-]+)['\"]", requirement)
    words += re.findall(r"[\w.-]+", requirement.partition(" one of ")[2])
    if requirement == "must be true or false":
        words = ["true", "false"]
    choices = {word.lower(): word for word in words}
    similar = difflib.get_close_matches(value.lower(), choices, n=1)
    return f" Did you mean {choices[similar[0]]}?" if similar else ""


def explain_error(model: type[BaseModel], failure: ValidationError) -> str:
    """Describe up to ten mistakes in the content of a file, in one line.

    Args:
        model: Pydantic model of the content.
        failure: Error that the validation of the content has raised.
    """
    descriptions = []
    for error in failure.errors(include_url=False)[:10]:
        is_whole_file = not error["loc"]  # for example invalid JSON
        text = error["msg"] if is_whole_file else build_mistake(model, error).describe()
        descriptions.append(text.rstrip("."))
    return "; ".join(descriptions)


def shorten(text: str) -> str:
    """Return `text`, cut after 160 characters if it is longer."""
    return text if len(text) <= 160 else text[:160] + "..."


def wrap_text(text: str, indent: int = 0) -> str:
    """Wrap paragraphs to the width of the terminal, but to at most 100 characters.

    Args:
        text: Paragraphs separated by empty lines.
        indent: Number of spaces in front of each line.
    """
    columns = min(100, shutil.get_terminal_size().columns)
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    wrapper = textwrap.TextWrapper(
        width=max(40, columns),
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
    return "\n\n".join(wrapper.fill(paragraph) for paragraph in paragraphs)


def _explain_unknown_name(unknown: _UnknownName, root: type[BaseModel], last_name: str) -> str:
    """Return an error message for an unknown name, with known names that the user may have meant.

    For example, "stepz" in [training] gives "is unknown. Did you mean training.steps?".

    Args:
        unknown: The unknown name: a key or, as "trainin" in "trainin.steps", a table around it.
        root: Model of a job, the options of a command, or the content of a file.
        last_name: Name of the key without its tables, such as "steps" for "trainin.steps".
    """
    tables = _list_tables(root)
    known_names = [field.alias or name for name, field in unknown.table.model_fields.items()]
    if unknown.table is root:  # add the sections of plugins
        known_names += [name for name in tables if name not in known_names]

    # Other trainers may use the name for a key that exists here.
    suggestions = _find_synonyms(last_name, {*root.model_fields, *tables})
    if not suggestions:
        similar_names = difflib.get_close_matches(unknown.name, known_names, n=1)
        suggestions = [".".join([*unknown.parents, name]) for name in similar_names]
    if not suggestions:  # the key may be in another table
        suggestions = [
            f"{name}.{last_name}"
            for name, table in tables.items()
            if last_name in table.model_fields
        ]

    if suggestions:
        return f"is unknown. Did you mean {' or '.join(suggestions[:3])}?"
    if unknown.table is BaseModel:
        return f"is unknown, because {'.'.join(unknown.parents)} is not a table."
    return f"is unknown. Known names are {', '.join(known_names)}."


def _list_tables(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the pydantic model of each table inside `root`, by the name of the table.

    The tables of a job include the sections of plugins.
    """
    tables: dict[str, type[BaseModel]] = {}
    for name, annotation in _list_annotations(root).items():
        table = find_table_model(annotation)
        if table is not None:
            tables[name] = table
    return tables


def _find_synonyms(word: str, root_names: set[str]) -> list[str]:
    """Return the titanlite keys for a name that other trainers use, according to `synonyms.toml`.

    Args:
        word: Name that the user wrote.
        root_names: Names of the sections in which to search.
    """
    synonyms = tomli.loads(_SYNONYMS.read_text(encoding="utf-8"))
    keys = []
    for key, words in synonyms.items():
        is_in_root = key.partition(".")[0] in root_names or "=" in key
        if is_in_root and word in words.split():
            keys.append(key)
    return keys


def find_types(annotation: Any) -> set[type]:
    """Return the types in an annotation, such as {int, NoneType} for `tuple[int, ...] | None`."""
    if typing.get_origin(annotation) is Literal:
        return {type(value) for value in typing.get_args(annotation)}
    if parts := typing.get_args(annotation):
        return set().union(*map(find_types, parts))
    return {annotation} if isinstance(annotation, type) else set()


def find_table_model(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model in an annotation such as `tuple[DataSource, ...]`, or None."""
    models = [kind for kind in find_types(annotation) if issubclass(kind, BaseModel)]
    return models[0] if models else None
