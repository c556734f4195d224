"""Local files: the standard library's sources, text, JSON lines, and compressed JSON lines.

Invariant: as in base. Plain files are read at random access; compressed ones cannot be sought in, so that a part of
them is a file.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from titanlite.config.errors import UserError
from titanlite.data.sources.base import (
    BadRecord,
    RandomAccess,
    Sequential,
    check_text,
    listed,
    no_column,
    open_file,
    sampled_fingerprint,
    skip_progress,
    with_column,
)

TEXT_DOCUMENT_BYTES = 64 * 1024
COMPRESSED = (".gz", ".zst")
_SCAN_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 20
_HEAD_BYTES = 4096
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Cut = Callable[[BinaryIO, "xxhash.xxh3_128"], np.ndarray]


class FileSpans(RandomAccess):
    """Documents that are spans of bytes in files. Memory: 8 bytes a document, whatever its length.

    Args:
        labels: what the fingerprint calls the files.
        cut: `cut(file, digest)` returns the end offsets of the documents in one file, and hashes what it reads.
    """

    def __init__(self, name: str, files: list[Path], labels: list[str], cut: Cut) -> None:
        self.name, self._files = name, files
        digest = xxhash.xxh3_128()
        self._ends: list[np.ndarray] = []  # one array of end offsets a file
        for file, label in zip(files, labels, strict=True):
            digest.update(label.encode() + b"\0")
            with open_file(file) as stream:
                self._ends.append(cut(stream, digest))
        self._first = np.cumsum([0, *(len(ends) for ends in self._ends)])  # number of the first document of each file
        self.size = sum(int(ends[-1]) for ends in self._ends if len(ends))
        self.num_documents = int(self._first[-1])
        self.fingerprint = digest.hexdigest()
        if not self.num_documents:
            raise UserError(f"{name} is empty: {listed(files)} holds no document")

    def sizes(self) -> np.ndarray:
        """Bytes of each document."""
        return np.concatenate([np.diff(ends, prepend=0) for ends in self._ends])

    def where(self, part: int, number: int) -> str:
        file, start, end = self._span(number)
        return f"document {number}: {file}, bytes {start} to {end - 1}"

    def _span(self, index: int) -> tuple[Path, int, int]:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        ends, local = self._ends[number], index - int(self._first[number])
        start, end = (int(ends[local - 1]) if local else 0), int(ends[local])
        return self._files[number], start, end

    def _read(self, index: int) -> tuple[Path, int, bytes]:
        """File, offset in it, and the bytes of document `index`."""
        file, start, end = self._span(index)
        with open_file(file) as stream:
            stream.seek(start)
            return file, start, stream.read(end - start)

    def record(self, index: int) -> str | BadRecord:
        file, start, raw = self._read(index)
        try:
            return raw.decode("utf-8").removeprefix("\ufeff")  # byte order mark
        except UnicodeDecodeError as error:
            byte = start + error.start
            return BadRecord(
                f"{file}, line {line_number(file, byte)} (byte {byte} of the file): not valid UTF-8 "
                f"(0x{raw[error.start]:02x}); it can be converted, for example with: iconv -f latin1 -t utf-8"
            )


class JsonLines(FileSpans):
    """One JSON object a line; blank lines are no documents."""

    def __init__(self, name: str, files: list[Path], column: str) -> None:
        for file in files:
            with open_file(file) as stream:
                refuse_json_array(file, stream.read(_HEAD_BYTES))
        super().__init__(name, files, [file.name for file in files], _line_ends)
        self._column, self.fingerprint = column, with_column(self.fingerprint, column)

    def record(self, index: int) -> str | BadRecord:
        file, start, raw = self._read(index)
        blank = len(raw) - len(raw.lstrip())  # blank lines before this one

        def place() -> str:
            return f"{file}, line {line_number(file, start + blank)}"

        return parse_json_line(raw, self._column, place)


class CompressedLines(Sequential):
    """JSON lines in .gz and .zst files; plain ones may be among them. A part is a file. After a restart a file is
    decompressed from its front up to its place."""

    def __init__(self, name: str, files: list[Path], column: str) -> None:
        self.name, self._files, self._column = name, files, column
        self.num_parts, self.num_documents, self.size = len(files), None, None
        refuse_json_array(files[0], next(_blocks(files[0]), b""))  # not all files: each costs a decompression
        self.fingerprint = sampled_fingerprint(files, column)

    def read(self, part: int, start: int) -> Iterator[str | BadRecord]:
        file, seen = self._files[part], 0
        progress = skip_progress(str(file), start)
        for number, line in enumerate(_lines(file), 1):
            if not line.strip():
                continue
            seen += 1
            if seen <= start:
                progress(seen)
                continue
            yield parse_json_line(line, self._column, lambda number=number: f"{file}, line {number}")


def open_stdlib(name: str, files: list[Path]) -> FileSpans:
    """The Python standard library: a document is a file."""
    root = _stdlib()
    labels = [file.relative_to(root).as_posix() for file in files]
    return FileSpans(name, files, labels, _whole_file)


def open_text(name: str, files: list[Path]) -> FileSpans:
    """Text files: a document is a file, or a piece of a large one."""
    return FileSpans(name, files, [file.name for file in files], _text_cuts)


def line_number(file: Path, offset: int) -> int:
    """The line, from 1, that holds byte `offset`. Reads the file up to there: only an error message pays for it."""
    line, left = 1, offset
    with open_file(file) as stream:
        while left:
            block = stream.read(min(left, _SCAN_BYTES))
            line, left = line + block.count(b"\n"), left - len(block)
    return line


def refuse_json_array(file: Path, head: bytes) -> None:
    """Refuse a file of JSON lines whose first bytes, `head`, begin one JSON array.

    Raises:
        UserError: they do.
    """
    if re.match(rb"\s*\[\s*([{\[\"]|$)", head):
        raise UserError(
            f'{file} is one JSON array, but source = "jsonl" needs one JSON object on each line. Convert the file, for '
            f"example with: jq -c '.[]' {file.name} > {file.stem}-lines.jsonl"
        )


def parse_json_line(raw: bytes, column: str, place: Callable[[], str]) -> str | BadRecord:
    """The text in a line of JSON, or why there is none; `place` names file and line, and is called for that only."""
    try:
        record = json.loads(raw.rstrip())  # or a mistake at the end would be in column 1 of the next line
    except UnicodeDecodeError as error:
        byte = error.start - raw.rfind(b"\n", 0, error.start)
        return BadRecord(f"{place()}, byte {byte}: not valid UTF-8 (0x{raw[error.start]:02x})")
    except json.JSONDecodeError as error:
        return BadRecord(f"{place()}, column {error.colno}: not valid JSON: {error.msg}")
    except RecursionError:
        return BadRecord(f"{place()}: JSON that is nested too deeply")
    except ValueError as error:  # a number of thousands of digits
        return BadRecord(f"{place()}: not valid JSON: {error}")
    if not isinstance(record, dict):
        return BadRecord(f"{place()}: a JSON object is needed, this is a {type(record).__name__}")
    if column not in record:
        return BadRecord(f"{place()}: {no_column(column, list(record))}")
    return check_text(record[column], column, place)


def _lines(file: Path) -> Iterator[bytes]:
    """Lines of a file that may be compressed, in memory for one line and one block.

    Raises:
        UserError: the compressed data is damaged or ends too early.
    """
    rest: list[bytes] = []
    for block in _blocks(file):
        *whole, last = block.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line]) if rest else line
            rest = []
        if last:
            rest.append(last)
    if rest:
        yield b"".join(rest)


def _blocks(file: Path) -> Iterator[bytes]:
    raw = open_file(file)
    with raw:
        if file.suffix == ".gz":
            stream: Any = gzip.GzipFile(fileobj=raw)
        elif file.suffix == ".zst":
            import pyarrow

            stream = pyarrow.CompressedInputStream(raw, "zstd")
        else:
            stream = raw
        done = 0
        try:
            while block := stream.read(_BLOCK_BYTES):
                done += len(block)
                yield block
        except (OSError, EOFError, ValueError, zlib.error) as error:
            message = f"{file}: damaged or truncated after {done:,} bytes of text: {error}. Copy or download it again."
            raise UserError(message) from None


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[Path]:
    """The .py files that are not empty (nor dangling links), sorted by their path in the library."""
    root, files = _stdlib(), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]  # do not even look into site-packages
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(
        (file for file in files if file.is_file() and file.stat().st_size), key=lambda file: file.relative_to(root)
    )


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
        if len(newlines):
            counts = np.diff(seen[newlines], prepend=0)
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
