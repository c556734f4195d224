"""The messages about values that the schema refuses: the place, the value, what is allowed, and what to do.

Invariant: a wrong value gets the same message whether it comes from a job file, the command line or a Python program.
All wrong values of a job are reported together.
"""

from __future__ import annotations

import difflib
import json
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from titanlite.config.errors import UserError


@dataclass(frozen=True)
class Mistake:
    """One value of a job that the schema refuses.

    Attributes:
        key: "section.key"; the section alone if all of it is wrong; empty if the job is no table.
        found: What was found, as it would be written in a job file.
        remedy: What is allowed instead.
        kind: pydantic's name of the error.
    """

    key: str
    found: str
    remedy: str
    kind: str


class WrongJob(UserError):
    """The job has values that the schema refuses. `mistakes` lists them."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__(report([block("JobConfig", mistake.found, mistake.remedy) for mistake in mistakes]))
        self.mistakes = mistakes


def report(errors: Sequence[str], advice: str = "") -> str:
    """All blocks under one heading, below a line of advice about all of them."""
    heading = "1 mistake in the job:" if len(errors) == 1 else f"{len(errors)} mistakes in the job:"
    return "\n".join([*filter(None, [advice]), heading, *errors, "`titanlite train --help` explains every key."])


def block(origin: str, what: str, *sentences: str) -> str:
    """One mistake: its place and what was found, then what is allowed and what to do."""
    text = textwrap.fill(" ".join(sentences), 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  {origin}: {what}\n{text}"


def shown(value: object) -> str:
    """A value as it would be written in TOML. TOML has no null; None becomes the word none."""
    if value is None:
        return "none"
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)


def mistakes(job: type[BaseModel], failure: ValidationError) -> list[Mistake]:
    """Each wrong value of a job. `job` is the model of all sections."""
    return [_mistake(job, error) for error in failure.errors(include_url=False)]


def _mistake(job: type[BaseModel], error: Any) -> Mistake:
    value, place = error["input"], error["loc"]
    found = f"{'.'.join(map(str, place))} = {shown(value)}"
    if not place:
        found, remedy = shown(value), f"must be a table of sections: {', '.join(job.model_fields)}."
    elif place[0] not in job.model_fields:
        is_section = isinstance(value, dict)
        found = f"[{place[0]}]" if is_section else found
        remedy = _meant(str(place[0]), job.model_fields) if is_section else unknown(job, "", str(place[0]))
    elif len(place) == 1:
        remedy = f"must be a table: write [{place[0]}] on a line of its own, and its keys below."
    elif len(place) == 2 and error["type"] == "extra_forbidden":
        remedy = unknown(job, place[0], str(place[1]))
    else:
        remedy = explain(_section(job, place[0]), {**error, "loc": place[1:]})
    return Mistake(".".join(map(str, place[:2])), found, remedy, error["type"])


def unknown(job: type[BaseModel], section: str, key: str) -> str:
    """The message about an unknown key. It names the most similar known keys, of any section."""
    if section in job.model_fields and (sentence := gone(_section(job, section), key.removeprefix("no_"))):
        return sentence
    keys = [f"{name}.{known}" for name in job.model_fields for known in _section(job, name).model_fields]
    near = [known for known in keys if known.endswith(f".{key}")]
    if not 1 <= len(near) <= 3:
        near = difflib.get_close_matches(f"{section}.{key}", keys, n=1, cutoff=0.7)
    if not near:
        names = difflib.get_close_matches(key, {known.split(".")[1] for known in keys}, n=1)
        near = [known for known in keys if known.split(".")[1] in names]
    if near:
        return f"unknown key; did you mean {' or '.join(near[:3])}?"
    return f"unknown key; [{section}] has {', '.join(_section(job, section).model_fields)}." if section else "unknown."


def _meant(name: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"unknown; did you mean {near[0]}?" if near else f"unknown; known are {', '.join(known)}."


def _section(job: type[BaseModel], name: str) -> type[BaseModel]:
    return typing.cast(type[BaseModel], job.model_fields[name].annotation)


def explain(model: type[BaseModel], error: Any) -> str:
    """What is allowed at the place of a pydantic error. The place may be in a table within `model`."""
    name = str(error["loc"][0])
    for part in error["loc"][1:]:
        inner = table_within(model.model_fields[name].annotation) if name in model.model_fields else None
        if inner is not None and isinstance(part, str):
            model, name = inner, part
    if sentence := gone(model, name, error["input"] if error["type"] == "literal_error" else None):
        return sentence
    if error["type"] == "extra_forbidden":
        return _meant(name, model.model_fields)
    text = "is missing" if error["type"] == "missing" else error["msg"].removeprefix("Value error, ")
    text = text.replace("Input should be", "must be").replace("valid tuple", "list")
    return f"{text}. {model.model_fields[name].description or ''}"


def gone(model: type[BaseModel], name: str, value: object = None) -> str | None:
    """The answer about a key, or about one of its choices, that an earlier version had. None: there was none."""
    if name in model.model_fields:
        return getattr(model, "gone_values", {}).get(name, {}).get(value) if isinstance(value, str) else None
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
