"""Local files that are read from front to back: compressed JSON lines (a part is a file), parquet (a row group).

Invariant: as in sources. May import titanlite.config, data.sources and, where used, pyarrow.
"""

from __future__ import annotations

import gzip
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanlite.config.errors import UserError
from titanlite.data.sources import (
    BadRecord,
    Sequential,
    check_text,
    listed,
    no_column,
    open_file,
    parse_json_line,
    refuse_json_array,
    sampled_fingerprint,
)

_BLOCK_BYTES = 1 << 20
_BATCH_ROWS = 256


class CompressedLines(Sequential):
    """JSON lines in .gz and .zst files (plain ones may be among them). They cannot be sought in: going on after a
    restart decompresses a file up to its place."""

    def __init__(self, name: str, files: list[Path], column: str) -> None:
        self.name, self._files, self._column = name, files, column
        self.num_parts, self.num_documents, self.size = len(files), None, None
        refuse_json_array(files[0], next(_blocks(files[0]), b""))  # not all files: each costs a decompression
        self.fingerprint = sampled_fingerprint(files)

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


class Parquet(Sequential):
    """Parquet files, a row group at a time: going on after a restart reads one row group up to its place."""

    def __init__(self, name: str, files: list[Path], column: str) -> None:
        self.name, self._files, self._column = name, files, column
        self._groups: list[tuple[int, int]] = []  # (file, row group) of each part
        self.num_documents = self.size = 0
        for number, file in enumerate(files):
            parquet = _open_parquet(file)
            if column not in parquet.schema_arrow.names:
                raise UserError(f"{file}: {no_column(column, parquet.schema_arrow.names)}")
            index = (
                [parquet.metadata.row_group(0).column(i).path_in_schema for i in range(parquet.metadata.num_columns)]
                if parquet.num_row_groups
                else []
            )
            if index and column not in index:
                found = parquet.schema_arrow.field(column).type
                raise UserError(f"{file}: field {column!r} (dataset.text_column) must be a string, it is {found}")
            for group in range(parquet.num_row_groups):
                metadata = parquet.metadata.row_group(group)
                if metadata.num_rows:
                    self._groups.append((number, group))
                    self.num_documents += metadata.num_rows
                    self.size += metadata.column(index.index(column)).total_uncompressed_size
        self.num_parts = len(self._groups)
        if not self.num_parts:
            raise UserError(f"{name} is empty: {listed(files)} holds no document")
        self.fingerprint = sampled_fingerprint(files)

    def read(self, part: int, start: int) -> Iterator[str | BadRecord]:
        number, group = self._groups[part]
        file, row = self._files[number], 0
        batches = _open_parquet(file).iter_batches(_BATCH_ROWS, row_groups=[group], columns=[self._column])
        try:
            for batch in batches:
                for text in batch.column(0).to_pylist():
                    row += 1
                    if row > start:
                        yield check_text(text, self._column, lambda row=row: f"{file}, row group {group}, row {row}")
        except (OSError, ValueError) as error:
            message = f"{file}, row group {group}: damaged: {error}. Copy or download it again."
            raise UserError(message) from None


def skip_progress(what: str, goal: int) -> Callable[[int], None]:
    """A function of the documents skipped so far, which says every five seconds how far it is."""
    last = time.monotonic()

    def progress(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            logging.getLogger("titanlite").info("%s: skipped %s of %s documents", what, f"{done:,}", f"{goal:,}")

    return progress


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


def _open_parquet(file: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    with open_file(file):  # for its error messages
        pass
    try:
        return pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a parquet file, or a damaged one: {error}") from None
