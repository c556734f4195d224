"""The help of the keys of a job: of all keys, of a section, or of single keys."""

from __future__ import annotations

import difflib
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn

from titanlite.config.errors import UserError
from titanlite.config.mistakes import shown, table_within, types_in
from titanlite.config.schema import KEYS, SECTIONS, JobConfig

_WORDS = {bool: "", int: " INT", float: " FLOAT", str: " TEXT"}


def print_help(job: JobConfig, topics: Sequence[str]) -> NoReturn:
    """Print each key with its text and its value in `job`, then exit 0.

    Args:
        topics: sections ("training") and keys ("training.steps", "steps") to explain. Empty: all of them.

    Raises:
        UserError: there is no such section or key.
    """
    keys = {key for topic in topics for key in _keys_of(topic)} or set(KEYS)
    if not topics:
        of = job.job.config_file or "titanlite; without --job.config_file, the values of debug_model.toml are used"
        text = (
            "Train the model that a job file describes. Any key of the file can be given on the command line, too, "
            "which wins over the file. With --dry-run a step is done without data, and no folder is made. `--help "
            f"training` explains one section. The defaults below are those of {of}."
        )
        print(f"usage: titanlite train [--section.key value ...]\n\n{textwrap.fill(text, 110)}")
    for section, model in SECTIONS.items():
        if lines := [
            line for key in KEYS if key in keys and key.startswith(f"{section}.") for line in _lines(job, key)
        ]:
            heading = textwrap.fill(f"[{section}] {model.__doc__}", 110)
            print("\n".join([f"\n{heading}", *lines]))
    raise SystemExit(0)


def _keys_of(topic: str) -> list[str]:
    name = topic.removeprefix("--").replace("-", "_")
    found = [key for key in KEYS if name in (key, *key.split("."))]
    if not found:
        names = [*SECTIONS, *KEYS, *(key.split(".")[1] for key in KEYS)]
        near = difflib.get_close_matches(name, names, n=1)
        meant = f"Did you mean `titanlite help {near[0]}`?" if near else f"Sections are {', '.join(SECTIONS)}."
        raise UserError(f"{topic}: no section or key of a job has this name. {meant}")
    return found


def _lines(job: JobConfig, key: str) -> Iterator[str]:
    """The help of a key; of a list of tables, that of the keys in a table, too."""
    section, name = key.split(".")
    annotation, value = KEYS[key].annotation, getattr(getattr(job, section), name)
    yield ""
    if table := table_within(annotation):
        yield f"  [[{key}]]"
        yield _filled(KEYS[key].description, 6)
        for inner, field in table.model_fields.items():
            default = "required" if field.is_required() else f"default: {shown(field.default)}"
            yield _filled(f"{inner}: {field.description} ({default})", 6, hanging=4)
        return
    default = "the flavor's" if value is None and section == "model" else shown(value)
    flag = f"--{key}, --{section}.no-{name}" if bool in types_in(annotation) else f"--{key}{_words(annotation)}"
    yield f"  {flag}  (default: {default})"
    yield _filled(KEYS[key].description, 6)


def _words(annotation: Any) -> str:
    """What follows an option: its choices, or the kind of value."""
    many = "..." if typing.get_origin(annotation) is tuple else ""
    for part in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(part) is Literal:
            return " {" + ",".join(map(str, typing.get_args(part))) + "}" + many
    return "".join(_WORDS.get(kind, "") for kind in types_in(annotation)) + many


def _filled(text: str | None, indent: int, hanging: int = 0) -> str:
    return textwrap.fill(text or "", 110, initial_indent=" " * indent, subsequent_indent=" " * (indent + hanging))
