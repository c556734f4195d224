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

from pydantic import BaseModel

from titanlite.config.errors import UserError


class Mistake(NamedTuple):
    """One wrong value of a job.

    Attributes:
        key: "section.key"; the section alone if all of it is wrong; empty if the job is no table.
        found: What was found, as it would be written in a job file.
        remedy: What is allowed instead.
        kind: pydantic's name of the error, "gone" for a key that an earlier version had, or "stray" for a word of the
            command line that belongs to no option.
    """

    key: str
    found: str
    remedy: str
    kind: str = ""


class WrongJob(UserError):
    """The job, or the options of a command, have values that the schema refuses. `mistakes` lists them."""

    def __init__(self, mistakes: Sequence[Mistake], place: str) -> None:
        super().__init__(report(mistakes, {}, place))
        self.mistakes = mistakes


def report(mistakes: Sequence[Mistake], origins: Mapping[str, str], file: str) -> str:
    """All mistakes under one heading, each with the place where it is: that of its key in `origins`, or `file`."""
    lines = ["1 mistake:" if len(mistakes) == 1 else f"{len(mistakes)} mistakes:"]
    for mistake in mistakes:
        lines.append(f"  {origins.get(mistake.key, file)}: {mistake.found}")
        lines.append(textwrap.fill(mistake.remedy, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def shown(value: object) -> str:
    """A value as it would be written in TOML. TOML has no null; None becomes the word none."""
    if value is None:
        return "none"
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)


def mistake(job: type[BaseModel], error: Any) -> Mistake:
    """What a pydantic error says about a job. `job` is the model of all sections, or the options of a command."""
    place, value, model = [*map(str, error["loc"])], error["input"], job
    key, found = ".".join(place[:2]), f"{'.'.join(place)} = {shown(value)}" if place else shown(value)
    text = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    text, about = text.replace("valid tuple", "list").replace("valid dictionary", "table"), ""
    for name in place:
        if field := model.model_fields.get(name):
            about, model = field.description or "", table_within(field.annotation) or model
        elif answer := getattr(model, "dropped", {}).get(name):
            return Mistake(key, found, answer[1], "gone")
        elif not name.isdecimal():
            found = f"[{key}]" if isinstance(value, dict) else found
            return Mistake(key, found, _unknown(job, model, place[: place.index(name) + 1]), error["type"])
    return Mistake(key, found, f"{text}. {about}", error["type"])


def _unknown(job: type[BaseModel], model: type[BaseModel], place: list[str]) -> str:
    """The message about an unknown name in the table `model`. It says the most similar known one, of any section."""
    sections = {name: getattr(field.annotation, "model_fields", ()) for name, field in job.model_fields.items()}
    keys = [f"{section}.{key}" for section, fields in sections.items() for key in fields]
    near = [".".join([*place[:-1], name]) for name in difflib.get_close_matches(place[-1], model.model_fields, n=1)]
    near = near or [key for key in keys if key.endswith(f".{place[-1]}")]
    near = near or difflib.get_close_matches(".".join(place), keys, n=1)
    known = ", ".join(model.model_fields)
    return f"unknown; did you mean {' or '.join(near[:3])}?" if near else f"unknown; there are {known}."


def without(job: Mapping[str, Any], wrong: Iterable[Mistake]) -> dict[str, Any]:
    """The tables of a job without the keys and sections of these mistakes."""
    keys, tables = {mistake.key for mistake in wrong}, {}
    for section in [name for name in job if name not in keys]:
        tables[section] = {key: value for key, value in job[section].items() if f"{section}.{key}" not in keys}
    return tables


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
