"""Extracting text from the records of data sources, and explaining why a record has none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.mistakes import shorten

MAX_LINE_BYTES = 1 << 28  # a small compressed file can contain a JSON line of any length
_SKIP_BYTES = 1 << 20  # the rest of a longer line is skipped in pieces of this size
CONVERSION_REMEDY = "For files in other formats, see docs/guides/convert_data.md."


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
        ValueError: If the text or the loss mask is missing or invalid.
        RecursionError: If the JSON is nested too deeply.
    """
    record = _parse_line(raw) if isinstance(raw, bytes) else raw
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ValueError(f"each line must be a JSON object, this one is a {kind}")

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
    """Validate a loss mask, and return the ranges of characters that the loss includes.

    Each range is a tuple (start, end), with `end` exclusive.

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
        ValueError: If the line is too long or is not valid JSON in UTF-8.
    """
    if len(line) > MAX_LINE_BYTES:
        limit = f"{MAX_LINE_BYTES >> 20} MiB"
        raise ValueError(f"the line is longer than {limit}. Divide the document or the array")

    # With the line end, an error at the end would be reported in column 1 of the next line.
    line = line.rstrip()
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON in column {error.colno}: {error.msg}"
        if not line.startswith((b"{", b"[")):
            problem += '. To read plain text, set source = "text"'
        raise ValueError(problem) from None


def check_column(
    column: str, columns: Sequence[str], name: object, key: str = "text_column"
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
    if column not in columns:
        raise UserError(f"{name}: {_explain_missing_field(column, columns, key)}.")


def _explain_missing_field(column: str, fields: Sequence[str], key: str = "text_column") -> str:
    """Return an error message for a missing field.

    Args:
        column: Name of the field, which is the value of `key`.
        fields: Names of the fields that can be selected instead.
        key: Option that selects the field.
    """
    if not fields:
        return f"no field {column!r}, and no other field contains text"
    names = ", ".join(map(repr, fields))
    return f"no field {column!r}. Set {key} to one of {names}"


def _explain_missing_text(record: dict[str, Any], column: str) -> str:
    """Return an error message: the field `column` of a record is missing or is not a string."""
    if column in record:
        json_type = type(record[column]).__name__.replace("NoneType", "null")
        return f"field {column!r} must be a string, it is {json_type}"

    text_fields = [name for name, value in record.items() if isinstance(value, str)]
    return _explain_missing_field(column, text_fields)
