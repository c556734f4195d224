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
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from titanlite.config.errors import UserError
from titanlite.config.models import Section
from titanlite.config.registry import SECTIONS

COMMAND_LINE = "command line"
UNKNOWN_NAME = "extra_forbidden"  # type of the pydantic error for an unknown name
REMOVED_NAME = "removed"  # for names that earlier versions of titanlite had
_SYNONYMS = Path(__file__).with_name("synonyms.toml")
# Phrases in pydantic messages, with the phrases that replace them.
_PHRASES = {
    "Value error, ": "",
    "Input should be ": "must be ",
    "Tuple should ": "must ",
    "String should ": "must ",
    "Keys should be strings": "must be a string",
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

_Tables = dict[str, type[BaseModel]]
"""Pydantic class of each table in a job or file, by name, such as "dataset.sources".

"" is the name of the whole job or file.
"""


class Mistake(NamedTuple):
    """One invalid value in a job, in the options of a command, or in a file.

    Attributes:
        key: "section.key", or only the section if the whole section is invalid. Empty if the value
            belongs to no key.
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
        return f"{self.name} {requirement.rstrip()}, got {value}. {remedy}".strip()


class ConfigError(UserError):
    """Raised if a job, or the options of a command, are invalid.

    The message lists all mistakes, one per line.

    Args:
        mistakes: All mistakes.
        source: Path of the file that contains the values, or another description of where they come
            from.
        origins: File and line that set each "section.key", or "command line". For all other keys,
            the message names `source`.
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

    If the line of the key is unknown, return the line of the innermost known table around it, or
    None.

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
    """Format a value as in a TOML file. None becomes "none", because TOML has no null."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, default=_convert_to_json, ensure_ascii=False)


def _convert_to_json(value: object) -> object:
    """Convert a table to a dictionary without default values, and other objects to strings."""
    return value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else str(value)


def build_mistake(root: type[BaseModel], error: ErrorDetails) -> Mistake:
    """Convert a pydantic error to a `Mistake`, which has a clearer message.

    Args:
        root: Model that was validated: a job, the options of a command, or the content of a file.
        error: An item of `ValidationError.errors()`.
    """
    location = [str(part) for part in error["loc"]]  # such as ["dataset", "sources", "0", "path"]
    if error["type"] == UNKNOWN_NAME:
        return _describe_unknown(root, location, error["input"])

    value = error["input"]
    is_missing = error["type"] == "missing"
    requirement = _rephrase(error["msg"])  # such as "must be an integer"
    suggestion = _suggest_value(error["type"], value, location)
    return Mistake(
        key=_get_key(location),
        name=_get_displayed_name(root, location),
        value="" if is_missing else format_value(value),
        problem=f"{requirement}. {suggestion}" if suggestion else f"{requirement}.",
        kind=error["type"],
    )


def _suggest_value(error_type: str, value: object, location: list[str]) -> str:
    """Return a sentence on how to write a value, such as "Write 10.", or an empty string.

    Args:
        error_type: Type of the pydantic error, such as "int_type".
        value: Invalid value.
        location: Names that lead to the value, such as ["profiling", "profiler_ranks", "0"].
    """
    if error_type == "int_type" and isinstance(value, float) and value.is_integer():
        return f"Write {value:.0f}."  # 10 instead of 10.0

    # The user probably wrote a list as one word, such as `--profiling.profiler_ranks 0,1`. It was
    # parsed as the list ["0,1"], whose item is not an integer.
    is_list_item = bool(location) and location[-1].isdecimal()
    if is_list_item and isinstance(value, str) and "," in value:
        items = re.findall(r"[^\s,\[\]]+", value)  # of "0,1" or "[0, 1]"
        on_command_line = " ".join(items)
        return f"Write each item separately, as in {on_command_line} on the command line."
    return ""


def _get_displayed_name(root: type[BaseModel], location: list[str]) -> str:
    """Return the name of a value for error messages, such as "training.steps" or "--step".

    A command option has the name that its help shows, and any other value has its full name.

    Args:
        root: Model of a job, the options of a command, or the content of a file.
        location: Names that lead to the value, such as ["training", "steps"].
    """
    # Only the base class of command options, which this module cannot import, has this method.
    get_option_name = getattr(root, "name_on_command_line", None)
    return get_option_name(location[0]) if get_option_name else ".".join(location)


def describe_unknown_name(root: type[BaseModel], name: str) -> Mistake:
    """Create a `Mistake` for an unknown name, and suggest a similar name.

    Args:
        root: Model of a job, the options of a command, or the content of a file.
        name: Name that does not exist in `root`, such as "training.stepz".
    """
    return _describe_unknown(root, name.split("."), value=None)


def _get_key(location: list[str]) -> str:
    """Return the key of a job that contains a value: the first two names of its location.

    For example, ["dataset", "sources", "0", "path"] gives "dataset.sources". If the location has
    only one name, such as ["modle"], return this name.
    """
    return ".".join(location[:2])


def _list_annotations(table: type[BaseModel]) -> dict[str, Any]:
    """Return the type annotation of each key in a table.

    For a whole job, return the class of each section, including the sections of plugins.
    """
    annotations = {
        field.alias or name: field.annotation for name, field in table.model_fields.items()
    }
    is_job = table.model_config.get("extra") == "allow"
    return annotations | SECTIONS if is_job else annotations


def _list_tables(
    model: type[BaseModel], name: str = "", parents: tuple[type[BaseModel], ...] = ()
) -> _Tables:
    """Return the pydantic classes of a table and of all tables inside it, by full name.

    For example, a job contains the tables "dataset" and "dataset.sources".

    Args:
        model: Class of the table.
        name: Full name of the table. "" for a whole job or file.
        parents: Classes of the tables around this table. They are skipped inside it, to avoid an
            endless recursion if a plugin defines a class that contains itself.
    """
    tables = {name: model}
    parents += (model,)
    for key, annotation in _list_annotations(model).items():
        inner_model = find_table_model(annotation)
        if inner_model is not None and inner_model not in parents:
            full_name = f"{name}.{key}" if name else key
            tables |= _list_tables(inner_model, full_name, parents)
    return tables


def _describe_unknown(root: type[BaseModel], location: list[str], value: object) -> Mistake:
    """Create a `Mistake` for a value or table with an unknown name.

    Args:
        root: Model of a job, the options of a command, or the content of a file.
        location: Names that lead to the value, such as ["training", "stepz"].
        value: The value or table.
    """
    key = _get_key(location)
    full_name = ".".join(location)
    tables = _list_tables(root)
    removal = _find_removal_message(location, tables)
    if removal is not None:
        return Mistake(key, full_name, format_value(value), removal, kind=REMOVED_NAME)

    displayed_name = f"[{key}]" if isinstance(value, dict) else full_name
    problem = _explain_unknown_name(location, tables)
    return Mistake(key, displayed_name, value="", problem=problem, kind=UNKNOWN_NAME)


def _find_removal_message(location: list[str], tables: _Tables) -> str | None:
    """Return the error message for a key that earlier versions had, or None for other names."""
    table = _find_table(location, tables)
    name = location[-1]
    if table is None or not issubclass(table, Section) or name not in table.dropped:
        return None
    _former_default, message = table.dropped[name]
    return message


def _find_table(location: list[str], tables: _Tables) -> type[BaseModel] | None:
    """Return the class of the table that contains a name, or None if there is no such table.

    For example, ["dataset", "sources", "0", "path"] is in the table "dataset.sources".
    """
    table_names = [name for name in location[:-1] if not name.isdecimal()]
    return tables.get(".".join(table_names))


def _explain_unknown_name(location: list[str], tables: _Tables) -> str:
    """Return an error message for an unknown name, with known names that the user may have meant.

    For example, ["training", "stepz"] gives "is unknown. Did you mean training.steps?".

    Args:
        location: Names that lead to the value.
        tables: Classes of all tables, by name. "" is the whole job or file.
    """
    if _is_in_table_list(location, tables):  # as in --dataset.sources.path
        return f"belongs to a list of tables. Write [[{_get_key(location)}]] in a job file."

    suggestions = _suggest_names(location, tables)
    if suggestions:
        return f"is unknown. Did you mean {' or '.join(suggestions[:3])}?"

    table = _find_table(location, tables)
    if table is not None:
        return f"is unknown. Known names are {', '.join(_list_annotations(table))}."
    return f"is unknown. Known tables are {', '.join(_list_annotations(tables['']))}."


def _is_in_table_list(location: list[str], tables: _Tables) -> bool:
    """Return whether an option names a key that only exists inside a list of tables.

    For example, `--dataset.sources.path` is unknown as an option, but "path" is a known name in the
    tables of the list [[dataset.sources]].
    """
    table = _find_table(location, tables)
    if table is None:
        return False
    is_section_indexed = len(location) > 1 and location[1].isdecimal()  # as in "training.0.steps"
    return location[-1] in _list_annotations(table) and not is_section_indexed


def _suggest_names(location: list[str], tables: _Tables) -> list[str]:
    """Return known names that the user may have meant instead of an unknown name, best first.

    Args:
        location: Names that lead to the value, such as ["training", "stepz"].
        tables: Classes of all tables, by name.
    """
    *parents, name = location
    synonyms = _find_synonyms(name, tables)
    if synonyms:
        return synonyms

    table = _find_table(location, tables)
    known_names = _list_annotations(table) if table is not None else ()
    similar_names = difflib.get_close_matches(name, known_names, n=1)
    if similar_names:
        return [".".join([*parents, similar_names[0]])]
    return _find_in_other_tables(location, tables)


def _find_in_other_tables(location: list[str], tables: _Tables) -> list[str]:
    """Find keys in other tables that have the same name as an unknown key.

    For example, ["model", "seq_len"] gives ["training.seq_len"]. If the location names a table, the
    table may be misspelled, so return at most three full names, the most similar ones first.
    """
    *parents, name = location
    matches = [
        f"{table_name}.{name}".removeprefix(".")  # the table "" is the whole job or file
        for table_name, table in tables.items()
        if name in table.model_fields
    ]
    if not parents:
        return matches
    # A cutoff of 0 sorts the names without removing dissimilar ones.
    return difflib.get_close_matches(".".join(location), matches, n=3, cutoff=0.0)


def _rephrase(message: str) -> str:
    """Convert a pydantic error message to the style of titanlite messages.

    For example, "Input should be a valid integer" becomes "must be an integer".
    """
    # Shorten messages such as "Tuple should have at least 1 item after validation, not 0".
    text = re.sub(r" (after validation|or instance of).*", "", message)
    # Pydantic writes 1e-30 with 30 digits.
    text = re.sub(r"\b0\.0{6,}\d+", lambda number: f"{float(number[0]):g}", text)
    for phrase, replacement in _PHRASES.items():
        text = text.replace(phrase, replacement)
    return text


def explain_error(model: type[BaseModel], failure: ValidationError) -> str:
    """Describe up to ten mistakes in a file or in environment variables, in one line.

    Args:
        model: Pydantic model of the values.
        failure: Error that their validation raised.
    """
    descriptions = []
    for error in failure.errors(include_url=False)[:10]:
        is_whole_file = not error["loc"]  # for example invalid JSON
        text = error["msg"] if is_whole_file else build_mistake(model, error).describe()
        descriptions.append(text.rstrip("."))
    return "; ".join(descriptions)


def shorten(text: str) -> str:
    """Truncate `text` to its first 160 characters, followed by "...", if it is longer."""
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


def _find_synonyms(word: str, table_names: Collection[str]) -> list[str]:
    """Return the titanlite keys for a name that other trainers use, according to `synonyms.toml`.

    For a few names, return an environment variable instead, such as "NGPU=N before `titanlite
    launch`".

    Args:
        word: Name that the user wrote.
        table_names: Names of all known tables. Keys of other tables are skipped.
    """
    synonyms = tomli.loads(_SYNONYMS.read_text(encoding="utf-8"))
    keys = []
    for key, words in synonyms.items():
        is_in_tables = key.partition(".")[0] in table_names or "=" in key
        if is_in_tables and word in words.split():
            keys.append(key)
    return keys


def find_types(annotation: Any) -> set[type]:
    """Return the innermost types of an annotation: {int, NoneType} for `tuple[int, ...] | None`."""
    if typing.get_origin(annotation) is Literal:
        return {type(value) for value in typing.get_args(annotation)}
    if parts := typing.get_args(annotation):
        return set().union(*map(find_types, parts))
    return {annotation} if isinstance(annotation, type) else set()


def find_table_model(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model in an annotation such as `tuple[DataSource, ...]`, or None."""
    models = [kind for kind in find_types(annotation) if issubclass(kind, BaseModel)]
    return models[0] if models else None
