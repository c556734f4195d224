"""The messages about values that the schema refuses: the place, the value, what is allowed, and what to do.

Invariant: a wrong value gets the same message whether it comes from a job file, the command line or a Python program.
All wrong values of a job are reported together.
"""

from __future__ import annotations

import difflib
import functools
import json
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from titanlite.config.errors import UserError


@dataclass(frozen=True)
class Mistake:
    """One value of a job that the schema refuses.

    Attributes:
        key: "section.key"; the section alone if all of it is wrong; empty if the job is no table.
        found: What was found, as it would be written in a job file.
        remedy: What is allowed instead.
    """

    key: str
    found: str
    remedy: str

    def block(self, origin: str) -> str:
        """The mistake as a block of a report. `origin` is the place where the value was set."""
        return block(origin, self.found, self.remedy)


class WrongJob(UserError):
    """The job has values that the schema refuses. `mistakes` lists them."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__(report([mistake.block("JobConfig") for mistake in mistakes]))
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
    """Each wrong value of a job.

    Args:
        job: The model of all sections.
    """
    return [_mistake(job, error) for error in failure.errors(include_url=False)]


def _mistake(job: type[BaseModel], error: Any) -> Mistake:
    value, path = error["input"], ".".join(map(str, error["loc"]))
    if not error["loc"]:
        return Mistake("", shown(value), f"must be a table of sections: {', '.join(job.model_fields)}.")
    section, place = str(error["loc"][0]), error["loc"][1:]
    if section not in job.model_fields:
        if not isinstance(value, dict):
            return Mistake(section, f"{section} = {shown(value)}", unknown(job, "", section))
        near = difflib.get_close_matches(section, job.model_fields, n=1)
        hint = f"did you mean [{near[0]}]?" if near else f"sections are {', '.join(job.model_fields)}."
        return Mistake(section, f"[{section}]", f"unknown section; {hint}")
    if not place:
        text = f"must be a table: write [{section}] on a line of its own, and its keys below."
        return Mistake(section, f"{section} = {shown(value)}", text)
    key, found = f"{section}.{place[0]}", f"{path} = {shown(value)}"
    if len(place) == 1 and error["type"] == "extra_forbidden":
        return Mistake(key, found, unknown(job, section, str(place[0])))
    return Mistake(key, found, explain(_section(job, section), {**error, "loc": place}))


def unknown(job: type[BaseModel], section: str, key: str) -> str:
    """The message about an unknown key. It names the most similar known keys, of any section."""
    sections = job.model_fields
    if section in sections and (sentence := gone(_section(job, section), key.removeprefix("no_"))):
        return sentence
    section = section if section in sections else next(iter(difflib.get_close_matches(section, sections, n=1)), "")
    own = list(_section(job, section).model_fields) if section else []
    keys = [f"{name}.{known}" for name in sections for known in _section(job, name).model_fields]
    near = [known for known in keys if known.endswith(f".{key}")]
    if not 1 <= len(near) <= 3:
        near = [f"{section}.{name}" for name in difflib.get_close_matches(key, own, n=1)]
    if not near:
        elsewhere = difflib.get_close_matches(key, {known.split(".")[1] for known in keys}, n=1)
        near = [known for known in keys if known.split(".")[1] in elsewhere]
    if near:
        return f"unknown key; did you mean {' or '.join(near[:3])}?"
    return f"unknown key; [{section}] has {', '.join(own)}." if section else "unknown key."


def _section(job: type[BaseModel], name: str) -> type[BaseModel]:
    section = job.model_fields[name].annotation
    assert isinstance(section, type)
    assert issubclass(section, BaseModel)
    return section


def explain(model: type[BaseModel], error: Any) -> str:
    """What is allowed at the place of a pydantic error. The place may be in a table within `model`."""
    name = str(error["loc"][0])
    for part in error["loc"][1:]:
        inner = table_within(model.model_fields[name].annotation) if name in model.model_fields else None
        if inner is not None and isinstance(part, str):
            model, name = inner, part
    if error["type"] == "missing":
        return f"is missing. {model.model_fields[name].description}"
    if sentence := gone(model, name, error["input"] if error["type"] == "literal_error" else None):
        return sentence
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, model.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(model.model_fields)}."
        return f"unknown key; {hint}"
    if error["type"] == "value_error":  # from our own validator, whose message is the rule
        text = error["msg"].removeprefix("Value error, ")
        return f"{text}. {model.model_fields[name].description if name in model.model_fields else ''}"
    return must_be(model, name, isinstance(error["loc"][-1], int))


def gone(model: type[BaseModel], name: str, value: object = None) -> str | None:
    """The answer about a key, or about one of its choices, that an earlier version had. None: there was none."""
    if name in model.model_fields:
        return getattr(model, "gone_values", {}).get(name, {}).get(value) if isinstance(value, str) else None
    return getattr(model, "dropped", {}).get(name, (None, None))[1]


def table_within(annotation: Any) -> type[BaseModel] | None:
    """The model of a list of tables such as tuple[DataSource, ...]."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next(filter(None, map(table_within, typing.get_args(annotation))), None)


def must_be(model: type[BaseModel], name: str, within: bool = False) -> str:
    """What is allowed for a field, from its schema, and its help text. `within`: what is allowed for an item of the
    list."""
    return f"must be {allowed(model, name, within)}. {model.model_fields[name].description or ''}"


def allowed(model: type[BaseModel], name: str, within: bool = False) -> str:
    """The type and the limits of a field in words; of an item of the list, if `within`."""
    schema = json_schema(model)["properties"][name]
    return _allowed(schema["items"] if within else schema)


@functools.cache
def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a section."""
    return model.model_json_schema()


def _allowed(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_allowed(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(shown(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        least, most = schema.get("minItems"), schema.get("maxItems")
        numbers = [f"{words} {count}" for words, count in (("at least", least), ("at most", most)) if count is not None]
        of = f" of {' and '.join(numbers)}" if numbers else ""
        return f"a list{of}, each {_allowed(schema.get('items', {}))}"
    if "$ref" in schema:
        return "a table"
    kinds = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a text"}
    limits = {"exclusiveMinimum": "greater than", "minimum": "at least", "exclusiveMaximum": "less than"}
    limits |= {"maximum": "at most", "pattern": "matching"}
    rules = [f"{words} {schema[name]}" for name, words in limits.items() if name in schema]
    return f"{kinds.get(schema.get('type', ''), 'as described')} {' and '.join(rules)}".strip()
