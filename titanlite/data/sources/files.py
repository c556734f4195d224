"""Local files: the standard library's sources, text, JSON lines, and compressed JSON lines.

Invariant: as in base. Plain files are read at random access; compressed ones cannot be sought in, so that a part of
them is a file.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sysconfig
import zlib
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from titanlite.config.errors import UserError
from titanlite.data.sources.base import (
    BadRecord,
    Files,
    RandomAccess,
    Sequential,
    check_text,
    is_empty,
    no_column,
    sampled_fingerprint,
    with_column,
)

TEXT_DOCUMENT_BYTES = 64 * 1024
COMPRESSED = (".gz", ".zst")
_SCAN_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 18  # of text, in memory for each compressed file that is open
_BLANK = bytes(range(0x21))  # a line of these alone is no document
_STDLIB = Path(sysconfig.get_paths()["stdlib"])
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Cut = Callable[[BinaryIO, "xxhash.xxh3_128"], np.ndarray]


class FileSpans(RandomAccess):
    """Documents that are spans of bytes in files. Memory: 8 bytes a document, whatever its length.

    Args:
        labels: what the fingerprint calls the files.
        cut: `cut(file, digest)` returns the end offsets of the documents in one file, and hashes what it reads.
    """

    def __init__(self, name: str, files: list[Path], labels: list[str], cut: Cut) -> None:
        self.name, self.files = name, Files(files)
        digest = xxhash.xxh3_128()
        self._ends: list[np.ndarray] = []  # one array of end offsets a file
        for number, label in enumerate(labels):
            digest.update(label.encode() + b"\0")
            with self.files.open(number) as stream:
                self._ends.append(cut(stream, digest))
        self._first = np.cumsum([0, *map(len, self._ends)])  # number of the first document of each file
        self.size = sum(int(ends[-1]) for ends in self._ends if len(ends))
        self.num_documents = int(self._first[-1])
        self.fingerprint = digest.hexdigest()
        if not self.num_documents:
            raise is_empty(name, files)

    def sizes(self) -> np.ndarray:
        """Bytes of each document."""
        return np.concatenate([np.diff(ends, prepend=0) for ends in self._ends])

    def where(self, part: int, number: int) -> str:
        file, start, end = self._span(number)
        return f"document {number}: {self.files.paths[file]}, bytes {start} to {end - 1}"

    def _span(self, index: int) -> tuple[int, int, int]:
        """Number of the file of document `index`, and its first byte and the one after its last."""
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        ends, local = self._ends[number], index - int(self._first[number])
        return number, (int(ends[local - 1]) if local else 0), int(ends[local])

    def _read(self, index: int) -> tuple[int, int, bytes]:
        """Number of the file, offset in it, and the bytes of document `index`."""
        number, start, end = self._span(index)
        with self.files.open(number) as stream:
            stream.seek(start)
            return number, start, stream.read(end - start)

    def _line(self, number: int, offset: int) -> str:
        """File and line, from 1, that hold byte `offset`. Only an error message pays for reading up to there."""
        line, left = 1, offset
        with self.files.open(number) as stream:
            while left and (block := stream.read(min(left, _SCAN_BYTES))):
                line, left = line + block.count(b"\n"), left - len(block)
        return f"{self.files.paths[number]}, line {line}"

    def record(self, index: int) -> str | BadRecord:
        number, start, raw = self._read(index)
        try:
            return raw.decode("utf-8").removeprefix("\ufeff")  # byte order mark
        except UnicodeDecodeError as error:
            byte = start + error.start
            return BadRecord(
                f"{self._line(number, byte)} (byte {byte} of the file): not valid UTF-8 (0x{raw[error.start]:02x}); "
                "it can be converted, for example with: iconv -f latin1 -t utf-8"
            )


class JsonLines(FileSpans):
    """One JSON object a line; blank lines are no documents."""

    def __init__(self, name: str, files: list[Path], column: str) -> None:
        super().__init__(name, files, [file.name for file in files], _line_ends)
        self._column, self.fingerprint = column, with_column(self.fingerprint, column)

    def record(self, index: int) -> str | BadRecord:
        number, start, raw = self._read(index)
        blank = len(raw) - len(raw.lstrip())  # blank lines before this one
        return _parse_json_line(raw, self._column, lambda: self._line(number, start + blank))


class CompressedLines(Sequential):
    """JSON lines in .gz and .zst files; plain ones may be among them. A part is a file. After a restart a file is
    decompressed from its front up to its place."""

    def __init__(self, name: str, files: list[Path], column: str) -> None:
        self.name, self.files, self._column, self.num_units = name, Files(files), column, len(files)
        with self._open(0) as stream:  # not all files: each costs a decompression
            _refuse_json_array(str(files[0]), stream)
        self.fingerprint = sampled_fingerprint(self.files, column)

    def _open(self, part: int) -> BinaryIO:
        stream: Any = self.files.open(part)
        match self.files.paths[part].suffix:
            case ".gz":
                stream = gzip.GzipFile(fileobj=stream)
            case ".zst":
                import pyarrow

                stream = pyarrow.CompressedInputStream(stream, "zstd")
        return io.BufferedReader(stream, _BLOCK_BYTES)  # type: ignore[return-value]

    def read(self, part: int, start: int = 0) -> Iterator[str | BadRecord | None]:
        file, seen, number = self.files.paths[part], 0, 0
        stream = self._open(part)
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    seen += 1
                    skipped = seen <= start
                    place = partial("{}, line {}".format, file, number)
                    yield None if skipped else _parse_json_line(line, self._column, place)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            self.files.check(part)
            raise UserError(
                f"{file}: damaged or truncated after line {number:,}: {error}. Copy or download it again."
            ) from None
        self.files.check(part)


def open_stdlib(name: str, files: list[Path]) -> FileSpans:
    """The Python standard library: a document is a file."""
    return FileSpans(name, files, [file.relative_to(_STDLIB).as_posix() for file in files], _whole_file)


def open_text(name: str, files: list[Path]) -> FileSpans:
    """Text files: a document is a file, or a piece of a large one."""
    return FileSpans(name, files, [file.name for file in files], _text_cuts)


def stdlib_files() -> list[Path]:
    """The .py files that are not empty (nor dangling links), sorted by their path in the library."""
    files = []
    for folder, folders, names in os.walk(_STDLIB):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]  # do not even look into site-packages
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(file for file in files if file.is_file() and file.stat().st_size)


def _refuse_json_array(file: str, stream: BinaryIO) -> None:
    """Raises UserError if the content of a file of JSON lines begins one JSON array. Damage is left for the reader."""
    try:
        head = stream.read(4096)
    except (OSError, EOFError, ValueError, zlib.error):
        return
    if re.match(rb"\s*\[\s*([{\[\"]|$)", head):
        raise UserError(
            f'{file} is one JSON array, but source = "jsonl" needs one JSON object on each line. Convert the file, for '
            f"example with: jq -c '.[]' {file} > lines.jsonl"
        )


def _parse_json_line(raw: bytes, column: str, place: Callable[[], str]) -> str | BadRecord:
    """The text in a line of JSON, or why there is none; `place` names file and line, and is called for that only."""
    try:
        record = json.loads(raw.rstrip())  # or a mistake at the end would be in column 1 of the next line
    except UnicodeDecodeError as error:
        byte = error.start - raw.rfind(b"\n", 0, error.start)
        return BadRecord(f"{place()}, byte {byte}: not valid UTF-8 (0x{raw[error.start]:02x})")
    except json.JSONDecodeError as error:
        return BadRecord(f"{place()}, column {error.colno}: not valid JSON: {error.msg}")
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
        return BadRecord(f"{place()}: not valid JSON: {error}")
    if not isinstance(record, dict):
        return BadRecord(f"{place()}: a JSON object is needed, this is a {type(record).__name__}")
    if column not in record:
        return BadRecord(f"{place()}: {no_column(column, list(record))}")
    return check_text(record[column], column, place)


def _whole_file(stream: BinaryIO, digest: xxhash.xxh3_128) -> np.ndarray:
    raw = stream.read()
    digest.update(raw)
    return np.array([len(raw)] if raw else [], dtype=np.int64)


def _line_ends(stream: BinaryIO, digest: xxhash.xxh3_128) -> np.ndarray:
    """End offsets of the lines that are not blank; blank ones are left at the start of the line after them."""
    _refuse_json_array(stream.name, stream)
    stream.seek(0)
    ends, offset = array("q"), 0
    for line in stream:
        digest.update(line)
        offset += len(line)
        if line.strip(_BLANK):
            ends.append(offset)
    return np.array(ends, dtype=np.int64)


def _text_cuts(stream: BinaryIO, digest: xxhash.xxh3_128) -> np.ndarray:
    """End offsets of documents of at most TEXT_DOCUMENT_BYTES, cut at line ends where there are any, so that the
    shuffle reaches within a large file; otherwise between two characters."""
    ends: list[int] = []
    rest, base = b"", 0
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
