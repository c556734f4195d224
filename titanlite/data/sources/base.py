"""What every source of documents is.

Invariant: document i of a source is the same text each time, whatever was read before. The fingerprint changes when the
documents change. A file that is not what it was when the source was opened is an error: its documents would be others.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from fsspec.spec import AbstractBufferedFile

from titanlite.config import storage
from titanlite.config.errors import UserError, counted
from titanlite.config.schema import TextSource
from titanlite.data.shuffle import permuted

_BRINGERS = ThreadPoolExecutor(storage.PARALLEL)
_ONE_A_LINE = "One JSON object a line is needed; `jq -c '.[]' FILE` makes lines of one array"


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


class File:
    """A file that stays what it was when it was first opened: its size and the time of its last write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[int, Any] | None = None

    def open(self, ahead: int = -1) -> BinaryIO:
        """The file for reading, at least `ahead` bytes at a time. Raises UserError: it cannot be read, or has
        changed."""
        try:
            stream = self.path.open("rb", ahead)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None
        self.check(stream.fileno())
        return stream

    def check(self, descriptor: int | None = None) -> tuple[int, Any]:
        """Its size and what tells its version. Raises UserError if the file, or what is open as `descriptor`, is gone
        or has changed."""
        now = self._look(descriptor)
        self._known = before = self._known or now
        if before != now:
            sizes = f"{before[0]:,} bytes then, {now[0]:,} now"
            remedy = 'Restore it, or go on with what it is now by dataset.on_change = "warn".'
            raise UserError(f"{self.path} has changed while it was read ({sizes}). {remedy}")
        return now

    def _look(self, descriptor: int | None) -> tuple[int, object]:
        try:
            status = os.stat(self.path if descriptor is None else descriptor)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None
        return status.st_size, status.st_mtime_ns


class Blocks(AbstractBufferedFile):
    """The bytes of the file at the URL `path`, by the blocks that `storage.block` has or brings."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        first, last = start // storage.BLOCK, -(-min(end, self.size) // storage.BLOCK)
        raw = b"".join(_BRINGERS.map(partial(storage.block, self.path, self.kwargs["version"]), range(first, last)))
        return raw[start - first * storage.BLOCK : end - first * storage.BLOCK]


class RemoteFile(File):
    """A file at a URL. The blocks that are read are kept on this machine. It stays what it was as a local one."""

    def open(self, ahead: int = -1) -> BinaryIO:
        version = self._known or self.check()
        stream: Any = Blocks(None, str(self.path), cache_type="none", size=version[0], version=version)
        return io.BufferedReader(stream, max(ahead, 1 << 16))

    def _look(self, descriptor: int | None) -> tuple[int, object]:
        with storage.answered(str(self.path)):
            remote, path = storage.opened(str(self.path))
            return storage.identity(remote.info(path))


class Source(ABC):
    """A set of documents. It can be pickled, so that background processes can read it, too.

    Attributes:
        name: what messages call it.
        column: of the text.
        files: what it reads on this machine.
        fingerprint: hash of the contents, or of a sample where a file is too large to read before the first step.
        num_documents, num_tokens: None where only reading everything would tell.
        num_units: of what is read in an order: documents, or the parts of a sequential source.
    """

    fingerprint: str
    num_documents: int | None = None
    num_tokens: int | None = None
    num_units: int

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        self.name = spec.source if spec.path is None else f"{spec.source} {spec.path}"
        self.column = spec.text_column
        self.files = [(RemoteFile if storage.url_of(file) else File)(file) for file in files]
        list(_BRINGERS.map(File.check, self.files))  # a storage answers many in the time of one

    def describe(self) -> str:
        """One line for the log."""
        return f"{self.name}: " + ("streamed" if (n := self.num_documents) is None else counted(n, "document"))

    def where(self, part: int, number: int) -> str:
        """Where a document is from, for a person."""
        return f"part {part}, document {number}"

    def check_files(self, file: File | None = None) -> None:
        """Raises UserError if `file`, or any file, is gone or has changed."""
        for each in self.files if file is None else (file,):
            each.check()

    @abstractmethod
    def documents(self, start: int = 0) -> Iterator[Record]:
        """All documents from number `start` on, in their order."""

    def __iter__(self) -> Iterator[Record]:
        return self.documents()


class RandomAccess(Source):
    """Documents that can be read in any order: `num_units` of them, which is `num_documents`, too."""

    @abstractmethod
    def record(self, index: int) -> Record:
        """Document `index`."""

    def sample(self) -> list[int]:
        """Numbers of 64 documents, spread over the whole source."""
        return permuted(np.arange(min(self.num_units, 64)), self.num_units, "sample").tolist()

    def sizes(self) -> np.ndarray:
        """How large each document is: bytes where they are known, otherwise 1."""
        return np.ones(self.num_units, dtype=int)

    def documents(self, start: int = 0) -> Iterator[Record]:
        return map(self.record, range(start, self.num_units))


class Sequential(Source):
    """Documents in parts (files, row groups), each of which can only be read from front to end.

    Attributes:
        parts: the file that each part is in (None: that is not known), and which part of it.
    """

    parts: list[tuple[Any, int]]

    @property
    def num_units(self) -> int:  # type: ignore[override]
        return len(self.parts)

    @abstractmethod
    def raw(self, file: Any, number: int) -> Iterator[tuple[str, object]]:
        """What the documents of a part are made of: where each one is, for a person, and what `text_of` takes."""

    def read(self, part: int, start: int = 0) -> Iterator[Record | None]:
        """Documents of `part`. In place of those before number `start` come Nones, which cost less.

        Raises:
            UserError: the part is damaged, or has changed.
        """
        file, number = self.parts[part]
        place = f"the front of {self.name if file is None else file.path}"
        try:
            for i, (place, raw) in enumerate(self.raw(file, number)):
                yield None if i < start else record_of(raw, self.column, place)
        except Exception as error:  # each library raises errors of its own
            self.check_files(file)
            raise UserError(f"cannot read on after {place}: {error!r}. If it is damaged, copy it again.") from None
        self.check_files(file)

    def documents(self, start: int = 0) -> Iterator[Record]:
        records = chain.from_iterable(map(self.read, range(self.num_units)))
        return islice((record for record in records if record is not None), start, None)


def text_hash(text: str) -> int:
    """A number below 2**64 that depends on the text alone. It decides whether a document is held out for validation:
    another hash would let old runs train on what they held out."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def record_of(raw: object, column: str, place: str) -> str | BadRecord:
    """`text_of`, or what it says about the record at `place`."""
    try:
        return text_of(raw, column)
    except (ValueError, RecursionError) as error:
        return BadRecord(f"{place}: {error}")


def text_of(raw: object, column: str) -> str:
    """The text in `column` of a record, or of a line of JSON. Raises ValueError or RecursionError: there is none."""
    try:  # without the line end, or a mistake there would be in column 1 of the next line
        record = json.loads(raw.rstrip()) if isinstance(raw, bytes) else raw
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON in column {error.colno}: {error.msg}. {_ONE_A_LINE}") from None
    if not isinstance(record, dict):
        raise ValueError(f"this is a {type(record).__name__}. {_ONE_A_LINE}")
    check_column(column, record)
    if not isinstance(text := record[column], str):
        raise ValueError(f"field {column!r} must be a string, it is {type(text).__name__.replace('NoneType', 'null')}")
    text.encode()  # an escape in JSON can be one half of a surrogate pair
    return text


def check_column(column: str, columns: Iterable[str]) -> None:
    """Raises ValueError: the text column is not there."""
    if column not in columns:
        raise ValueError(f"no field {column!r} (text_column); there are: {', '.join(map(repr, columns))}")


def sampled_fingerprint(files: list[File], column: str, sample: int = 1 << 16) -> str:
    """Hash of the names, the sizes, the first and the last `sample` bytes, for files that are too large to read before
    the first step; and of the text column."""
    digest = xxhash.xxh3_128()
    for file in files:
        with file.open() as stream:
            size = stream.seek(0, os.SEEK_END)
            digest.update(f"{file.path.name} {size}\0".encode())
            for start in (0, max(0, size - sample)):
                stream.seek(start)
                digest.update(stream.read(sample))
    return with_column(digest.hexdigest(), column)


def with_column(fingerprint: str, column: str) -> str:
    """The fingerprint of the text in `column` of contents that have `fingerprint`: another column is other text."""
    return fingerprint if column == "text" else xxhash.xxh3_128_hexdigest(f"{fingerprint} {column}".encode())
