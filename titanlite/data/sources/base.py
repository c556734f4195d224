"""What every source of documents is.

Invariant: document i of a source is the same text each time, whatever was read before. The fingerprint changes when the
documents change.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from titanlite.config.errors import UserError


class BadRecord(UserError):
    """One record cannot be read. The message names file and place; `dataset.on_bad_record` says what follows."""


class Source(ABC):
    """A set of documents. It can be pickled, so that background processes can read it, too.

    Attributes:
        name: what messages call it.
        fingerprint: hash of the contents, or of a sample where a file is too large to read before the first step.
        num_documents: None where only reading everything would tell.
        size: bytes of text; None where unknown.
    """

    name: str
    fingerprint: str
    num_documents: int | None
    size: int | None

    def describe(self) -> str:
        """One line for the log."""
        documents = "" if self.num_documents is None else f"{self.num_documents:,} documents, "
        return f"{self.name}: {documents}" + ("streamed" if self.size is None else f"{self.size / 1e6:,.1f} MB")

    @abstractmethod
    def where(self, part: int, number: int) -> str:
        """Where a document is from, for a person."""


class RandomAccess(Source):
    """Documents that can be read in any order: `num_documents` of them."""

    @abstractmethod
    def record(self, index: int) -> str | np.ndarray | BadRecord:
        """Text of document `index`, or its tokens, or why it cannot be read."""

    def __getitem__(self, index: int) -> str | np.ndarray:
        """Text of document `index`, or its tokens.

        Raises:
            BadRecord: it cannot be read.
        """
        record = self.record(index)
        if isinstance(record, BadRecord):
            raise record
        return record

    def __len__(self) -> int:
        assert self.num_documents is not None
        return self.num_documents

    def where(self, part: int, number: int) -> str:
        return f"document {number}"

    def text_hash(self, index: int) -> int:
        """`text_hash` of the text of document `index`."""
        text = self[index]
        assert isinstance(text, str)
        return text_hash(text)


class Sequential(Source):
    """Documents in parts (files, row groups). A part can only be read from its front to its end.

    Attributes:
        num_parts: how many.
    """

    num_parts: int

    @abstractmethod
    def read(self, part: int, start: int) -> Iterator[str | BadRecord]:
        """Documents of `part` from number `start` on; for one that cannot be read, the reason."""

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


def open_file(file: Path) -> BinaryIO:
    """`file` for reading.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return file.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def listed(files: list[Path]) -> str:
    """The first few names, for a message."""
    return ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def sampled_fingerprint(files: list[Path], column: str, sample: int = 1 << 16) -> str:
    """Hash of the names, the sizes, the first and the last `sample` bytes of files, which are too large to read before
    the first step; and of the text column."""
    digest = xxhash.xxh3_128()
    for file in files:
        with open_file(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            digest.update(f"{file.name} {size}\0".encode())
            for start in (0, max(0, size - sample)):
                stream.seek(start)
                digest.update(stream.read(sample))
    return with_column(digest.hexdigest(), column)


def with_column(fingerprint: str, column: str) -> str:
    """The fingerprint of the text in `column` of contents that have `fingerprint`: another column is other text."""
    return fingerprint if column == "text" else xxhash.xxh3_128_hexdigest(f"{fingerprint} {column}".encode())


def skip_progress(what: str, goal: int) -> Callable[[int], None]:
    """A function of the number of documents skipped so far. It logs this number every five seconds."""
    last = time.monotonic()

    def progress(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            logging.getLogger("titanlite").info("%s: skipped %s of %s documents", what, f"{done:,}", f"{goal:,}")

    return progress
