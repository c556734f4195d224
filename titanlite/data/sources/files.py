"""Local files: the standard library's sources, text, JSON lines, and compressed JSON lines.

Invariant: as in base. Plain files are read at random access; compressed ones cannot be sought in, so that a part of
them is a file.
"""

from __future__ import annotations

import gzip
import io
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from titanlite.config.schema import TextSource
from titanlite.data.sources.base import BadRecord, RandomAccess, Sequential, text_of, with_column

TEXT_DOCUMENT_BYTES = 64 * 1024
COMPRESSED = (".gz", ".zst")
_SCAN_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 18  # of text, in memory for each compressed file that is open
_BLANK = bytes(range(0x21))  # a line of these alone is no document
_STDLIB = Path(sysconfig.get_paths()["stdlib"])
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class FileSpans(RandomAccess):
    """Documents that are spans of bytes in files. Memory: 8 bytes a document, whatever its length.

    JSON lines: a document is a line that is not blank. Text: a file, or a piece of a large one. The standard library: a
    file.
    """

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        super().__init__(spec, files)
        self._is_json, digest = spec.source == "jsonl", xxhash.xxh3_128()
        most_bytes = TEXT_DOCUMENT_BYTES if spec.source == "text" else 1 << 62
        self._ends: list[np.ndarray] = []  # one array of end offsets a file
        for number, file in enumerate(files):
            label = file.relative_to(_STDLIB).as_posix() if spec.source == "python_stdlib" else file.name
            digest.update(label.encode() + b"\0")
            with self.files.open(number) as stream:
                ends = _line_ends(stream, digest) if self._is_json else _text_ends(stream, digest, most_bytes)
                self._ends.append(np.fromiter(ends, dtype=np.int64))
        self._first = np.cumsum([0, *map(len, self._ends)])  # number of the first document of each file
        self.num_documents = self.num_units = int(self._first[-1])
        self.fingerprint = with_column(digest.hexdigest(), self.column if self._is_json else "text")

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

    def record(self, index: int) -> str | BadRecord:
        number, start, end = self._span(index)
        with self.files.open(number) as stream:
            stream.seek(start)
            raw = stream.read(end - start)
        try:
            return text_of(raw, self.column) if self._is_json else raw.decode().removeprefix("\ufeff")  # its mark
        except (ValueError, RecursionError) as error:
            blank = len(raw) - len(raw.lstrip())  # blank lines before this one
            offset = error.start if isinstance(error, UnicodeDecodeError) else blank
            return BadRecord(f"{self._line(number, start + offset)}: {error}")

    def _line(self, number: int, offset: int) -> str:
        """File and line, from 1, that hold byte `offset`. Only an error message pays for reading up to there."""
        line, left = 1, offset
        with self.files.open(number) as stream:
            while left and (block := stream.read(min(left, _SCAN_BYTES))):
                line, left = line + block.count(b"\n"), left - len(block)
        return f"{self.files.paths[number]}, line {line}"


class CompressedLines(Sequential):
    """JSON lines in .gz and .zst files; plain ones may be among them. A part is a file. After a restart a file is
    decompressed from its front up to its place."""

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        super().__init__(spec, files)
        self.parts = [(file, 0) for file in range(len(files))]
        self.fingerprint = self.files.sampled_fingerprint(self.column)

    def raw(self, file: int, number: int) -> Iterator[tuple[str, bytes]]:
        path, stream = self.files.paths[file], self.files.open(file)
        packed: Any = stream
        if path.suffix == ".gz":
            packed = gzip.GzipFile(fileobj=stream)
        elif path.suffix == ".zst":
            import pyarrow

            packed = pyarrow.CompressedInputStream(stream, "zstd")
        for line_number, line in enumerate(io.BufferedReader(packed, _BLOCK_BYTES), 1):
            if line.strip():
                yield f"{path}, line {line_number}", line


def stdlib_files() -> list[Path]:
    """The .py files that are not empty (nor dangling links), sorted by their path in the library."""
    files = []
    for folder, folders, names in os.walk(_STDLIB):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]  # do not even look into site-packages
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(file for file in files if file.is_file() and file.stat().st_size)


def _line_ends(stream: BinaryIO, digest: xxhash.xxh3_128) -> Iterator[int]:
    """End offsets of the lines that are not blank; blank ones are left at the start of the line after them."""
    offset = 0
    for line in stream:
        digest.update(line)
        offset += len(line)
        if line.strip(_BLANK):
            yield offset


def _text_ends(stream: BinaryIO, digest: xxhash.xxh3_128, most_bytes: int) -> Iterator[int]:
    """End offsets of documents of at most `most_bytes`, cut at line ends where there are any, so that the shuffle
    reaches within a large file; otherwise between two characters."""
    rest, base = b"", 0
    while block := stream.read(_SCAN_BYTES):
        digest.update(block)
        rest += block
        start = 0
        while len(rest) - start > most_bytes:
            limit = start + most_bytes
            end = rest.rfind(b"\n", start, limit) + 1
            if end <= start:
                end = limit
                while rest[end] & 0xC0 == 0x80 and limit - end < 4:  # step back over UTF-8 continuation bytes
                    end -= 1
            yield base + end
            start = end
        base, rest = base + start, rest[start:]
    if rest:
        yield base + len(rest)
