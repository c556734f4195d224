"""The messages about wrong values of a job: the place, the value, what is allowed, and what to do.

Invariant: a wrong value gets the same message whether it comes from a job file, the command line or a Python program.
All wrong values of a job are reported together.
"""

from __future__ import annotations

import difflib
import json
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError

from titanlite.config.errors import UserError


class Mistake(NamedTuple):
    """One wrong value of a job.

    Attributes:
        key: "section.key"; the section alone if all of it is wrong; empty if the job is no table.
        found: What was found, as it would be written in a job file.
        remedy: What is allowed instead.
        kind: pydantic's name of the error, or "gone" for what an earlier version had.
    """

    key: str
    found: str
    remedy: str
    kind: str = ""


class WrongJob(UserError):
    """The job has values that the schema refuses. `mistakes` lists them."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__(report(mistakes))
        self.mistakes = mistakes


def report(mistakes: Sequence[Mistake], origins: Mapping[str, str] | None = None, file: str = "JobConfig") -> str:
    """All mistakes under one heading, each with the place where it is: that of its key in `origins`, or `file`."""
    lines = ["1 mistake in the job:" if len(mistakes) == 1 else f"{len(mistakes)} mistakes in the job:"]
    for mistake in mistakes:
        lines.append(f"  {(origins or {}).get(mistake.key, file)}: {mistake.found}")
        lines.append(textwrap.fill(mistake.remedy, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join([*lines, "`titanlite train --help` explains every key."])


def shown(value: object) -> str:
    """A value as it would be written in TOML. TOML has no null; None becomes the word none."""
    if value is None:
        return "none"
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)


def mistakes(job: type[BaseModel], failure: ValidationError) -> list[Mistake]:
    """Each wrong value of a job. `job` is the model of all sections."""
    return [_mistake(job, error) for error in failure.errors(include_url=False)]


def _mistake(job: type[BaseModel], error: Any) -> Mistake:
    place = [*map(str, error["loc"])]
    key, found, kind = ".".join(place[:2]), f"{'.'.join(place)} = {shown(error['input'])}", error["type"]
    if not place:
        return Mistake("", shown(error["input"]), f"must be tables: {', '.join(job.model_fields)}.")
    if place[0] not in job.model_fields:
        found = f"[{key}]" if isinstance(error["input"], dict) else found
        remedy = unknown(job, "", key)
    elif len(place) == 1:
        remedy = f"must be a table: write [{key}] on a line of its own, and its keys below."
    else:
        remedy, kind = explain(section_of(job, place[0]), {**error, "loc": error["loc"][1:]})
        if len(place) == 2 and kind == "extra_forbidden":
            remedy = unknown(job, *place)
    return Mistake(key, found, remedy, kind)


def without(job: Mapping[str, Any], wrong: Iterable[Mistake]) -> dict[str, Any]:
    """The tables of a job without the keys and sections of these mistakes."""
    keys, tables = {mistake.key for mistake in wrong}, {}
    for section in [name for name in job if name not in keys]:
        tables[section] = {key: value for key, value in job[section].items() if f"{section}.{key}" not in keys}
    return tables


def unknown(job: type[BaseModel], section: str, key: str) -> str:
    """The message about an unknown key, or about an unknown section. It names the most similar ones."""
    keys = [f"{name}.{known}" for name in job.model_fields for known in section_of(job, name).model_fields]
    known = section_of(job, section).model_fields if section in job.model_fields else job.model_fields
    near = [name for name in keys if name.endswith(f".{key}")]
    near = near or difflib.get_close_matches(f"{section}.{key}" if section else key, keys if section else known, n=1)
    return f"unknown; did you mean {' or '.join(near[:3])}?" if near else f"unknown; known are {', '.join(known)}."


def section_of(job: type[BaseModel], name: str) -> type[BaseModel]:
    """The model of a section."""
    return typing.cast(type[BaseModel], job.model_fields[name].annotation)


def explain(model: type[BaseModel], error: Any) -> tuple[str, str]:
    """What is allowed at the place of a pydantic error, which may be in a table within `model`; and the kind of the
    mistake."""
    name, value = str(error["loc"][0]), error["input"]
    for part in error["loc"][1:]:
        inner = table_within(model.model_fields[name].annotation) if name in model.model_fields else None
        if inner is not None and isinstance(part, str):
            model, name = inner, part
    if answer := gone(model, name, value):
        return answer, "gone"
    if name not in model.model_fields:
        return f"unknown; known are {', '.join(model.model_fields)}.", error["type"]
    text = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{text.replace('valid tuple', 'list')}. {model.model_fields[name].description or ''}", error["type"]


def gone(model: type[BaseModel], name: str, value: object = None) -> str | None:
    """The answer about a key, or about one of its choices, that an earlier version had. None: there was none."""
    if name in model.model_fields:
        return getattr(model, "gone_values", {}).get(name, {}).get(str(value))
    return getattr(model, "dropped", {}).get(name, (None, None))[1]


def types_in(annotation: Any) -> set[type]:
    """The types that an annotation is made of: of tuple[int, ...] | None, int and NoneType."""
    if typing.get_origin(annotation) is Literal:
        return {type(value) for value in typing.get_args(annotation)}
    if parts := typing.get_args(annotation):
        return set().union(*map(types_in, parts))
    return {annotation} if isinstance(annotation, type) else set()


def table_within(annotation: Any) -> type[BaseModel] | None:
    """The model of a list of tables such as tuple[DataSource, ...]."""
    return next((kind for kind in types_in(annotation) if issubclass(kind, BaseModel)), None)
