"""The messages about wrong values: the place, the value, what is allowed, and what to do.

Invariant: a wrong value gets the same message whether it comes from a job file, the command line, a Python program or
another file. All wrong values of a job are reported together.
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
        kind: pydantic's name of the error, or "gone" for a key that an earlier version had.
    """

    key: str
    found: str
    remedy: str
    kind: str = ""


class WrongJob(UserError):
    """A job, or the options of a command, that cannot be used. The message has all its mistakes under one heading, each
    with the place where it is: that of its key in `origins`, or `file`. `mistakes` lists them."""

    def __init__(self, mistakes: Sequence[Mistake], file: str, origins: Mapping[str, str] | None = None) -> None:
        lines = ["1 mistake:" if len(mistakes) == 1 else f"{len(mistakes)} mistakes:"]
        for mistake in mistakes:
            lines.append(f"  {(origins or {}).get(mistake.key, file)}: {short(mistake.found)}")
            lines.append(textwrap.fill(mistake.remedy, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
        super().__init__("\n".join(lines))
        self.mistakes = mistakes


def shown(value: object) -> str:
    """A value as it would be written in TOML. TOML has no null; None becomes the word none."""
    if value is None:
        return "none"
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)


def mistake(whole: type[BaseModel], error: Any) -> Mistake:
    """What a pydantic error says. `whole` is the model of the job, of the options of a command, or of a file."""
    place, value, model = [*map(str, error["loc"])], error["input"], whole
    key, given = ".".join(place[:2]), [] if error["type"] == "missing" else [shown(value)]
    found = " = ".join([*filter(None, [".".join(place)]), *given])
    text = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    text, about = text.replace("valid tuple", "list").replace("valid dictionary", "table"), ""
    for name in place:
        if field := model.model_fields.get(name):
            about, model = field.description or "", table_within(field.annotation) or model
        elif answer := getattr(model, "dropped", {}).get(name):
            return Mistake(key, found, answer[1], "gone")
        elif error["type"] == "extra_forbidden" and not name.isdecimal():
            found = f"[{key}]" if isinstance(value, dict) else found
            return Mistake(key, found, _near(whole, model, place[: place.index(name) + 1]), error["type"])
    return Mistake(key, found, f"{text}. {about}", error["type"])


def unknown(whole: type[BaseModel], name: str) -> Mistake:
    """What is said about a name such as "training.stepz" that no key of `whole` has."""
    return mistake(whole, {"loc": name.split("."), "input": None, "type": "extra_forbidden", "msg": ""})


def explain(model: type[BaseModel], failure: ValidationError) -> str:
    """The first ten mistakes of a file in one line."""
    found = (mistake(model, error) for error in failure.errors(include_url=False)[:10])
    return "; ".join(f"{short(each.found)}: {each.remedy.strip().rstrip('.')}" for each in found)


def short(text: str) -> str:
    """The text, cut if it is long."""
    return text if len(text) <= 160 else text[:160] + "..."


def _near(whole: type[BaseModel], model: type[BaseModel], place: list[str]) -> str:
    """The message about an unknown name in the table `model`. It says the most similar known one, of any section."""
    known = [field.alias or name for name, field in model.model_fields.items()]
    sections = {name: getattr(field.annotation, "model_fields", ()) for name, field in whole.model_fields.items()}
    near = [".".join([*place[:-1], name]) for name in difflib.get_close_matches(place[-1], known, n=1)]
    near = near or [f"{section}.{place[-1]}" for section, keys in sections.items() if place[-1] in keys]
    return f"unknown; did you mean {' or '.join(near[:3])}?" if near else f"unknown; there are {', '.join(known)}."


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
