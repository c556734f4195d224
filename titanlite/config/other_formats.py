"""Parse job files, and give helpful errors for files that are not TOML."""

from __future__ import annotations

import json
import re
from typing import Any

import tomli

from titanlite.config.mistakes import shorten

_WRITE_VALUES = (
    "Put text in quotation marks, write numbers as in 8, 0.5 or 1e-4, write true and false in "
    "lower case, and leave out keys without a value."
)
_USE_SINGLE_QUOTES = "Put text with backslashes in single quotation marks."
_CLOSE_QUOTES = "Close quotation marks in the line that opens them."
# Messages of tomli, with the remedy for the usual cause.
_REMEDIES = {
    "Invalid value": _WRITE_VALUES,
    "Expected newline or end of document after a statement": _WRITE_VALUES,
    "Expected '=' after a key in a key/value pair": "Write key = value or [section].",
    "Unescaped '\\' in a string": _USE_SINGLE_QUOTES,
    "Invalid hex value": _USE_SINGLE_QUOTES,
    "Illegal character '\\n'": _CLOSE_QUOTES,
    "Found invalid character '\\n'": _CLOSE_QUOTES,
    'Expected "\'"': _CLOSE_QUOTES,
    "Cannot overwrite a value": "Set each key once.",
}
_PYTHON_STATEMENT = re.compile(
    r"^(import [\w.]+( as \w+)?\s*$|from [\w.]+ import |def \w+\(|class \w+[(:])", re.MULTILINE
)
_TABLE_HEADER = re.compile(r"^\s*\[\[?[\w.-]+\]", re.MULTILINE)


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse the content of a TOML file.

    Raises:
        ValueError: If the content is not TOML in UTF-8. The message contains the invalid line, or
            explains how to use a file in another format, such as a Hugging Face config.json.
    """
    try:
        text = content.decode("utf-8-sig")
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        problem = _explain_syntax_error(text, error)
    except (ValueError, RecursionError) as error:
        # Not UTF-8, a number with thousands of digits, or lists that are nested too deeply.
        problem = f"not valid TOML in UTF-8: {error}."

    # If the whole file is in another format, this helps more than the first invalid line.
    raise ValueError(_explain_other_format(content) or problem)


def _explain_syntax_error(text: str, error: tomli.TOMLDecodeError) -> str:
    """Return an error message with the invalid line, its number and, if known, how to fix it."""
    line = text.split("\n")[error.lineno - 1].strip()
    position = f"{error.msg}, in column {error.colno}."
    remedy = _REMEDIES.get(error.msg, "")
    problem = f"line {error.lineno}: {shorten(line)} is not valid TOML: {position} {remedy}"
    return problem.rstrip()


def _explain_other_format(content: bytes) -> str:
    """Explain how to use a JSON or Python file that was passed as a job file.

    Return an empty string for any other file.
    """
    table = parse_json(content)
    if table is not None and "model_spec" in table:
        return (
            "this is a resolved config of torchtitan 0.3. Convert it with `titanlite migrate FILE`."
        )
    if table is not None:
        return (
            "this is JSON, and a job file is TOML. If it is the config.json of a Hugging Face "
            "model, train the model with `titanlite train --from FOLDER`."
        )
    text = content.decode("utf-8-sig", errors="replace")
    if _PYTHON_STATEMENT.search(text) and not _TABLE_HEADER.search(text):
        return (
            "this is Python code, which titanlite does not run. To convert a config of torchtitan "
            "0.3, see docs/reference/from_torchtitan.md. Otherwise, copy a job file from "
            "train_configs/ and set the same values in it; `titanlite train --help` explains the "
            "keys."
        )
    return ""


def parse_json(content: bytes) -> dict[str, Any] | None:
    """Return the content of a file that is a JSON object, or None for any other file."""
    try:
        value = json.loads(content.decode("utf-8-sig", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
