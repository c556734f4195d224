"""Documents at random access: the standard library of the running interpreter, JSON lines, plain text files.

Invariant: document i of a source is the same text each time, whatever else was read before; the fingerprint changes
when any document does. May import titanlite.config.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset

TEXT_DOCUMENT_BYTES = 64 * 1024
_SCAN_BYTES = 1 << 22
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Source(ABC):
    """A numbered set of documents.

    Attributes:
        name: what a message calls it.
        size: bytes of all documents.
        fingerprint: hash of the names and contents.
    """

    name: str
    size: int
    fingerprint: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> str:
        """Text of document `index`.

        Raises:
            UserError: the document is broken; the message names file and place.
        """

    def describe(self) -> str:
        """One line for the log."""
        return f"{self.name}: {len(self):,} documents, {self.size / 1e6:,.1f} MB"


class FileSpans(Source):
    """Documents that are spans of bytes in files. Memory: 8 bytes a document, whatever its length.

    `cut(file)` yields the end offsets of the documents in one file while it hashes what it reads.
    """

    def __init__(
        self, name: str, files: list[Path], label: list[str], cut: Callable[[BinaryIO, xxhash.xxh3_128], np.ndarray]
    ) -> None:
        self.name, self._files = name, files
        digest = xxhash.xxh3_128()
        self._ends: list[np.ndarray] = []  # one array of end offsets a file
        for file, part in zip(files, label, strict=True):
            digest.update(part.encode() + b"\0")
            with _open(file) as stream:
                self._ends.append(cut(stream, digest))
        self._first = np.cumsum([0, *(len(ends) for ends in self._ends)])  # number of the first document of each file
        self.size = sum(int(ends[-1]) for ends in self._ends if len(ends))
        self.fingerprint = digest.hexdigest()
        if not len(self):
            raise UserError(f"{name} is empty: {_listed(files)} holds no document")

    def __len__(self) -> int:
        return int(self._first[-1])

    def _read(self, index: int) -> tuple[Path, int, bytes]:
        """File, offset in it, and the bytes of document `index`."""
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        ends, local = self._ends[number], index - int(self._first[number])
        start, end = (int(ends[local - 1]) if local else 0), int(ends[local])
        with _open(self._files[number]) as stream:
            stream.seek(start)
            return self._files[number], start, stream.read(end - start)

    def __getitem__(self, index: int) -> str:
        file, start, raw = self._read(index)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file}, byte {start + error.start}: not valid UTF-8 (0x{raw[error.start]:02x}); convert the file, "
                f"for example with: iconv -f latin1 -t utf-8"
            ) from None


class JsonLines(FileSpans):
    """One JSON object a line; blank lines are no documents."""

    def __init__(self, files: list[Path], column: str) -> None:
        super().__init__("jsonl", files, [file.name for file in files], _line_ends)
        self._column = column

    def __getitem__(self, index: int) -> str:
        file, start, raw = self._read(index)

        def wrong(what: str) -> UserError:
            skipped = len(raw) - len(raw.lstrip())
            with _open(file) as stream:  # only an error pays for counting the lines before it
                before, left = 1, start + skipped
                while left:
                    part = stream.read(min(left, _SCAN_BYTES))
                    before, left = before + part.count(b"\n"), left - len(part)
            return UserError(f"{file}, line {before}: {what}")

        try:
            record = json.loads(raw)
        except UnicodeDecodeError as error:
            raise wrong(f"not valid UTF-8 (0x{raw[error.start]:02x})") from None
        except ValueError as error:
            raise wrong(f"not valid JSON: {error}") from None
        if not isinstance(record, dict):
            raise wrong(f"a JSON object is needed, this is a {type(record).__name__}")
        if self._column not in record:
            raise wrong(f"no field {self._column!r} (dataset.text_column); there are: {', '.join(map(repr, record))}")
        text = record[self._column]
        if not isinstance(text, str):
            raise wrong(
                f"field {self._column!r} must be a string, it is {'null' if text is None else type(text).__name__}"
            )
        return text


def open_source(dataset: Dataset) -> Source:
    """The source that a [dataset] section names.

    Raises:
        UserError: a file is missing or the source is empty.
    """
    files = find_files(dataset)
    if dataset.source == "python_stdlib":
        root = _stdlib()
        labels = [file.relative_to(root).as_posix() for file in files]
        return FileSpans("python_stdlib", files, labels, _whole_file)
    if dataset.source == "jsonl":
        return JsonLines(files, dataset.text_column)
    return FileSpans("text", files, [file.name for file in files], _text_cuts)


def find_files(dataset: Dataset) -> list[Path]:
    """The files of a [dataset] section in a stable order; reads none of them, so that validation can call it.

    Raises:
        UserError: dataset.path is missing, or matches no readable file.
    """
    if dataset.source == "python_stdlib":
        return _stdlib_files()
    if dataset.path is None:
        raise UserError(f"dataset.path is missing: dataset.source = {dataset.source!r} needs a file or a glob")
    files = sorted(Path(name) for name in glob.glob(dataset.path, recursive=True))
    if Path(dataset.path).is_file():
        files = [Path(dataset.path)]  # a name that holds glob characters
    files = [file for file in files if file.is_file()]
    if not files:
        found = "is a folder; name files, for example with a glob" if Path(dataset.path).is_dir() else "matches no file"
        raise UserError(f"dataset.path = {dataset.path!r} {found} (current folder: {Path.cwd()})")
    return files


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files() -> list[Path]:
    """The .py files that are not empty, sorted by their path in the library."""
    root, files = _stdlib(), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]  # do not even look into site-packages
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted((file for file in files if file.stat().st_size), key=lambda file: file.relative_to(root))


def _open(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def _listed(files: list[Path]) -> str:
    return ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def _whole_file(stream: BinaryIO, digest: xxhash.xxh3_128) -> np.ndarray:
    raw = stream.read()
    digest.update(raw)
    return np.array([len(raw)] if raw else [], dtype=np.int64)


def _line_ends(stream: BinaryIO, digest: xxhash.xxh3_128) -> np.ndarray:
    """End offsets of the lines that are not blank; blank ones are left at the start of the line after them."""
    ends: list[np.ndarray] = []
    base, visible = 0, False  # visible: whether the line that is open has shown more than whitespace
    while block := stream.read(_SCAN_BYTES):
        digest.update(block)
        data = np.frombuffer(block, dtype=np.uint8)
        newlines = np.flatnonzero(data == 0x0A)
        # Number of visible bytes before each newline: the difference between neighbours is that of one line.
        seen = np.concatenate([[0], np.cumsum(data > 0x20)])
        counts = np.diff(seen[newlines], prepend=0)
        if len(newlines):
            counts[0] += visible
            ends.append(newlines[counts > 0] + base + 1)
            visible = bool(seen[-1] > seen[newlines[-1]])
        else:
            visible = visible or bool(seen[-1])
        base += len(block)
    if visible:
        ends.append(np.array([base]))
    return np.concatenate(ends) if ends else np.empty(0, dtype=np.int64)


def _text_cuts(stream: BinaryIO, digest: xxhash.xxh3_128) -> np.ndarray:
    """End offsets of documents of at most TEXT_DOCUMENT_BYTES, cut at line ends where there are any, so that the
    shuffle reaches within a large file; otherwise between two characters."""
    ends: list[int] = []
    rest = b""
    base = 0
    while block := stream.read(_SCAN_BYTES):
        digest.update(block)
        rest += block
        start = 0
        while len(rest) - start > TEXT_DOCUMENT_BYTES:
            limit = start + TEXT_DOCUMENT_BYTES
            end = rest.rfind(b"\n", start, limit) + 1
            if end <= start:
                end = limit
                while rest[end] & 0xC0 == 0x80 and limit - end < 4:  # step back over UTF-8 continuation bytes
                    end -= 1
            ends.append(base + end)
            start = end
        base, rest = base + start, rest[start:]
    if rest:
        ends.append(base + len(rest))
    return np.array(ends, dtype=np.int64)
