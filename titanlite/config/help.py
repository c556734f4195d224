"""The help of the keys of a job: of all keys, of a section, or of single keys."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import textwrap
from collections.abc import Collection, Sequence
from typing import Annotated, NoReturn

import tyro

from titanlite.config.errors import UserError
from titanlite.config.keys import KEYS, SECTIONS, is_flag, on_command_line
from titanlite.config.mistakes import shown, table_within
from titanlite.config.schema import JobConfig


def print_help(job: JobConfig, topics: Sequence[str]) -> NoReturn:
    """Print each key with its text and its value in `job`, then exit 0.

    Args:
        topics: sections ("training") and keys ("training.steps", "steps") to explain. Empty: all of them.

    Raises:
        UserError: there is no such section or key.
    """
    keys = {key for topic in topics for key in _keys_of(topic)} or set(KEYS)
    of = job.job.config_file or "titanlite; without --job.config_file, the values of debug_model.toml are used"
    description = (
        "Train the model that a job file describes. Any key of the file can be given on the command line, too, which "
        "wins over the file. With --dry-run a step is done without data, and no folder is made. The defaults below are "
        f"those of {of}."
    )
    options = {key for key in keys if on_command_line(KEYS[key].annotation)}
    if options:
        with contextlib.suppress(SystemExit):  # tyro raises it after printing the help
            tyro.cli(_mirror(job, options), args=["--help"], prog="titanlite train", description=description)
    for key in [key for key in KEYS if key in keys - options]:
        print(_table_help(key))
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


def _mirror(job: JobConfig, keys: Collection[str]) -> type:
    """Dataclasses with the fields of the schema, because tyro explains dataclasses. `job` gives the defaults."""
    mirrored = []
    for section in SECTIONS:
        defaults = getattr(job, section)
        fields = []
        for name, field in SECTIONS[section].model_fields.items():
            key = f"{section}.{name}"
            if key not in keys:
                continue
            default, hint = getattr(defaults, name), None
            if default is None:
                hint = "(default: the flavor's)" if section == "model" else "(default: none)"
            annotation = bool if is_flag(key) else field.annotation
            argument = tyro.conf.arg(help=field.description, help_behavior_hint=hint)
            default = False if annotation is bool and default is None else default
            fields.append((name, Annotated[annotation, argument], dataclasses.field(default=default)))
        if fields:
            mirror = dataclasses.make_dataclass(SECTIONS[section].__name__, fields, frozen=True)
            mirror.__doc__ = SECTIONS[section].__doc__
            mirrored.append((section, mirror, dataclasses.field(default_factory=mirror)))
    return dataclasses.make_dataclass("Job", mirrored, frozen=True)


def _table_help(key: str) -> str:
    """The help of a list of tables, which can be given in a job file only."""
    table = table_within(KEYS[key].annotation)
    assert table is not None
    lines = [f"[[{key}]]", textwrap.fill(KEYS[key].description or "", 110, initial_indent="  ", subsequent_indent="  ")]
    for name, field in table.model_fields.items():
        default = "required" if field.is_required() else f"default: {shown(field.default)}"
        text = f"{name}: {field.description} ({default})"
        lines.append(textwrap.fill(text, 110, initial_indent="  ", subsequent_indent="      "))
    return "\n".join(lines)
