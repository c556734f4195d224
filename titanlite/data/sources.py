"""Documents by number: the base classes of all sources, files read at random access, and which class a key means.

Invariant: document i of a source is the same text each time, whatever else was read before; the fingerprint changes
when the documents do. May import titanlite.config; other sources are imported where a job names them.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import xxhash

from titanlite.config.errors import UserError

if TYPE_CHECKING:
    from titanlite.config.schema import TextSource

TEXT_DOCUMENT_BYTES = 64 * 1024
_SCAN_BYTES = 1 << 22
_HEAD_BYTES = 4096
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
COMPRESSED = (".gz", ".zst")


class BadRecord(UserError):
    """One record cannot be read; the message names file and place. `dataset.on_bad_record` says what follows."""


class Source(ABC):
    """A set of documents, picklable so that background processes can read it, too.

    Attributes:
        name: what messages call it.
        fingerprint: hash of the contents, or of a sample where a file is too large to read before the first step.
        num_documents: None where only reading everything would tell.
        size: bytes of text, None where unknown.
    """

    name: str
    fingerprint: str
    num_documents: int | None
    size: int | None

    def describe(self) -> str:
        """One line for the log."""
        documents = "" if self.num_documents is None else f"{self.num_documents:,} documents, "
        return f"{self.name}: {documents}" + ("streamed" if self.size is None else f"{self.size / 1e6:,.1f} MB")

    def where(self, part: int, number: int) -> str:
        """Where a document is from, for a person."""
        return f"document {number}" if isinstance(self, RandomAccess) else f"part {part}, document {number}"


class RandomAccess(Source):
    """Documents that can be read in any order: `num_documents` of them."""

    @abstractmethod
    def __getitem__(self, index: int) -> str | np.ndarray:
        """Text of document `index`, or its tokens.

        Raises:
            BadRecord: it cannot be read.
        """

    def __len__(self) -> int:
        assert self.num_documents is not None
        return self.num_documents

    def text_hash(self, index: int) -> int:
        """`text_hash` of the text of document `index`."""
        text = self[index]
        assert isinstance(text, str)
        return text_hash(text)


def text_hash(text: str) -> int:
    """A number below 2**64 that depends on the text alone. It says whether a document is held out for validation, so
    that changing it would move documents from one side to the other."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


class Sequential(Source):
    """Documents in parts (files, row groups) that are read from front to back.

    Attributes:
        num_parts: how many.
    """

    num_parts: int

    @abstractmethod
    def read(self, part: int, start: int) -> Iterator[str | BadRecord]:
        """Documents of `part` from number `start` on; one that cannot be read is yielded as an error."""


class FileSpans(RandomAccess):
    """Documents that are spans of bytes in files. Memory: 8 bytes a document, whatever its length.

    `cut(file, digest)` returns the end offsets of the documents in one file and hashes what it reads.
    """

    def __init__(self, name: str, files: list[Path], labels: list[str], cut: _Cut) -> None:
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

    def __getitem__(self, index: int) -> str:
        file, start, raw = self._read(index)
        try:
            return raw.decode("utf-8").removeprefix("\ufeff")  # byte order mark
        except UnicodeDecodeError as error:
            byte = start + error.start
            raise BadRecord(
                f"{file}, line {line_number(file, byte)} (byte {byte} of the file): not valid UTF-8 "
                f"(0x{raw[error.start]:02x}); it can be converted, for example with: iconv -f latin1 -t utf-8"
            ) from None


_Cut = Callable[[BinaryIO, "xxhash.xxh3_128"], np.ndarray]


class JsonLines(FileSpans):
    """One JSON object a line; blank lines are no documents."""

    def __init__(self, name: str, files: list[Path], column: str) -> None:
        for file in files:
            with open_file(file) as stream:
                refuse_json_array(file, stream.read(_HEAD_BYTES))
        super().__init__(name, files, [file.name for file in files], _line_ends)
        self._column = column

    def __getitem__(self, index: int) -> str:
        file, start, raw = self._read(index)
        blank = len(raw) - len(raw.lstrip())  # blank lines before this one

        def place() -> str:
            return f"{file}, line {line_number(file, start + blank)}"

        return text_or_raise(parse_json_line(raw, self._column, place))


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


def check_text(text: object, column: str, place: Callable[[], str]) -> str | BadRecord:
    """`text` if it is a string, or what it is instead."""
    if isinstance(text, str):
        return text
    found = "null" if text is None else type(text).__name__
    return BadRecord(f"{place()}: field {column!r} must be a string, it is {found}")


def text_or_raise(record: str | BadRecord) -> str:
    """`record` if it is text; raises it otherwise."""
    if isinstance(record, BadRecord):
        raise record
    return record


def no_column(column: str, columns: list[str]) -> str:
    """What to say about a text column that is not there."""
    return f"no field {column!r} (dataset.text_column); there are: {', '.join(map(repr, columns))}"


def open_source(spec: TextSource) -> Source:
    """The source that a table names.

    Raises:
        UserError: a file is missing, the source is empty, or cannot be opened.
    """
    name = spec.source if spec.path is None else f"{spec.source} {spec.path}"
    if spec.source in ("huggingface", "c4", "arrow"):
        from titanlite.data.hub import open_hub

        return open_hub(name, spec)
    if spec.source == "shards":
        from titanlite.data.shards import Shards

        return Shards(name, find_files(spec)[0].parent)
    files = find_files(spec)
    if spec.source == "python_stdlib":
        labels = [file.relative_to(_stdlib()).as_posix() for file in files]
        return FileSpans(name, files, labels, _whole_file)
    if spec.source == "text":
        return FileSpans(name, files, [file.name for file in files], _text_cuts)
    if spec.source == "parquet" or any(file.suffix in COMPRESSED for file in files):
        from titanlite.data.sequential import CompressedLines, Parquet

        source = (Parquet if spec.source == "parquet" else CompressedLines)(name, files, spec.text_column)
    else:
        source = JsonLines(name, files, spec.text_column)
    if spec.text_column != "text":  # another column is other text
        source.fingerprint = xxhash.xxh3_128_hexdigest(f"{source.fingerprint} {spec.text_column}".encode())
    return source


def find_files(spec: TextSource) -> list[Path]:
    """The files of a source in a stable order, none for what `datasets` loads; reads none of them, so that validation
    can call it.

    Raises:
        UserError: the path is missing, or matches no readable file.
    """
    if spec.source == "python_stdlib":
        return _stdlib_files()
    if spec.source == "c4":
        return []
    if spec.path is None:
        raise UserError(f"dataset.path is missing: dataset.source = {spec.source!r} needs one")
    if spec.source == "huggingface":
        return []
    path = Path(spec.path)
    if spec.source in ("arrow", "shards"):
        marks = ["manifest.json"] if spec.source == "shards" else ["dataset_info.json", "dataset_dict.json"]
        files = [path / mark for mark in marks if (path / mark).is_file()]
        if not files:
            maker = "titanlite prepare" if spec.source == "shards" else "datasets' save_to_disk"
            raise UserError(
                f"dataset.path = {spec.path!r} is not a folder made by {maker}: no {' or '.join(marks)} in it"
            )
        return files
    # A name that holds glob characters is still a name.
    files = [path] if path.is_file() else [Path(name) for name in sorted(glob.glob(spec.path, recursive=True))]
    files = [file for file in files if file.is_file()]
    if not files:
        found = "is a folder; name files, for example with a glob" if path.is_dir() else "matches no file"
        raise UserError(f"dataset.path = {spec.path!r} {found} (current folder: {Path.cwd()})")
    packed = [file for file in files if file.suffix in COMPRESSED]
    if packed and spec.source == "text":
        raise UserError(f'{listed(packed)}: source "text" reads plain files only; decompress them, or use "jsonl"')
    return files


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


def sampled_fingerprint(files: list[Path], sample: int = 1 << 16) -> str:
    """Hash of the names, the sizes, and the first and last `sample` bytes of files too large to read in advance."""
    digest = xxhash.xxh3_128()
    for file in files:
        with open_file(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            digest.update(f"{file.name} {size}\0".encode())
            for start in (0, max(0, size - sample)):
                stream.seek(start)
                digest.update(stream.read(sample))
    return digest.hexdigest()


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files() -> list[Path]:
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
