"""Parse job files, and give helpful errors for files that are not TOML."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import tomli

from titanlite.config.mistakes import shorten

# A word that needs quotation marks in TOML, such as llama or /data/c4. A word that starts like a
# number, a list, a table or a string does not match.
_BARE_WORD = re.compile(r"[^\s\d.+\[\]{}'\"-][^\s\[\]{}'\"]*")
_PYTHON_STATEMENTS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse the content of a TOML file.

    Raises:
        ValueError: If the content is not TOML in UTF-8. The message explains how to fix the invalid
            line, or how to use a file in another format, such as a Hugging Face config.json.
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
    raise ValueError(explain_other_format(content) or problem)


def _explain_syntax_error(text: str, error: tomli.TOMLDecodeError) -> str:
    """Return an error message that contains the invalid line, its number and how to fix it."""
    line = text.split("\n")[error.lineno - 1].strip()
    remedy = _suggest_correction(line) or f"{error.msg}, in column {error.colno}"
    return f"line {error.lineno}: {shorten(line)} is not valid TOML. {remedy}."


def _suggest_correction(line: str) -> str:
    """Explain how to write a line of Python, YAML or shell syntax in TOML.

    Returns:
        The advice, or an empty string if the mistake is not recognized. For example:

        - "steps: 100": "Write steps = 100"
        - "training:": "Write [training]"
        - "seed: null": "TOML has no null. Leave seed out"
        - "name = two words": "Put text in quotation marks, and write numbers with digits only"
    """
    # Match "key = value # comment" or "key: value # comment".
    assignment = re.fullmatch(r"([\w.-]+)\s*([=:])\s*([^#]*?)\s*(#.*)?", line)
    if assignment is None or _is_toml(line):
        return ""

    key, sign, value, _ = assignment.groups()
    if sign == ":" and not value:
        return f"Write [{key}]"
    if value.lower() in ("none", "null"):
        return f"TOML has no {value}. Leave {key} out"

    corrected_line = f"{key} = {_correct_value(key, value)}"
    if _is_toml(corrected_line):
        return f"Write {corrected_line}"
    has_letters_but_no_quotes = re.fullmatch(r"[^'\"]*[A-Za-z][^'\"]*", value)
    if has_letters_but_no_quotes:
        return "Put text in quotation marks, and write numbers with digits only"
    return ""


def _correct_value(key: str, value: str) -> str:
    r"""Convert a value to the syntax of TOML, for example True to true, or llama to "llama".

    In TOML, backslashes are literal only between single quotes: "C:\data" becomes 'C:\data'.
    """
    text = value.strip("\u2018\u2019\u201c\u201d ")  # curly quotation marks of word processors
    if text.lower() in ("true", "false"):
        return text.lower()

    quote = "'" if "\\" in text else '"'
    if quote == "'" and text.startswith('"'):
        return "'" + text.strip('"') + "'"
    is_flavor = key.rpartition(".")[2] == "flavor"  # can start with a digit, as in 8b
    if _BARE_WORD.fullmatch(text) or (is_flavor and re.fullmatch(r"[\w.-]+", text)):
        return f"{quote}{text}{quote}"
    return text


def _is_toml(text: str) -> bool:
    """Return whether `text` is valid TOML."""
    try:
        tomli.loads(text)
    except ValueError:
        return False
    return True


def explain_other_format(content: bytes) -> str | None:
    """Explain how to use a JSON or Python file that was passed as a job file.

    Returns:
        One or several sentences, or None if the file is neither JSON nor Python.
    """
    table = parse_json(content)
    if table is not None:
        return _explain_json(table)
    if not _is_python(content):
        return None
    return (
        "this is Python code, which titanlite does not run. To convert a config of torchtitan 0.3, "
        "see docs/reference/from_torchtitan.md. Otherwise, copy a job file from train_configs/ and "
        "set the same values in it; `titanlite train --help` explains the keys."
    )


def _is_python(content: bytes) -> bool:
    """Return whether a file is Python code that contains a function, a class or an import."""
    text = content.decode("utf-8-sig", errors="replace")
    try:
        statements = ast.parse(text).body  # does not execute the code
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(statement, _PYTHON_STATEMENTS) for statement in statements)


def parse_json(content: bytes) -> dict[str, Any] | None:
    """Return the content of a file that is a JSON object, or None for any other file."""
    try:
        value = json.loads(content.decode("utf-8-sig", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _explain_json(table: dict[str, Any]) -> str:
    """Explain what kind of JSON file was passed as a job file, and how to use it."""
    if "model_type" in table or "architectures" in table:
        return (
            "this is the config.json of a Hugging Face model, not a job file. To train the model, "
            "run `titanlite train --from FOLDER`. To convert its weights to a checkpoint, run "
            "`titanlite import --hf FOLDER --out DIR`."
        )
    if "model_spec" in table:
        return (
            "this is a resolved config of torchtitan 0.3, not a job file. To convert it, run "
            "`titanlite migrate FILE --out NEW.toml`."
        )
    if {"job", "model", "training"} <= table.keys():
        return (
            "this is the JSON copy of a torchtitan job that job.save_config_file writes. "
            "Run `titanlite migrate` on the TOML file of that job."
        )
    return "this is JSON, and a job file is TOML."
