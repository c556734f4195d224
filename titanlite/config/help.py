"""The help of the keys of a job: of all keys, of a section, or of single keys."""

from __future__ import annotations

import difflib
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from titanlite.config.errors import UserError
from titanlite.config.mistakes import shown, table_within, types_in
from titanlite.config.schema import KEYS, SECTIONS, JobConfig

_INTRODUCTION = """usage: titanlite train [--section.key value ...]

Train the model that a job file describes. Any key of the file can be given on the command line, too, which wins over
the file. With --dry-run a step is done without data, and no folder is made. `--help training` explains one section.
The defaults below are those of titanlite, or of the file that --job.config_file names. Without a file, debug_model.toml
is trained."""


def print_help(job: JobConfig, topics: Sequence[str]) -> NoReturn:
    """Print each key with its text and its value in `job`, then exit 0.

    Args:
        topics: sections ("training") and keys ("training.steps", "steps") to explain. Empty: all of them.

    Raises:
        UserError: there is no such section or key.
    """
    keys = {key for topic in topics for key in _keys_of(topic)} or set(KEYS)
    if not topics:
        print(_INTRODUCTION)
    for section, model in SECTIONS.items():
        if any(key.startswith(f"{section}.") for key in keys):
            print("\n" + textwrap.fill(f"[{section}] {' '.join((model.__doc__ or '').split())}", 110))
        for name, field in model.model_fields.items():
            if (key := f"{section}.{name}") in keys:
                value = getattr(getattr(job, section), name)
                default = "the flavor's" if value is None and section == "model" else shown(value)
                table = table_within(field.annotation)
                flag = f"[[{key}]]" if table else f"--{key}{_words(field.annotation)}  (default: {default})"
                print(f"\n  {flag.replace(' NO', f', --{section}.no-{name}')}")
                print(textwrap.indent(textwrap.fill(field.description or "", 104), " " * 6))
                for inner, each in table.model_fields.items() if table else ():
                    print(textwrap.indent(textwrap.fill(f"{inner}: {each.description}", 104), " " * 6))
    raise SystemExit(0)


def _keys_of(topic: str) -> list[str]:
    name = topic.removeprefix("--").replace("-", "_")
    if found := [key for key in KEYS if name in (key, *key.split("."))]:
        return found
    near = difflib.get_close_matches(name, [*SECTIONS, *KEYS], n=1)
    meant = f"Did you mean `titanlite help {near[0]}`?" if near else f"Sections are {', '.join(SECTIONS)}."
    raise UserError(f"{topic}: no section or key of a job has this name. {meant}")


def _words(annotation: Any) -> str:
    """What follows an option: its choices, or the kind of value."""
    many = "..." if typing.get_origin(annotation) is tuple else ""
    for part in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(part) is Literal:
            return " {" + ",".join(map(str, typing.get_args(part))) + "}" + many
    words = {bool: "NO", int: "INT", float: "FLOAT", str: "TEXT"}
    return "".join(f" {words[kind]}" for kind in types_in(annotation) if kind in words) + many
