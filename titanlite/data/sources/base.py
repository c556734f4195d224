"""Base classes of data sources.

Invariant: Document i of a source always has the same text, whatever was read before. The
fingerprint changes when the documents change. A file that changes after its source was opened is an
error.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np
import xxhash
from fsspec.spec import AbstractBufferedFile

from titanlite.config import storage
from titanlite.config.errors import UserError, format_count
from titanlite.config.schema import TextSource
from titanlite.data.shuffle import permuted
from titanlite.data.sources.records import Record, parse_record
from titanlite.data.tokenizer import Tokenizer

T = TypeVar("T")

_CHANGE_REMEDY = 'Restore it, or resume with the new contents: dataset.on_change = "warn".'
_SAMPLE_DOCUMENTS = 64
_SAMPLE_BYTES = 1 << 16
_fetchers = ThreadPoolExecutor(storage.PARALLEL)


class File:
    """A local data file whose methods raise an error if it changes while a run reads it.

    A checkpoint stores only a position in the file, which means nothing once the file has changed.
    Changes are detected by the size and the modification time of the file.

    Args:
        path: Path of the file.
        remedy: Last sentence of the error message, which proposes how to fix the problem.
    """

    def __init__(self, path: Path, remedy: str = _CHANGE_REMEDY) -> None:
        self.path = path
        self._remedy = remedy
        self._version: tuple[int, Any] | None = None

    def open(self, buffer_size: int = -1) -> BinaryIO:
        """Open the file for reading in binary mode, and check that it has not changed.

        Args:
            buffer_size: Size of the read buffer in bytes, as in Python's `open`.

        Raises:
            UserError: If the file cannot be read or has changed.
        """
        try:
            stream = self.path.open("rb", buffer_size)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None
        self.check(stream.fileno())
        return stream

    def read(self, start: int = 0, size: int = -1) -> bytes:
        """Read `size` bytes from byte `start` on. If `size` is -1, read to the end of the file.

        Raises:
            UserError: If the file has changed.
        """
        stream = _open_once(self)
        stream.seek(start)
        raw = stream.read(size)
        self.check_while_read()
        if len(raw) < size:  # possible only for a file at a URL
            raise UserError(f"{self.path} is shorter than its index. {self._remedy}")
        return raw

    def check(self, descriptor: int | None = None) -> tuple[int, Any]:
        """Check that the file has not changed since the first check, and return its version.

        Args:
            descriptor: File descriptor of an open stream of the file. Default: check the file that
                is now at the path.

        Returns:
            The size of the file in bytes, and a value that identifies its version, such as the
            modification time.

        Raises:
            UserError: If the file was removed or has changed.
        """
        version = self._read_version(descriptor)
        if self._version is None:
            self._version = version
        if version != self._version:
            sizes = f"from {self._version[0]:,} to {version[0]:,} bytes"
            raise UserError(f"{self.path} has changed while it was read ({sizes}). {self._remedy}")
        return version

    def check_while_read(self) -> None:
        """Check that the file did not change during a read. Call this after reading from a stream.

        Raises:
            UserError: If the file was removed or has changed.
        """
        self.check()

    def _read_version(self, descriptor: int | None) -> tuple[int, object]:
        """Return the size of the file, and a value that changes when the file is written.

        Args:
            descriptor: File descriptor of an open stream of the file. If it is None, use the path.

        Raises:
            UserError: If the file does not exist or cannot be accessed.
        """
        try:
            status = os.stat(self.path if descriptor is None else descriptor)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None
        return status.st_size, status.st_mtime_ns


# A shard has up to three files, and a process can usually open 1,024.
@lru_cache(maxsize=500)
def _open_once(file: File) -> BinaryIO:
    """Open a file without a buffer, or return the stream that an earlier call opened."""
    return file.open(0)


class _RemoteStream(AbstractBufferedFile):
    """Stream of a file at a URL. Its blocks are fetched in parallel and cached on this node."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` (exclusive) of the file, as fsspec requires."""
        first_block = start // storage.BLOCK
        end_block = -(-min(end, self.size) // storage.BLOCK)  # rounded up
        fetch = partial(storage.read_block, self.path, self.kwargs["version"])
        raw = b"".join(_fetchers.map(fetch, range(first_block, end_block)))
        offset = first_block * storage.BLOCK
        return raw[start - offset : end - offset]


class RemoteFile(File):
    """A file at a URL, which must not change while a run reads it."""

    def open(self, buffer_size: int = -1) -> BinaryIO:
        """Open the file for reading in binary mode. Its blocks are cached on this node.

        Args:
            buffer_size: Size of the read buffer in bytes, at least 64 KiB.

        Raises:
            UserError: If the version of the file is unknown and the storage cannot return it.
        """
        version = self._version or self.check()
        stream: Any = _RemoteStream(
            None, str(self.path), cache_type="none", size=version[0], version=version
        )
        return io.BufferedReader(stream, max(buffer_size, 1 << 16))

    def check_while_read(self) -> None:
        """Do nothing, because fetching a block of a changed file fails."""

    def _read_version(self, descriptor: int | None) -> tuple[int, object]:
        url = str(self.path)
        with storage.storage_errors(url):
            remote, path = storage.open_storage(url)
            return storage.file_version(remote.info(path))


def make_file(path: Path, remedy: str = _CHANGE_REMEDY) -> File:
    """Create a `RemoteFile` for a URL, or a `File` for a local path.

    Args:
        path: Local path or URL.
        remedy: Last sentence of the error that is raised if the file changes.
    """
    return RemoteFile(path, remedy) if storage.as_url(path) else File(path, remedy)


class Source(ABC):
    """A set of documents, such as the lines of some files or the rows of a table.

    Sources are pickled to send them to data workers.

    Attributes:
        name: Name of the source, for messages.
        column: Name of the field or column that contains the text.
        mask_column: Name of the field or column that contains the loss mask, if there is one.
        files: The files that the source reads.
        fingerprint: Hash of the contents, or of a sample if reading all files would take too long.
            Checkpoints store it to detect changed data.
        num_documents: Number of documents, or None if it is unknown before they are read.
        num_tokens: Number of tokens, or None if it is unknown before the text is tokenized.
        num_units: Number of items whose order is shuffled: documents, or the parts (such as files)
            of a sequential source.
    """

    fingerprint: str
    num_documents: int | None = None
    num_tokens: int | None = None
    num_units: int

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        self.name = spec.source if spec.path is None else f"{spec.source} {spec.path}"
        self.column = spec.text_column
        self.mask_column = spec.loss_mask_column
        self.files = [make_file(file) for file in files]
        # Remote storage takes a while per request, so check all files in parallel.
        list(_fetchers.map(File.check, self.files))

    def __iter__(self) -> Iterator[Record]:
        """Yield all documents in the order of the files."""
        return self.documents()

    def describe(self) -> str:
        """Return one line for the log with the name and number of documents."""
        if self.num_documents is None:
            return f"{self.name}: streamed"
        return f"{self.name}: {format_count(self.num_documents, 'document')}"

    def where(self, part: int, number: int) -> str:
        """Describe the location of a document for messages, such as "part 3, document 7".

        Args:
            part: Index of the part that contains the document, 0 if the source has no parts.
            number: Index of the document in the part, or in the source.
        """
        return f"part {part}, document {number}"

    def check_files(self) -> None:
        """Check that no file was removed or has changed since the source was opened.

        Raises:
            UserError: If a file was removed or has changed.
        """
        for file in self.files:
            file.check()

    def hash_samples(self) -> str:
        """Compute a fingerprint of the files without reading them completely.

        Hash the name of the text column, and for each file its name, its size, and its first and
        last 64 KiB.
        """
        digest = xxhash.xxh3_128()
        for file in self.files:
            with file.open() as stream:
                size = stream.seek(0, os.SEEK_END)
                digest.update(f"{file.path.name} {size}\0".encode())
                for start in (0, max(0, size - _SAMPLE_BYTES)):
                    stream.seek(start)
                    digest.update(stream.read(_SAMPLE_BYTES))
        return add_column(digest.hexdigest(), self.column)

    @abstractmethod
    def documents(self, start: int = 0) -> Iterator[Record]:
        """Yield the documents in the order of the files, from index `start` on."""


class RandomAccess(Source):
    """Base class of sources that can read any document by its index.

    The documents of these sources are shuffled individually, so `num_units` equals `num_documents`.
    """

    @abstractmethod
    def record(self, index: int) -> Record:
        """Return document `index`: its text, its tokens, or a `BadRecord` if it cannot be read."""

    def sample(self) -> list[int]:
        """Return the indices of up to 64 random documents, the same in each call.

        Use the sample to check a source at startup, and to estimate its size.
        """
        numbers = np.arange(min(self.num_units, _SAMPLE_DOCUMENTS))
        return permuted(numbers, self.num_units, "sample").tolist()

    def sizes(self) -> np.ndarray:
        """Return the size of each document in bytes, or an array of ones if sizes are unknown.

        Use the sizes to extrapolate the number of tokens from a sample.
        """
        return np.ones(self.num_units, dtype=int)

    def documents(self, start: int = 0) -> Iterator[Record]:
        """Yield the documents in the order of the files, from index `start` on."""
        return map(self.record, range(start, self.num_units))


class TokenSource(RandomAccess):
    """Base class of sources whose documents were tokenized in advance."""

    @abstractmethod
    def attach_tokenizer(self, tokenizer: Tokenizer, holdout: float) -> None:
        """Check that the token ids belong to the tokenizer of the run, and prepare to read them.

        Args:
            tokenizer: Tokenizer of the run.
            holdout: Value of validation.holdout. If it is positive, `record` must return hashes.

        Raises:
            UserError: If the ids do not match the tokenizer, or a file is damaged.
        """

    def describe(self) -> str:
        """Return one line for the log with the numbers of documents and tokens."""
        return f"{super().describe()}, {self.num_tokens:,} tokens"


class Sequential(Source):
    """Base class of sources whose parts (files or row groups) are read from front to back.

    The order of the parts is shuffled, and the documents of a part are shuffled within windows.

    Attributes:
        parts: For each part, the file that contains it (None if it is unknown), and the index of
            the part in this file.
    """

    parts: list[tuple[Any, int]]

    @property
    def num_units(self) -> int:  # type: ignore[override]
        """Number of parts."""
        return len(self.parts)

    @abstractmethod
    def raw(self, file: Any, number: int) -> Iterator[tuple[str, object]]:
        """Yield the location and the content of each record of a part, from front to back.

        Args:
            file: The file that contains the part, or None if it is unknown.
            number: Index of the part in the file, such as the number of a row group.

        Yields:
            The location for messages, such as "a.jsonl, line 3", and the content: a line of JSON
            (bytes) from text files, or a dictionary from tables.
        """

    def read(
        self,
        part: int,
        start: int = 0,
        report_progress: Callable[[int], None] = lambda index: None,
    ) -> Iterator[Record]:
        """Yield the documents of a part, or a `BadRecord` for each one that cannot be read.

        Args:
            part: Index of the part.
            start: Index, within the part, of the first document to yield.
            report_progress: Function that is called with the index of each document within the
                part, including the documents before `start`.

        Raises:
            UserError: If the part is damaged or has changed.
        """
        for index, (location, raw) in enumerate(self._read_raw(*self.parts[part])):
            report_progress(index)
            if index >= start:
                yield parse_record(raw, self.column, location, self.mask_column)

    def _read_raw(self, file: File | None, number: int) -> Iterator[tuple[str, object]]:
        """Yield the records of a part as `raw` does, but convert any exception to a `UserError`.

        The message names the last location that could be read, or the file that has changed.

        Args:
            file: The file that contains the part, or None if it is unknown.
            number: Index of the part in the file.

        Raises:
            UserError: If the part is damaged, or its file has changed.
        """
        last_location = f"the beginning of {self.name if file is None else file.path}"
        try:
            for location, raw in self.raw(file, number):
                last_location = location
                yield location, raw
        except Exception as error:  # each library has different exception types
            self._check_unchanged(file)  # raises if a changed file is the cause
            raise UserError(
                f"cannot read past {last_location}: {error!r}. "
                "If the file is damaged, copy it again."
            ) from None
        self._check_unchanged(file)

    def _check_unchanged(self, file: File | None) -> None:
        """Check that a file has not changed. If `file` is None, check all files of the source.

        Raises:
            UserError: If a file was removed or has changed.
        """
        if file is None:
            self.check_files()
        else:
            file.check()

    def documents(self, start: int = 0) -> Iterator[Record]:
        """Yield the documents in the order of the files, from index `start` on."""
        all_documents = chain.from_iterable(map(self.read, range(self.num_units)))
        return islice(all_documents, start, None)


class DocumentIndex(Generic[T]):
    """Maps the index of a document to its file, and to its start and end in this file.

    For example, if `ends[0]` is [10, 25, 40], document 1 is in `files[0]`, from byte (or token) 10
    to 25 (exclusive).

    Args:
        files: Files with the documents, in the order of the documents.
        ends: For each file, the end of each document in bytes or tokens.

    Attributes:
        ends: The argument `ends`.
        num_documents: Number of documents in all files.
    """

    def __init__(self, files: Sequence[T], ends: Sequence[np.ndarray]) -> None:
        self._files = files
        self.ends = ends
        # Index of the first document of each file, then the number of documents.
        self._first_documents = list(accumulate(map(len, ends), initial=0))
        self.num_documents = self._first_documents[-1]

    def locate(self, index: int) -> tuple[T, int, int]:
        """Return the file that contains document `index`, and the document's start and end."""
        file_index = bisect_right(self._first_documents, index) - 1
        ends = self.ends[file_index]
        index_in_file = index - self._first_documents[file_index]
        start = int(ends[index_in_file - 1]) if index_in_file else 0
        return self._files[file_index], start, int(ends[index_in_file])


def add_column(fingerprint: str, column: str) -> str:
    """Combine the fingerprint of files with the name of a column that the source reads.

    The default text column, "text", leaves the fingerprint unchanged.
    """
    if column == "text":
        return fingerprint
    return xxhash.xxh3_128_hexdigest(f"{fingerprint} {column}".encode())
