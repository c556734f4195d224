"""Extracting text from the records of data sources, and explaining why a record has none."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.mistakes import shorten

MAX_LINE_BYTES = 1 << 28  # a small compressed file can contain a JSON line of any length
_SKIP_BYTES = 1 << 20  # the rest of a longer line is skipped in pieces of this size
_MAX_FIELDS = 8  # maximum number of fields that an error message lists
_ROLE_FIELDS = ("role", "from")  # fields of chat messages
_CONTENT_FIELDS = ("content", "value")
_SPLIT_ARRAY = ". `jq -c '.[]' FILE > NEW.jsonl` writes each item of an array to its own line"


class BadRecord(UserError):
    """Error for a record that cannot be read.

    Functions that read records return this error instead of raising it. The option
    dataset.on_bad_record determines whether such a record is skipped or ends the run.
    """


class MaskedText(str):
    """The text of a document in which only some characters count in the loss.

    Attributes:
        trained_ranges: Ranges of characters that count, as (start, end) with `end` exclusive, in
            ascending order.
    """

    trained_ranges: list[tuple[int, int]]


class Prepared(NamedTuple):
    """A document that was tokenized in advance."""

    tokens: np.ndarray
    """(n,) integers, with BOS and EOS if the files contain them."""
    text_hash: int | None
    """Hash that determines whether the document is held out, or None if the run has no holdout."""


Record = str | Prepared | BadRecord
"""The text of a document, its tokens, or the error that explains why it cannot be read.

The text is a `MaskedText` if dataset.loss_mask_column is set.
"""


def group_records(
    records: Iterable[Record], max_records: int, max_characters: int
) -> Iterator[list[Record]]:
    """Divide records into groups of consecutive records.

    A group ends when it has `max_records` records, or at least `max_characters` characters.
    """
    group: list[Record] = []
    num_characters = 0
    for record in records:
        group.append(record)
        num_characters += len(record) if isinstance(record, str) else 0
        if len(group) == max_records or num_characters >= max_characters:
            yield group
            group = []
            num_characters = 0
    if group:
        yield group


def hash_text(text: str) -> int:
    """Return a 64-bit hash of a text, which determines whether the document is held out.

    A document is held out for validation if its hash is less than holdout * 2**64. Do not change
    this function, because resumed runs would then train on held-out documents.
    """
    return hash_bytes(text.encode())


def hash_bytes(content: bytes) -> int:
    """Return a 64-bit hash of the bytes of a document, to select documents for validation."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def parse_record(
    raw: object, column: str, location: str, mask_column: str | None = None
) -> str | BadRecord:
    """Return the text of a record, or a `BadRecord` if it has none.

    Args:
        raw: A line of JSON (bytes), or a dictionary.
        column: Name of the field that contains the text.
        location: Location of the record, for the error message.
        mask_column: Name of the field that contains the loss mask, if there is one.
    """
    try:
        return extract_text(raw, column, mask_column)
    except (ValueError, RecursionError) as error:
        return BadRecord(f"{location}: {error}")


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, including their line ends.

    Lines of more than `MAX_LINE_BYTES` are truncated to `MAX_LINE_BYTES` + 1, so that a damaged
    file cannot exhaust memory. You can recognize truncated lines by this length.
    """
    while line := stream.readline(MAX_LINE_BYTES + 1):
        # Skip the rest of a line that is too long.
        has_rest = len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")
        while has_rest:
            piece = stream.readline(_SKIP_BYTES)
            has_rest = bool(piece) and not piece.endswith(b"\n")
        yield line


def extract_text(raw: object, column: str, mask_column: str | None) -> str | MaskedText:
    """Return the text of a record.

    Args:
        raw: A line of JSON (bytes), or a dictionary.
        column: Name of the field that contains the text.
        mask_column: Name of the field that contains the loss mask, if there is one.

    Returns:
        The text. With `mask_column`, it is a `MaskedText`.

    Raises:
        ValueError: If the text or the loss mask is missing or invalid. The message proposes a
            remedy if one is known.
        RecursionError: If the JSON is nested too deeply.
    """
    record = _parse_line(raw) if isinstance(raw, bytes) else raw
    if not isinstance(record, dict):
        kind = type(record).__name__
        remedy = _SPLIT_ARRAY if isinstance(record, list) else ""
        raise ValueError(f"each line must be a JSON object, this one is a {kind}{remedy}")

    text = record.get(column)
    if not isinstance(text, str):
        raise ValueError(_explain_missing_text(record, column))
    text.encode()  # raises for half of a surrogate pair, which a JSON escape can contain
    if mask_column is None:
        return text

    masked_text = MaskedText(text)
    masked_text.trained_ranges = _parse_mask(record.get(mask_column), mask_column, len(text))
    return masked_text


def _parse_mask(mask: object, column: str, length: int) -> list[tuple[int, int]]:
    """Check a loss mask, and return the ranges of characters that count as (start, end) tuples.

    Args:
        mask: Content of the field that contains the loss mask, such as [[5, 9], [20, 31]].
        column: Name of this field, for the error message.
        length: Number of characters of the text.

    Raises:
        ValueError: If the mask is not a list of ascending ranges within the text.
    """
    expectation = (
        f"field {column!r} (loss_mask_column) must be a list of [start, end] in ascending order, "
        f"within the {length:,} characters of the text; it contains"
    )
    if not isinstance(mask, list):
        raise ValueError(f"{expectation} {shorten(repr(mask))}")

    ranges = []
    last_end = 0
    for item in mask:
        if not _is_range(item, last_end, length):
            raise ValueError(f"{expectation} {shorten(repr(item))}")
        start, end = item
        ranges.append((start, end))
        last_end = end
    return ranges


def _is_range(item: object, min_start: int, max_end: int) -> TypeGuard[tuple[int, int]]:
    """Return whether `item` is [start, end] with `min_start` <= start <= end <= `max_end`."""
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    start, end = item
    are_integers = isinstance(start, int) and isinstance(end, int)
    return are_integers and min_start <= start <= end <= max_end


def _parse_line(line: bytes) -> object:
    """Parse a line of JSON.

    Raises:
        ValueError: If the line is too long or is not valid JSON in UTF-8. The message explains how
            to convert the file.
    """
    if len(line) > MAX_LINE_BYTES:
        limit = f"{MAX_LINE_BYTES >> 20} MiB"
        raise ValueError(f"the line is longer than {limit}. Divide the document or the array")

    # With the line end, an error at the end would be reported in column 1 of the next line.
    line = line.rstrip()
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(explain_encoding(error)) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not valid JSON in column {error.colno}: {error.msg}{_propose_remedy(line, error)}"
        ) from None


def _propose_remedy(line: bytes, error: json.JSONDecodeError) -> str:
    """Propose how to read a file with a line that is not JSON, as the end of an error message.

    For example, propose source = "text" for plain text. Return "" if no remedy is known.

    Args:
        line: The line, without its line end.
        error: The error from parsing it.
    """
    if line.startswith(b"["):
        return _SPLIT_ARRAY
    if not line.startswith(b"{"):
        return '. To read plain text, set source = "text"'
    is_incomplete = error.pos >= len(error.doc)
    if is_incomplete:
        return ". If objects span lines, `jq -c . FILE > NEW.jsonl` writes one per line"
    return ""


def explain_encoding(error: UnicodeDecodeError) -> str:
    """Return an error message for a file that is not UTF-8, with a command that converts it.

    The command assumes UTF-16 if the first 64 bytes contain a zero byte, and otherwise Latin-1.
    """
    encoding = "UTF-16" if b"\0" in error.object[:64] else "LATIN1"  # as iconv calls it
    name = "Latin-1" if encoding == "LATIN1" else encoding
    convert = f"If it is {name}, `iconv -f {encoding} -t UTF-8 FILE > NEW` converts it"
    return f"byte 0x{error.object[error.start]:02x} is not UTF-8. {convert}"


def check_column(
    column: str, columns: Iterable[str], name: object, key: str = "text_column"
) -> None:
    """Check that a table, such as a Parquet file, has the column that a job selects.

    Args:
        column: Name of the column, which is the value of `key`.
        columns: Names of the columns in the table.
        name: Name of the table, for the error message.
        key: Option that selects the column, "text_column" or "loss_mask_column".

    Raises:
        UserError: If the table has no such column.
    """
    columns = list(columns)
    if column not in columns:
        raise UserError(
            f"{name}: {_explain_missing_field(column, columns, key)}. Set {key} to one of them."
        )


def _explain_missing_field(column: str, fields: Iterable[str], key: str = "text_column") -> str:
    """Return an error message: option `key` selects a `column` that is not among `fields`."""
    return f"no field {column!r} ({key}); there are: {', '.join(map(repr, fields))}"


def _explain_missing_text(record: dict[str, Any], column: str) -> str:
    """Return an error message for a record without text in the field `column`, with a remedy."""
    problem = _explain_missing_field(column, record)
    if column in record:
        json_type = type(record[column]).__name__.replace("NoneType", "null")
        problem = f"field {column!r} must be a string, it is {json_type}"

    for name, value in record.items():
        if _is_conversation(value):
            command = _convert_conversation(name, value[0])
            return f"{problem}. To convert conversations to text: {command}"

    if column in record:  # the name is right, and only the value is wrong
        return problem
    return problem + _propose_text_column(record)


def _propose_text_column(record: dict[str, Any]) -> str:
    """Propose values of text_column for a record, as the end of an error message.

    If there are several text fields, also propose a jq command that joins them. Return "" if no
    field contains text.
    """
    text_fields = [name for name, value in record.items() if isinstance(value, str)]
    filled_fields = [name for name in text_fields if record[name].strip()]
    if not filled_fields:
        return ""

    # Propose at most `_MAX_FIELDS` fields, so that the message stays short.
    columns = " or ".join(map(repr, filled_fields[:_MAX_FIELDS]))
    proposal = f". Set text_column to {columns}"
    if len(text_fields) > 1:
        parts = ", ".join(f".{_quote_for_jq(name)}" for name in text_fields[:_MAX_FIELDS])
        proposal += f", or join fields: {_join_with_jq(parts)}"
    return proposal


def _convert_conversation(name: str, message: dict[str, Any]) -> str:
    """Return a jq command that converts chat messages to text.

    Args:
        name: Name of the field that contains the list of messages.
        message: The first message, such as {"role": "user", "content": "Hi"}.
    """
    role = next(field for field in _ROLE_FIELDS if field in message)
    content = next(field for field in _CONTENT_FIELDS if field in message)
    return _join_with_jq(f'.{_quote_for_jq(name)}[] | .{role} + ": " + .{content}')


def _join_with_jq(parts: str) -> str:
    """Return a jq command that joins several values of each record into a field "text".

    Args:
        parts: jq expression that yields the values, such as ".title, .body".
    """
    program = f'{{text: [{parts}] | join("\\n")}}'
    return f"`jq -c {shlex.quote(program)} FILE > NEW.jsonl`"


def _quote_for_jq(name: str) -> str:
    """Return a field name as jq syntax, quoted unless it is an identifier."""
    return name if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) else json.dumps(name)


def _is_conversation(value: object) -> bool:
    """Return whether the value of a field looks like a list of chat messages.

    The first item must have a role ("role" or "from") and a content ("content" or "value").
    """
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    first = value[0]
    has_content = any(isinstance(first.get(name), str) for name in _CONTENT_FIELDS)
    return has_content and any(name in first for name in _ROLE_FIELDS)
