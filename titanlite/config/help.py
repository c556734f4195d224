"""The help of the keys of a job: of all keys, of a section, or of single keys."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import tyro
from pydantic import Field, create_model

from titanlite.config.errors import UserError
from titanlite.config.mistakes import table_within
from titanlite.config.schema import KEYS, SECTIONS, JobConfig

_TEXT = """Train the model that a job file describes. Any key of the file can be given on the command line, too, which
wins over the file; tables such as [[dataset.sources]] stand in the file only. With --dry-run a step is done without
data, and no folder is made. `--help training` explains one section. The defaults below are those of titanlite, or of
the file that --job.config_file names. Without a file, debug_model.toml is trained."""


def print_help(job: JobConfig, topics: Sequence[str]) -> None:
    """Print each key with its text and its value in `job`, then exit 0.

    Args:
        topics: sections ("training") and keys ("training.steps", "steps") to explain. Empty: all of them.

    Raises:
        UserError: there is no such section or key.
    """
    keys = {key for topic in topics for key in _keys_of(topic)} or set(KEYS)
    sections: dict[str, Any] = {}
    for section, model in SECTIONS.items():
        shown: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            if f"{section}.{name}" in keys:
                table, text = table_within(field.annotation), " ".join((field.description or "").split())
                default = ... if table else Field(getattr(getattr(job, section), name), description=text)
                shown[name] = table or field.annotation, default
        if shown:
            sections[section] = create_model(section, __doc__=model.__doc__, **shown), ...
    keys_of_job = create_model("Keys", **sections)
    tyro.cli(keys_of_job, args=["--help"], prog="titanlite train", description=_TEXT, use_underscores=True)


def _keys_of(topic: str) -> list[str]:
    name = topic.removeprefix("--").replace("-", "_")
    if found := [key for key in KEYS if name in (key, *key.split("."))]:
        return found
    near = difflib.get_close_matches(name, [*SECTIONS, *KEYS], n=1)
    meant = f"Did you mean `titanlite help {near[0]}`?" if near else f"Sections are {', '.join(SECTIONS)}."
    raise UserError(f"{topic}: no section or key of a job has this name. {meant}")
