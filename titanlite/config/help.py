"""Print the help of `titanlite train`, which explains the keys of a job."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from titanlite.config.errors import UserError
from titanlite.config.mistakes import (
    describe_unknown_name,
    find_table_model,
    format_value,
    wrap_text,
)
from titanlite.config.models import Section
from titanlite.config.registry import Registry
from titanlite.config.schema import SECTIONS, JobConfig, list_keys

_USAGE = """usage: titanlite train [--from FOLDER_OR_NAME] [--SECTION.KEY VALUE ...]

Train the model that a job file describes. Pass the file with `--job.config_file FILE`; the default
is debug_model.toml. `titanlite launch` takes the same options and starts one process per GPU, or
NGPU=N processes.

Pass `--from` to start from a model: a folder, or OWNER/NAME on the Hugging Face Hub. Then you need
no job file, because [model], tokenizer, sequence length and learning rate follow from the model
unless you set them.

You can set each key below in the job file or on the command line, which takes precedence. Run
`titanlite help SECTION` for the keys of a section, `titanlite help KEY` for one key, and `titanlite
help all` for all keys."""
_TYPE_NAMES = {str: "<string>", int: "<integer>", float: "<float>", bool: "<boolean>"}


def print_help(job: JobConfig, topics: Sequence[str]) -> None:
    """Print the help of `titanlite train` on some sections or keys.

    Args:
        job: Job whose values are printed as the defaults.
        topics: Sections or keys, such as "training", "training.steps" or "steps", or "all". If
            empty, print only the usage and the names of all keys.

    Raises:
        UserError: If there is no such section or key.
    """
    if not topics:
        _print_overview()
        return

    names = {topic.replace("-", "_") for topic in topics}
    known_names = _list_topics()
    for name in sorted(names):
        if name not in known_names:
            raise UserError(describe_unknown_name(JobConfig, name).describe())
    for section in SECTIONS:
        _print_section(job, section, names)


def _list_topics() -> list[str]:
    """Return all topics that the help accepts, such as "training", "training.steps" and "steps"."""
    topics = ["all"]
    for full_name in list_keys():
        topics += [full_name, *full_name.split(".")]
    return topics


def _print_overview() -> None:
    """Print the usage, and the names of all keys by section, with advanced keys last."""
    print(wrap_text(_USAGE), end="\n\n")
    for section, model in SECTIONS.items():
        print(wrap_text(f"[{section}] {model.__doc__}"))
        print(wrap_text(", ".join(_list_common_keys(model)), 6))
        if model.advanced:
            print(wrap_text(f"Advanced: {', '.join(model.advanced)}", 6))
        print()


def _print_section(job: JobConfig, section: str, topics: set[str]) -> None:
    """Print the help on a section, or only on the keys in `topics`. Advanced keys come last.

    Args:
        job: Job whose values are printed as the defaults.
        section: Name of the section.
        topics: Sections and keys, such as "training", "training.steps", "steps" or "all".
    """
    model = SECTIONS[section]
    common_keys = _list_common_keys(model)

    # Print only the selected keys.
    is_whole_section = "all" in topics or section in topics
    if not is_whole_section:
        selected_keys = []
        for key in [*common_keys, *model.advanced]:
            if key in topics or f"{section}.{key}" in topics:
                selected_keys.append(key)
        _print_keys(job, section, selected_keys)
        return

    # Print the whole section.
    print(wrap_text(f"[{section}] {model.__doc__}"), end="\n\n")
    _print_keys(job, section, common_keys)
    if model.advanced:
        print(f"Advanced keys of [{section}]:\n")
        _print_keys(job, section, model.advanced)


def _print_keys(job: JobConfig, section: str, keys: Sequence[str]) -> None:
    """Print the help on some keys of a section, with the values of `job` as the defaults."""
    # Do not use getattr: the job may have a method of this name, such as `copy`.
    values = dict(job)[section]
    for key in keys:
        field = SECTIONS[section].model_fields[key]
        _print_key(f"{section}.{key}", field, getattr(values, key), is_option=True)


def _list_common_keys(model: type[Section]) -> list[str]:
    """Return the keys of a section that are not advanced."""
    return [key for key in model.model_fields if key not in model.advanced]


def _print_key(key: str, field: FieldInfo, value: Any, *, is_option: bool) -> None:
    """Print a key of a job with its type, description and default value.

    Args:
        key: Full name of the key, such as "training.steps".
        field: Field of the schema.
        value: Default value to print. PydanticUndefined means that the key is required.
        is_option: Whether you can set the key on the command line as well as in a job file.
    """
    table = find_table_model(field.annotation)
    if table is not None:
        _print_table_list(key, field, table)
        return

    type_name = describe_type(field)
    if not is_option:
        print(f"{key} {type_name}")
    elif type_name == "<boolean>":
        section, name = key.split(".")
        print(f"--{key}, --{section}.no-{name}")
    else:
        print(f"--{key} {type_name}")
    print(wrap_text(f"{field.description} ({_describe_default(value)})", 6), end="\n\n")


def _print_table_list(key: str, field: FieldInfo, table: type[BaseModel]) -> None:
    """Print a list of tables, such as [[dataset.sources]], and the keys of these tables."""
    print(f"[[{key}]] (job file only)")
    print(wrap_text(field.description or "", 6), end="\n\n")
    for name, inner_field in table.model_fields.items():
        _print_key(f"{key}.{name}", inner_field, inner_field.default, is_option=False)


def _describe_default(value: Any) -> str:
    """Format the default value of a key for the help, such as "default: 100".

    Return "required" or "optional" for a key without a default value.
    """
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "optional"
    return f"default: {format_value(value)}"


def describe_type(field: FieldInfo) -> str:
    """Format the type of a key for the help, such as "<integer>" or "auto|bfloat16".

    The type of a list ends with an ellipsis, as in "<string> ...".
    """
    names = _list_types([field.annotation, *field.metadata])
    text = " ".join(dict.fromkeys(names))
    return f"{text} ..." if typing.get_origin(field.annotation) is tuple else text


def _list_types(annotations: Sequence[Any]) -> list[str]:
    """Return the names of types for the help text.

    For example, `int | None` gives ["<integer>"], and `Literal["a", "b"]` gives ["a|b"]. A field
    whose metadata contains a registry accepts only registered names, so `str` with a registry of
    "a" and "b" also gives ["a|b"].

    Args:
        annotations: Type and metadata of a pydantic field, or arguments of a type such as a union.
    """
    names: list[str] = []
    for annotation in annotations:
        if isinstance(annotation, Registry):
            return ["|".join(annotation) or "<string>"]
        names += _list_types_in(annotation)
    return names


def _list_types_in(annotation: Any) -> list[str]:
    """Return the names of the types in an annotation, and [] for metadata such as `Ge(0)`."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return ["|".join(map(str, arguments))]
    if isinstance(annotation, type) and annotation in _TYPE_NAMES:
        return [_TYPE_NAMES[annotation]]
    return _list_types(arguments)  # for example of a union or a tuple
