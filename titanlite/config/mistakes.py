"""The messages about wrong values: the place, the value, what is allowed, and what to do. `synonyms.toml` beside this
file has the names that other trainers give to our keys.

Invariant: a wrong value gets the same message whether it comes from a job file, the command line, a Python program or
another file. All wrong values of a job are reported together.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli
from pydantic import BaseModel, ValidationError

from titanlite.config.errors import UserError, counted

COMMAND_LINE = "command line"


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
        lines = [f"{counted(len(mistakes), 'mistake')}:"]
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
    if getattr(whole, "place", "") == COMMAND_LINE:
        found = " ".join([f"--{place[0].replace('_', '-')}", *given])
    text = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    text, about = text.replace("valid tuple", "list").replace("valid dictionary", "table"), ""
    text = text.replace("Tuple should", "must").partition(" after validation")[0]
    text = "is not of the form that is needed" if error["type"] == "string_pattern_mismatch" else text
    for name in place:
        if field := model.model_fields.get(name):
            about, model = field.description or "", table_within(field.annotation) or model
        elif answer := getattr(model, "dropped", {}).get(name):
            return Mistake(key, found, answer[1], "gone")
        elif error["type"] == "extra_forbidden" and not name.isdecimal():
            found = f"[{key}]" if isinstance(value, dict) else found
            return Mistake(key, found, _near(whole, model, place[: place.index(name) + 1], place[-1]), error["type"])
    return Mistake(key, found, f"{text}. {_hint(text, value, place)}{about}", error["type"])


def _hint(text: str, value: object, place: Sequence[str]) -> str:
    """What was meant, where the value shows it: one of the words in `text`, a list, or a whole number."""
    if isinstance(value, float) and "integer" in text and value.is_integer():
        return f"Write {value:.0f}. "
    if not isinstance(value, str):
        return ""
    if "," in value and place[-1].isdecimal():
        words = re.findall(r"[^\s,\[\]]+", value)
        return f"A list is {' '.join(words)} on the command line, and [{', '.join(words)}] in a file. "
    known = {word.lower(): word for word in re.findall(r"[\w.-]+", text) if text.startswith("must be ")}
    return "".join(f"Did you mean {known[word]}? " for word in difflib.get_close_matches(value.lower(), known, n=1))


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


def wrapped(text: str, indent: int = 0) -> str:
    """Each paragraph of a text in lines that fit a terminal, of at most 110 characters."""
    width, margin = min(110, shutil.get_terminal_size().columns), " " * indent
    fill = partial(textwrap.fill, width=max(40, width), initial_indent=margin, subsequent_indent=margin)
    return "\n\n".join(fill(" ".join(part.split()), break_on_hyphens=False) for part in text.split("\n\n"))


def _near(whole: type[BaseModel], model: type[BaseModel], place: list[str], last: str) -> str:
    """The message about an unknown name at `place`, in the table `model`. It says what a key is called here that has
    the name `last` elsewhere, or the most similar known name, of any section."""
    known = [field.alias or name for name, field in model.model_fields.items()]
    sections = {name: getattr(field.annotation, "model_fields", ()) for name, field in whole.model_fields.items()}
    synonyms = tomli.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))
    keys = [key for key, words in synonyms.items() if last in words.split()]
    near = [key for key in keys if key.partition(".")[0] in sections or "=" in key]
    near = near or [".".join([*place[:-1], name]) for name in difflib.get_close_matches(place[-1], known, n=1)]
    near = near or [f"{section}.{last}" for section, keys in sections.items() if last in keys]
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
