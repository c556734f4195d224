"""What every source of documents is.

Invariant: document i of a source is the same text each time, whatever was read before. The fingerprint changes when the
documents change. A file that is not what it was when the source was opened is an error: its documents would be others.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import xxhash

from titanlite.config.errors import UserError


class BadRecord(UserError):
    """One record cannot be read. The message names file and place; `dataset.on_bad_record` says what follows."""


class Prepared(NamedTuple):
    """A document that was tokenized before."""

    tokens: np.ndarray
    """bos and eos included; of any integer type."""
    text_hash: int
    """`text_hash` of its text; -1 where nobody needs it."""


Record = str | Prepared | BadRecord
"""The text of a document, or its tokens, or why it cannot be read."""


class Files:
    """The files of a source, and what they were when it was opened.

    Raises:
        UserError: one cannot be read.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._known = [_state(path) for path in paths]

    def open(self, number: int) -> BinaryIO:
        """File `number` for reading. Raises UserError: it cannot be read, or has changed."""
        stream = open_file(self.paths[number])
        self.check(number, stream)
        return stream

    def check(self, number: int, stream: BinaryIO | None = None) -> None:
        """Raises UserError if file `number`, or what was opened as `stream`, is not what it was."""
        path, before = self.paths[number], self._known[number]
        if (now := _state(path, stream)) != before:
            sizes = f"{before[0]:,} bytes then, {now[0]:,} now" if now[0] != before[0] else "it was written to"
            raise UserError(
                f"{path} has changed while it was read ({sizes}). Restore it, or start again on what it is now by "
                'dataset.on_change = "warn".'
            )

    def check_all(self) -> None:
        """`check` for each file."""
        for number in range(len(self.paths)):
            self.check(number)


def open_file(path: Path) -> BinaryIO:
    """`path` for reading. Raises UserError: it cannot be read."""
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from None


def _state(path: Path, stream: BinaryIO | None = None) -> tuple[int, int]:
    """Size and time of the last write."""
    try:
        status = os.stat(path) if stream is None else os.fstat(stream.fileno())
    except OSError as error:
        raise _unreadable(path, error) from None
    return status.st_size, status.st_mtime_ns


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror}")


class Source(ABC):
    """A set of documents. It can be pickled, so that background processes can read it, too.

    Attributes:
        name: what messages call it.
        fingerprint: hash of the contents, or of a sample where a file is too large to read before the first step.
        files: what it reads on this machine.
        num_documents: None where only reading everything would tell.
        size: bytes of text; None where unknown.
        num_units: of what is read in an order: documents, or the parts of a sequential source.
    """

    name: str
    fingerprint: str
    files: Files
    num_documents: int | None = None
    size: int | None = None
    num_units: int

    def describe(self) -> str:
        """One line for the log."""
        documents = "" if self.num_documents is None else f"{self.num_documents:,} documents, "
        return f"{self.name}: {documents}" + ("streamed" if self.size is None else f"{self.size / 1e6:,.1f} MB")

    @abstractmethod
    def where(self, part: int, number: int) -> str:
        """Where a document is from, for a person."""

    @abstractmethod
    def __iter__(self) -> Iterator[Record]:
        """All documents, in their order."""


class RandomAccess(Source):
    """Documents that can be read in any order: `num_documents` of them."""

    @abstractmethod
    def record(self, index: int) -> Record:
        """Document `index`."""

    def __len__(self) -> int:
        assert self.num_documents is not None
        return self.num_documents

    @property
    def num_units(self) -> int:  # type: ignore[override]
        return len(self)

    def __iter__(self) -> Iterator[Record]:
        return map(self.record, range(len(self)))

    def where(self, part: int, number: int) -> str:
        return f"document {number}"


class Sequential(Source):
    """Documents in parts (files, row groups): `num_units` of them. A part can only be read from front to end."""

    @abstractmethod
    def read(self, part: int, start: int = 0) -> Iterator[Record | None]:
        """Documents of `part`. In place of those before number `start` come Nones, which cost less."""

    def __iter__(self) -> Iterator[Record]:
        for part in range(self.num_units):
            yield from filter(lambda record: record is not None, self.read(part))  # type: ignore[misc]

    def where(self, part: int, number: int) -> str:
        return f"part {part}, document {number}"


def text_hash(text: str) -> int:
    """A number below 2**64 that depends on the text alone. It decides whether a document is held out for validation:
    another hash would let old runs train on what they held out."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def check_text(text: object, column: str, place: Callable[[], str]) -> str | BadRecord:
    """`text` if it is a string of whole characters, or what is wrong. `place` is called for that message only."""
    if not isinstance(text, str):
        found = "null" if text is None else type(text).__name__
        return BadRecord(f"{place()}: field {column!r} must be a string, it is {found}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an escape in JSON can be one half of a pair
        half = f"character {error.start + 1} is \\u{ord(text[error.start]):04x}, half of a surrogate pair"
        return BadRecord(f"{place()}: field {column!r} is not valid Unicode: {half}")
    return text


def no_column(column: str, columns: list[str]) -> str:
    """What to say about a text column that is not there."""
    return f"no field {column!r} (dataset.text_column); there are: {', '.join(map(repr, columns))}"


def is_empty(name: str, files: list[Path]) -> UserError:
    """The error for a source without a document."""
    some = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return UserError(f"{name} is empty: {some or 'it'} holds no document")


def sampled_fingerprint(files: Files, column: str, sample: int = 1 << 16) -> str:
    """Hash of the names, the sizes, the first and the last `sample` bytes of files, which are too large to read before
    the first step; and of the text column."""
    digest = xxhash.xxh3_128()
    for number, file in enumerate(files.paths):
        with files.open(number) as stream:
            size = stream.seek(0, os.SEEK_END)
            digest.update(f"{file.name} {size}\0".encode())
            for start in (0, max(0, size - sample)):
                stream.seek(start)
                digest.update(stream.read(sample))
    return with_column(digest.hexdigest(), column)


def with_column(fingerprint: str, column: str) -> str:
    """The fingerprint of the text in `column` of contents that have `fingerprint`: another column is other text."""
    return fingerprint if column == "text" else xxhash.xxh3_128_hexdigest(f"{fingerprint} {column}".encode())
