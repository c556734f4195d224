"""Local files: the standard library's sources, text, JSON lines, parquet; and what Hugging Face's `datasets` loads.

Invariant: as in base. Plain files are read at random access; compressed ones cannot be sought in, so that a part of
them is a file. Libraries are imported where they are used, because that takes up to a second.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from titanlite.config import storage
from titanlite.config.errors import UserError, one_line
from titanlite.config.registry import SOURCES
from titanlite.config.schema import DataSource, JobConfig, TextSource
from titanlite.data import hub
from titanlite.data.sources import base
from titanlite.data.sources.base import BadRecord, File, RandomAccess, Record, Sequential, Source, check_column, text_of

_TEXT_BYTES = 64 * 1024  # of a document of source "text"
_WHOLE_FILE = 1 << 22  # bytes; no file of the standard library is so large
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_KINDS = {**dict.fromkeys((".jsonl", ".json", *COMPRESSIONS), "jsonl"), ".parquet": "parquet"}
# What a folder holds that a source reads: of `titanlite prepare`, and of datasets' save_to_disk.
_INSIDE = {"shards": "manifest.json", "arrow": "dataset_*.json"}
_OWN = frozenset(SOURCES)  # before a plugin has brought others
_SCAN_BYTES = 1 << 22
_QUICK_BYTES = 1 << 25  # of text, whose lines are counted in a tenth of a second
_BLOCK_BYTES = 1 << 18  # of text, in memory for each compressed file that is open
_BLANK = bytes(range(0x21))  # a line of these alone is no document
_SAMPLE_DOCUMENTS = 64
_BATCH_ROWS = 256
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
        most_bytes = _TEXT_BYTES if spec.source == "text" else _WHOLE_FILE
        self._ends: list[np.ndarray] = []  # one array of end offsets a file
        for file in self.files:
            label = file.path.relative_to(_STDLIB).as_posix() if spec.source == "python_stdlib" else file.path.name
            digest.update(label.encode() + b"\0")
            with file.open(1 << 23) as stream:  # so that 8 blocks come at a time
                ends = _line_ends(stream, digest) if self._is_json else _text_ends(stream, digest, most_bytes)
                self._ends.append(np.fromiter(ends, dtype=np.int64))
        self._first = np.cumsum([0, *map(len, self._ends)])  # number of the first document of each file
        self.num_documents = self.num_units = int(self._first[-1])
        self.fingerprint = base.with_column(digest.hexdigest(), self.column if self._is_json else "text")

    def sizes(self) -> np.ndarray:
        return np.concatenate([np.diff(ends, prepend=0) for ends in self._ends])

    def where(self, part: int, number: int) -> str:
        file, start, end = self._span(number)
        return f"document {number}: {file.path}, bytes {start} to {end - 1}"

    def _span(self, index: int) -> tuple[File, int, int]:
        """The file of document `index`, and its first byte and the one after its last."""
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        ends, local = self._ends[number], index - int(self._first[number])
        return self.files[number], (int(ends[local - 1]) if local else 0), int(ends[local])

    def record(self, index: int) -> Record:
        file, start, end = self._span(index)
        with file.open() as stream:
            stream.seek(start)
            raw = stream.read(end - start)
            try:
                return text_of(raw, self.column) if self._is_json else raw.decode().removeprefix("\ufeff")  # its mark
            except (ValueError, RecursionError) as error:
                # The line is the last one of the span: there may be blank ones before it.
                at = start + error.start if isinstance(error, UnicodeDecodeError) else end - 1
                stream.seek(0)
                blocks = (stream.read(min(_SCAN_BYTES, at - done)) for done in range(0, at, _SCAN_BYTES))
                line = 1 + sum(block.count(b"\n") for block in blocks)
                return BadRecord(f"{file.path}, line {line}: {error}")


class CompressedLines(Sequential):
    """JSON lines in .gz and .zst files; plain ones may be among them. A part is a file. After a restart a file is
    decompressed from its front up to its place."""

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        super().__init__(spec, files)
        self.parts = [(file, 0) for file in self.files]
        self.fingerprint = base.sampled_fingerprint(self.files, self.column)

    def raw(self, file: File, number: int) -> Iterator[tuple[str, bytes]]:
        import pyarrow

        stream: Any = pyarrow.input_stream(file.open(1 << 23), compression=COMPRESSIONS.get(file.path.suffix))
        for line_number, line in enumerate(io.BufferedReader(stream, _BLOCK_BYTES), 1):
            if line.strip():
                yield f"{file.path}, line {line_number}", line


class Parquet(Sequential):
    """Parquet files. A part is a row group: after a restart one row group is read up to its place."""

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        super().__init__(spec, files)
        self.parts, self.num_documents = [], 0
        for file in self.files:
            try:
                parquet = self._open(file)
                check_column(self.column, parquet.schema_arrow.names)
            except (OSError, ValueError, RuntimeError) as error:  # pyarrow's errors are of these
                raise UserError(f"cannot read {file.path} as parquet: {error}") from None
            rows = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
            self.parts += [(file, group) for group, count in enumerate(rows) if count]
            self.num_documents += sum(rows)
        self.fingerprint = base.sampled_fingerprint(self.files, self.column)

    def _open(self, file: File) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(file.open())

    def raw(self, file: File, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        batches = self._open(file).iter_batches(_BATCH_ROWS, row_groups=[number], columns=[self.column])
        for row, record in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1):
            yield f"{file.path}, row group {number}, row {row}", record


class MappedDataset(RandomAccess):
    """A dataset on disk, memory-mapped by `datasets`. The fingerprint covers its length and a sample of its texts."""

    def __init__(self, spec: TextSource, dataset: Any) -> None:
        super().__init__(spec, [Path(file["filename"]) for file in dataset.cache_files])
        column = spec.text_column
        self._dataset = dataset.select_columns([column]).with_format(None)
        self.num_documents = self.num_units = count = len(dataset)
        digest = xxhash.xxh3_128(f"{count}".encode())
        for i in range(0, count, max(1, -(-count // _SAMPLE_DOCUMENTS))):
            digest.update(repr(self._dataset[i][column]).encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()

    def record(self, index: int) -> Record:
        if self.files:  # to read behind the end of a mapped file that became shorter ends the process
            self.files[index % len(self.files)].check()
        return base.record_of(self._dataset[index], self.column, f"{self.name}, row {index}")


class StreamedDataset(Sequential):
    """A dataset that is read while it is downloaded; a part is a shard of it (on the hub: a file)."""

    def __init__(self, spec: TextSource, dataset: Any, files: list[Path]) -> None:
        super().__init__(spec, files)
        self._dataset, column = dataset, spec.text_column
        self.parts = [(None, number) for number in range(dataset.num_shards)]
        first: Any = next(iter(dataset), {column: ""}).get(column)
        content = f"{self.num_units} {first!r}".encode("utf-8", "surrogatepass")
        self.fingerprint = xxhash.xxh3_128(content).hexdigest()

    def raw(self, file: None, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        self.check_files()
        for row, record in enumerate(self._dataset.shard(self.num_units, number)):
            yield f"{self.name}, part {number}, document {row}", record


def open_datasets(spec: TextSource, files: list[Path]) -> MappedDataset | StreamedDataset:
    """Load by `datasets`, which finds the files.

    Raises:
        UserError: it cannot; the message says what was tried.
    """
    import datasets

    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub"):  # which says each try to reach the hub
        logging.getLogger(library).setLevel(logging.ERROR)
    path, config = spec.path or "allenai/c4", spec.config or ("en" if spec.source == "c4" else None)
    path = str(storage.local_copy(path, deep=True)) if spec.source == "arrow" else path  # it is mapped into memory
    streaming = spec.streaming or spec.source == "c4"
    place = "this local folder" if Path(path).exists() else "the Hugging Face hub, as there is no such local folder"
    what = f"dataset {path!r} (configuration {config or 'default'}, split {spec.split})"
    logging.getLogger("titanlite").info(f"Loading {what} from {place}")
    try:
        if spec.source == "arrow":
            saved: Any = datasets.load_from_disk(path)
            return MappedDataset(spec, saved[spec.split] if isinstance(saved, datasets.DatasetDict) else saved)
        loaded: Any = datasets.load_dataset(path, name=config, split=spec.split, streaming=streaming)
        if not streaming:
            return MappedDataset(spec, loaded)
        return StreamedDataset(spec, loaded, [file for file in Path(path).rglob("*") if file.is_file()])
    except Exception as error:  # each part of the library raises errors of its own
        why = one_line(str(error.__cause__ or error) or repr(error)).rstrip(".")
        remedy = "Check dataset.path and the network. `titanlite get data OWNER/NAME` downloads what is on the hub"
        raise UserError(f"dataset.path: cannot load {what} from {place}: {why}. {remedy}.") from None


def open_source(spec: TextSource, job: JobConfig | None = None) -> Source:
    """The source that a table names. `job` has the keys of a plugin's.

    Raises:
        UserError: a file is missing, the source is empty, or cannot be opened.
    """
    try:
        files = find_files(spec)
    except UserError as error:
        raise UserError(str(error) if spec.path is None else f"dataset.path = {spec.path!r} {error}") from None
    packed = spec.source == "jsonl" and any(file.suffix in COMPRESSIONS for file in files)
    source: Source = CompressedLines(spec, files) if packed else SOURCES.make(spec.source, job, spec, files)
    if not source.num_units:
        raise UserError(f"{source.name} is empty: it holds no document")
    return source


def open_quickly(spec: TextSource, job: JobConfig) -> Source | None:
    """As `open_source`, for a look that takes a second at most: None for what a network or a plugin has, and for much
    plain text. Of many JSON lines it is a source that has not counted them."""
    files = find_files(spec)
    if spec.source not in _OWN - {"huggingface", "c4"} or storage.url_of(spec.path):
        return None
    if spec.source in ("python_stdlib", "text", "jsonl") and sum(file.stat().st_size for file in files) > _QUICK_BYTES:
        return CompressedLines(spec, files) if spec.source == "jsonl" else None
    return open_source(spec, job)


def source_of_file(file: Path, column: str) -> DataSource:
    """The table for a file that the option --data of a command names. What no ending tells otherwise is text."""
    keys = {"source": _KINDS.get(file.suffix.lower(), "text"), "path": str(file), "text_column": column}
    return DataSource.model_validate(keys)


def find_files(spec: TextSource) -> list[Path]:
    """The files of a source in a stable order; none for what `datasets` loads, and for a plugin's those that its path
    matches, if any. Opens none of them, so that the checks before a run can call it. Those at a URL are RemotePaths.

    Raises:
        UserError: the path is missing, or matches no readable file.
    """
    if spec.source == "python_stdlib":
        return _stdlib_files()
    pattern, is_own = spec.path, spec.source in _OWN
    if pattern is None and is_own and spec.source != "c4":
        raise UserError(f"dataset.path is missing: dataset.source = {spec.source!r} needs one")
    if pattern is None or spec.source in ("c4", "huggingface"):
        return []
    if spec.source in _INSIDE:
        pattern = os.path.join(pattern if storage.url_of(pattern) else glob.escape(pattern), _INSIDE[spec.source])
    # A name that holds glob characters is still a name.
    names = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
    files: list[Any] = [Path(name) for name in names if os.path.isfile(name)]
    if not files and os.path.isdir(pattern) and is_own:
        names = f"{pattern.rstrip('/')}/*{'' if spec.source == 'text' else f'.{spec.source}'}"  # text has any name
        raise UserError(f"is a folder; {names} names the files in it")
    if not (files := storage.matching(pattern) if storage.url_of(pattern) else files) and is_own:
        here = f"(of {pattern}{'' if storage.url_of(pattern) else f'; current folder: {Path.cwd()}'})"
        raise UserError(f"matches no file {here}{hub.remedy('data', pattern)}")
    if spec.source == "text" and any(file.suffix in COMPRESSIONS for file in files):
        raise UserError('names a packed file, and source "text" reads plain files only; decompress it')
    return files


def _stdlib_files() -> list[Path]:
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
    start = 0
    while len(block := stream.read(most_bytes + 1)) > most_bytes:
        size = block.rfind(b"\n", 0, most_bytes) + 1
        if not size:
            size = most_bytes
            while block[size] & 0xC0 == 0x80 and most_bytes - size < 4:  # step back over UTF-8 continuation bytes
                size -= 1
        digest.update(block[:size])
        start += size
        yield start
        stream.seek(start)
    digest.update(block)
    if block:
        yield start + len(block)
