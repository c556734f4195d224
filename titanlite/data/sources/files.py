"""Sources that read text, JSON lines, Parquet, or anything that Hugging Face `datasets` loads.

Libraries are imported where they are used, because importing them takes up to a second.
"""

from __future__ import annotations

import glob
import io
import logging
import math
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import xxhash

from titanlite.config import storage
from titanlite.config.errors import UserError
from titanlite.config.registry import SOURCES
from titanlite.config.schema import DataSource, JobConfig, TextSource
from titanlite.data.hub import SOURCE_OF_SUFFIX, describe_cause, propose_download
from titanlite.data.sources.base import (
    DocumentIndex,
    File,
    RandomAccess,
    Sequential,
    Source,
    add_column,
)
from titanlite.data.sources.records import (
    MAX_LINE_BYTES,
    BadRecord,
    Record,
    check_column,
    extract_text,
    parse_record,
    read_lines,
)

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_TABLES = (".csv", ".tsv")
# The file in a folder written by `titanlite prepare`, or by save_to_disk of `datasets`.
_FILE_IN_FOLDER = {"shards": "manifest.json", "arrow": "dataset_*.json"}
BUILTIN_SOURCES = frozenset(SOURCES)  # sources that do not come from a plugin
_SOURCES_WITH_PATH = BUILTIN_SOURCES - {"python_stdlib", "c4"}  # they require dataset.path
_HUB_SOURCES = {"huggingface", "c4"}  # the `datasets` library finds their files
_MAX_TEXT_BYTES = 64 * 1024  # largest document of source "text"; larger files are divided
_MAX_FILE_BYTES = 1 << 22  # no file of the standard library is larger
_READ_AHEAD = 1 << 23  # read buffer in bytes; several remote blocks are fetched in parallel
_SCAN_BYTES = 1 << 22  # lines are counted in pieces of this size
_QUICK_BYTES = 1 << 25  # counting the lines of this much text takes a tenth of a second
_BUFFER_BYTES = 1 << 18  # decompressed bytes that are buffered for each open file
_BLANK = bytes(range(0x21))  # a line that contains only these bytes is not a document
_SAMPLE_DOCUMENTS = 64
_SAMPLE_FILES = 16  # number of files that are inspected for markup
_HEAD_BYTES = 4096
_BATCH_ROWS = 256
_MARKUP = re.compile(rb'\s*(\{\s*"[^"\n]*"\s*:|<(!doctype html|html|\?xml)\b)', re.IGNORECASE)
_STDLIB = Path(sysconfig.get_paths()["stdlib"])
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataPathError(UserError):
    """Error for a dataset.path that has no files, or files that cannot be accessed or read.

    Attributes:
        path: Value of dataset.path.
        problem: Message without the path, such as "matches no file".
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"dataset.path = {path!r} {problem}")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Support pickling, because data workers send errors to their rank."""
        return type(self), (self.path, self.problem)


class FileSpans(RandomAccess):
    """Source that reads documents from uncompressed JSON Lines or text files, in any order.

    In a JSON Lines file, each line that is not blank is a document. A text file, or a file of the
    Python standard library, is a document, or several if it is large. An in-memory index stores
    where each document ends, in 8 bytes per document.
    """

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        """Read all files once to find the end of each document and to compute the fingerprint.

        Args:
            spec: Table of the job file that describes the source.
            files: Files with the documents, in the order of the documents.

        Raises:
            UserError: If a file cannot be read.
        """
        super().__init__(spec, files)
        self._is_json = spec.source == "jsonl"
        max_bytes = _MAX_TEXT_BYTES if spec.source == "text" else _MAX_FILE_BYTES
        digest = xxhash.xxh3_128()
        ends_by_file: list[np.ndarray] = []  # end offsets of the documents of each file

        for file in self.files:
            name = file.path.name
            if spec.source == "python_stdlib":
                name = file.path.relative_to(_STDLIB).as_posix()
            digest.update(name.encode() + b"\0")
            with file.open(_READ_AHEAD) as stream:
                if self._is_json:
                    ends = _find_line_ends(stream, digest)
                else:
                    ends = _find_text_ends(stream, digest, max_bytes)
                ends_by_file.append(np.fromiter(ends, dtype=np.int64))

        self._index = DocumentIndex(self.files, ends_by_file)
        self.num_documents = self._index.num_documents
        self.num_units = self.num_documents
        self.fingerprint = digest.hexdigest()
        if self._is_json:
            self.fingerprint = add_column(self.fingerprint, self.column)

    def sizes(self) -> np.ndarray:
        """Return the size of each document in bytes."""
        return np.concatenate([np.diff(ends, prepend=0) for ends in self._index.ends])

    def where(self, part: int, number: int) -> str:
        """Return the file and the byte range of document `number`, for messages."""
        file, start, end = self._index.locate(number)
        return f"document {number}: {file.path}, bytes {start} to {end - 1}"

    def record(self, index: int) -> Record:
        """Return the text of document `index`, or a `BadRecord` with its line number."""
        file, start, end = self._index.locate(index)
        with file.open() as stream:
            stream.seek(start)
            # `extract_text` reports lines that are too long. Documents of plain text are shorter.
            raw = stream.read(min(end - start, MAX_LINE_BYTES + 1))
            try:
                return self._decode(raw)
            except UnicodeDecodeError as error:
                line = _count_lines(stream, start + error.start)
                problem = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
                return BadRecord(f"{file.path}, line {line}: {problem}")
            except (ValueError, RecursionError) as error:
                # Blank lines can precede the record, so report the last line of the range.
                line = _count_lines(stream, end - 1)
                return BadRecord(f"{file.path}, line {line}: {error}")

    def _decode(self, raw: bytes) -> str:
        """Return the text in the bytes of a document.

        Raises:
            ValueError: If the bytes are not UTF-8, or a line of JSON has no text field.
            RecursionError: If the JSON is nested too deeply.
        """
        if self._is_json:
            return extract_text(raw, self.column, self.mask_column)
        return raw.decode().removeprefix("\ufeff")  # the byte order mark


def _find_line_ends(stream: BinaryIO, digest: xxhash.xxh3_128) -> Iterator[int]:
    r"""Yield the byte offset of the end of each document in a file of JSON lines.

    Each line that is not blank is a document. Blank lines belong to the document after them. For
    example, b"{}\n\n{}\n" has the ends 3 and 7.

    Args:
        stream: File of JSON lines.
        digest: Hash object to update with the content.
    """
    offset = 0
    has_text = False
    while piece := stream.readline(_SCAN_BYTES):  # a long line consists of several pieces
        digest.update(piece)
        offset += len(piece)
        if piece.strip(_BLANK):
            has_text = True
        if has_text and piece.endswith(b"\n"):
            yield offset
            has_text = False
    # The last line may have no line end.
    if has_text:
        yield offset


def _find_text_ends(stream: BinaryIO, digest: xxhash.xxh3_128, max_bytes: int) -> Iterator[int]:
    """Yield the byte offset of the end of each document in a text file.

    A file of more than `max_bytes` is divided into several documents, so that they can be shuffled.
    It is cut after line ends. Lines that are too long are cut between characters.

    Args:
        stream: Text file in UTF-8.
        digest: Hash object to update with the content.
        max_bytes: Maximum size of a document.
    """
    end = 0
    # Read one byte more than the maximum, to see whether the rest of the file must be divided.
    while block := stream.read(max_bytes + 1):
        if len(block) > max_bytes:
            block = block[: _find_cut(block, max_bytes)]
            stream.seek(end + len(block))  # the next document begins at the cut
        digest.update(block)
        end += len(block)
        yield end


def _find_cut(block: bytes, max_bytes: int) -> int:
    """Return the number of bytes, at most `max_bytes`, after which to cut a block of text.

    Cut after the last line end. Without a line end, cut between two UTF-8 characters. If the block
    is not UTF-8, cut anywhere.
    """
    after_line_end = block.rfind(b"\n", 0, max_bytes) + 1
    if after_line_end > 0:
        return after_line_end
    cut = max_bytes
    # The second, third and fourth byte of a UTF-8 character have the bits 10xxxxxx.
    while block[cut] & 0xC0 == 0x80 and max_bytes - cut < 4:
        cut -= 1
    return cut


def _count_lines(stream: BinaryIO, offset: int) -> int:
    """Return the number of the line that contains byte `offset`, counted from 1."""
    stream.seek(0)
    line = 1
    for start in range(0, offset, _SCAN_BYTES):
        line += stream.read(min(_SCAN_BYTES, offset - start)).count(b"\n")
    return line


class CompressedLines(Sequential):
    """Source that reads JSON lines from .gz, .zst and uncompressed files.

    Each file is one part and is read sequentially. A resumed run decompresses the current file from
    its beginning.
    """

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        super().__init__(spec, files)
        self.parts = [(file, 0) for file in self.files]
        self.fingerprint = self.hash_samples()

    def raw(self, file: File, number: int) -> Iterator[tuple[str, bytes]]:
        """Yield the location and the content of each line that is not blank."""
        import pyarrow

        compression = COMPRESSIONS.get(file.path.suffix)
        stream: Any = pyarrow.input_stream(file.open(_READ_AHEAD), compression=compression)
        lines = read_lines(io.BufferedReader(stream, _BUFFER_BYTES))
        for line_number, line in enumerate(lines, 1):
            if not line.isspace():
                yield f"{file.path}, line {line_number}", line


class Parquet(Sequential):
    """Source that reads the rows of Parquet files.

    Each row group is one part and is read sequentially.
    """

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        """Read the metadata of all files to list their row groups.

        Args:
            spec: Table of the job file that describes the source.
            files: Parquet files, in the order of the documents.

        Raises:
            UserError: If a file is not a Parquet file, or lacks a column that `spec` selects.
        """
        super().__init__(spec, files)
        column_of_option = {"text_column": self.column}
        if self.mask_column is not None:
            column_of_option["loss_mask_column"] = self.mask_column
        self._columns = list(column_of_option.values())
        self.parts = []
        self.num_documents = 0
        for file in self.files:
            try:
                parquet = self._open(file)
                for option, column in column_of_option.items():
                    check_column(column, parquet.schema_arrow.names, file.path, option)
            except (OSError, ValueError, RuntimeError) as error:  # bases of pyarrow exceptions
                raise UserError(f"cannot read {file.path} as parquet: {error}") from None
            for group in range(parquet.num_row_groups):
                num_rows = parquet.metadata.row_group(group).num_rows
                self.num_documents += num_rows
                if num_rows:
                    self.parts.append((file, group))
        self.fingerprint = self.hash_samples()

    def _open(self, file: File) -> Any:
        """Open a file as a `pyarrow.parquet.ParquetFile`."""
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(file.open())

    def raw(self, file: File, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the location of each row of a row group, and its columns as a dictionary."""
        groups = [number]
        row = 0
        for batch in self._open(file).iter_batches(_BATCH_ROWS, groups, columns=self._columns):
            for record in batch.to_pylist():
                row += 1
                yield f"{file.path}, row group {number}, row {row}", record


class MappedDataset(RandomAccess):
    """Source that reads a Hugging Face dataset on disk, mapped into memory by `datasets`.

    The fingerprint covers the number of documents and a sample of them.
    """

    def __init__(self, spec: TextSource, dataset: Any) -> None:
        super().__init__(spec, [Path(file["filename"]) for file in dataset.cache_files])
        check_column(self.column, dataset.column_names, self.name)
        self._dataset = dataset.select_columns([self.column]).with_format(None)
        self.num_documents = len(dataset)
        self.num_units = self.num_documents

        digest = xxhash.xxh3_128(f"{self.num_documents}".encode())
        stride = max(1, math.ceil(self.num_documents / _SAMPLE_DOCUMENTS))
        for i in range(0, self.num_documents, stride):
            text = self._dataset[i][self.column]
            digest.update(repr(text).encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()

    def record(self, index: int) -> Record:
        """Return the text of row `index`, or a `BadRecord` if it has none."""
        # Reading a mapped file that was truncated kills the process, so check the files. Each read
        # checks only one file, which need not be the one that contains the row.
        if self.files:
            self.files[index % len(self.files)].check()
        return parse_record(self._dataset[index], self.column, f"{self.name}, row {index}")


class StreamedDataset(Sequential):
    """Source that reads a Hugging Face dataset while it is downloaded.

    Each shard of the dataset, such as a file on the Hub, is one part and is read sequentially. The
    fingerprint covers the number of shards and the first document.
    """

    def __init__(self, spec: TextSource, dataset: Any, files: list[Path]) -> None:
        super().__init__(spec, files)
        self._dataset = dataset
        self.parts = [(None, number) for number in range(dataset.num_shards)]
        first: Any = next(iter(dataset), {self.column: ""}).get(self.column)
        content = f"{self.num_units} {first!r}".encode("utf-8", "surrogatepass")
        self.fingerprint = xxhash.xxh3_128_hexdigest(content)

    def raw(self, file: None, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the location and the fields of each document of the shard with index `number`."""
        self.check_files()
        for i, record in enumerate(self._dataset.shard(self.num_units, number)):
            yield f"{self.name}, part {number}, document {i}", record


def open_datasets(spec: TextSource, files: list[Path]) -> MappedDataset | StreamedDataset:
    """Open a source with the Hugging Face `datasets` library.

    Args:
        spec: Table of the job file with source "huggingface", "c4" or "arrow".
        files: Not used, because the library finds the files itself.

    Returns:
        A streamed dataset for "c4" or if dataset.streaming is set, otherwise a memory-mapped one.

    Raises:
        UserError: If the library cannot load the dataset.
    """
    import datasets

    datasets.disable_progress_bars()
    # These libraries log each failed attempt to reach the Hub.
    for library in ("datasets", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)

    path = spec.path or "allenai/c4"
    config = spec.config or ("en" if spec.source == "c4" else None)
    streaming = spec.streaming or spec.source == "c4"
    if spec.source == "arrow":
        path = str(storage.get_local_copy(path, deep=True))  # only a local file can be mapped
    origin = "the Hugging Face Hub, because no such local folder exists"
    if Path(path).exists():
        origin = "this local folder"
    name = f"dataset {path!r} (configuration {config or 'default'}, split {spec.split})"
    logging.getLogger("titanlite").info(f"Loading {name} from {origin}")

    try:
        if spec.source == "arrow":
            saved: Any = datasets.load_from_disk(path)
            has_splits = isinstance(saved, datasets.DatasetDict)
            return MappedDataset(spec, saved[spec.split] if has_splits else saved)
        loaded: Any = datasets.load_dataset(
            path, name=config, split=spec.split, streaming=streaming
        )
        if not streaming:
            return MappedDataset(spec, loaded)
        local_files = [file for file in Path(path).rglob("*") if file.is_file()]
        return StreamedDataset(spec, loaded, local_files)
    except UserError:
        raise
    except Exception as error:  # each part of the library has different exception types
        cause = describe_cause(error).rstrip(".")
        remedy = (
            "Check dataset.path and the network. To download a dataset of the Hub first, use "
            "`titanlite get data OWNER/NAME`."
        )
        raise UserError(
            f"dataset.path: cannot load {name} from {origin}: {cause}. {remedy}"
        ) from None


def open_source(spec: TextSource, job: JobConfig | None = None) -> Source:
    """Open the data source that a table of the job file describes.

    Args:
        spec: Table of the job file, such as [dataset] or one of [[dataset.sources]].
        job: Job whose sections configure sources from plugins.

    Raises:
        UserError: If a file is missing or cannot be opened, or the source is empty.
    """
    files = find_files(spec)
    if spec.source == "jsonl" and has_compressed(files):
        source: Source = CompressedLines(spec, files)  # cannot be read in random order
    else:
        source = SOURCES.make_instance(Source, spec.source, spec, files, job=job)
    if not source.num_units:
        raise UserError(f"{source.name} is empty: it contains no documents")
    # A different loss mask changes the contents of the source, which its fingerprint identifies.
    if spec.loss_mask_column is not None:
        source.fingerprint = add_column(source.fingerprint, spec.loss_mask_column)
    return source


def open_quickly(spec: TextSource, job: JobConfig) -> Source | None:
    """Open a source to inspect it, or return None if opening it may take more than a second.

    Return None for sources at a URL, the sources "huggingface" and "c4", sources from plugins, and
    text or .npy files of more than 32 MiB in total. Local JSON Lines files of any size are opened,
    but above 32 MiB, their lines are not counted.
    """
    files = find_files(spec)
    if spec.source not in BUILTIN_SOURCES - _HUB_SOURCES or storage.as_url(spec.path):
        return None
    # The documents of .npy files are found by reading all token ids.
    if spec.source in ("python_stdlib", "text", "jsonl") or files[0].suffix == ".npy":
        num_bytes = sum(file.stat().st_size for file in files)
        if num_bytes > _QUICK_BYTES:
            return CompressedLines(spec, files) if spec.source == "jsonl" else None
    return open_source(spec, job)


def describe_file(file: Path, column: str) -> DataSource:
    """Return a `DataSource` that reads a single file, for example from the command line.

    The suffix selects the kind of source, such as "jsonl" for .jsonl and .gz. Files with an unknown
    suffix are read as text.

    Args:
        file: Local file that contains the documents.
        column: Name of the field or column that contains the text.
    """
    suffix = file.suffix.lower()
    source = "jsonl" if suffix == ".json" else SOURCE_OF_SUFFIX.get(suffix, "text")
    return DataSource(source=source, path=str(file), text_column=column)


def find_files(spec: TextSource) -> list[Path]:
    """List the files of a source in a stable order, without opening them.

    Args:
        spec: Table of the job file that describes the source. Its path is a file, a pattern with *
            and **, or a folder for sources such as "shards".

    Returns:
        The files, as `RemotePath` if they are at a URL. The list is empty for "huggingface" and
        "c4", and can be empty for a source from a plugin.

    Raises:
        DataPathError: If the path matches no file, names files of the wrong kind, or cannot be
            accessed.
        UserError: If `spec` has no path, but its source requires one.
    """
    if spec.path is None and spec.source in _SOURCES_WITH_PATH:
        raise UserError(f"dataset.path is missing: dataset.source = {spec.source!r} needs one")
    if spec.source == "python_stdlib":
        return _find_stdlib_files()
    if spec.source in _HUB_SOURCES or spec.path is None:
        return []  # `datasets` or a plugin finds the files
    return _find_files_at(spec.path, spec.source)


def _find_files_at(path: str, source: str) -> list[Path]:
    """List the files at a path, and check that a source can read them.

    Raises:
        DataPathError: If there are no such files, or the path cannot be accessed.
    """
    pattern = _choose_pattern(path, source)
    try:
        files = _find_matching_files(pattern)
        if source in BUILTIN_SOURCES:  # a plugin may accept any files
            _check_files(files, pattern, source)
    except UserError as error:
        raise DataPathError(path, str(error)) from None
    return files


def _choose_pattern(path: str, source: str) -> str:
    """Return the path or glob pattern of the files that a source reads.

    This is usually `path`. For sources whose path is a folder, it is a file in this folder, such as
    "FOLDER/manifest.json" for "shards".
    """
    if source not in _FILE_IN_FOLDER:
        return path
    folder = path if storage.as_url(path) else glob.escape(path)
    return os.path.join(folder, _FILE_IN_FOLDER[source])


def _find_matching_files(pattern: str) -> list[Any]:
    """Return the local or remote files that match a pattern, sorted by path."""
    if storage.as_url(pattern):
        return storage.glob_files(pattern)
    if os.path.isfile(pattern):  # The name of an existing file can contain glob characters.
        return [Path(pattern)]
    return [
        Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(name)
    ]


def _explain_no_match(pattern: str, source: str) -> str:
    """Return the end of an error message for a path that matches no file.

    Propose a remedy if one is known, such as a command that downloads the files.
    """
    if os.path.isdir(pattern):
        # Text files can have any name. Token files are often Megatron files.
        suffix = {"text": "", "tokens": ".bin"}.get(source, f".{source}")
        kind = f"{suffix} files".strip()
        return f"is a folder; {pattern.rstrip('/')}/*{suffix} names the {kind} in it"
    name = _FILE_IN_FOLDER.get(source, "file")
    folder = "" if storage.as_url(pattern) else f" (current folder: {Path.cwd()})"
    return f"matches no {name}{folder}{propose_download('data', pattern)}"


def _check_files(files: list[Path], pattern: str, source: str) -> None:
    """Check that there are files, and that the built-in source `source` can read their format.

    Raises:
        UserError: If no file matches `pattern`, or if `source` cannot read some files because they
            are CSV, TSV or compressed. The message lacks the path, which the caller adds.
    """
    if not files:
        raise UserError(_explain_no_match(pattern, source))
    has_tables = any(file.suffix.lower() in _TABLES for file in files)
    if has_tables and source in ("jsonl", "parquet"):
        raise UserError("names a table of text. See docs/guides/convert_data.md to convert it")
    if source == "text" and has_compressed(files):
        raise UserError(
            'names a compressed file, but source "text" reads plain files only; decompress it'
        )


def has_compressed(files: list[Path]) -> bool:
    """Return whether any of the files ends with .gz or .zst."""
    return any(file.suffix in COMPRESSIONS for file in files)


def _find_stdlib_files() -> list[Path]:
    """List the .py files of the Python standard library that are not empty, sorted by path.

    Training on these files requires no download.
    """
    files = []
    for folder, folders, names in os.walk(_STDLIB):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(file for file in files if file.is_file() and file.stat().st_size)


def find_markup(files: Sequence[Path]) -> str:
    """Return a warning if most of the text files contain JSON, HTML or tables, otherwise "".

    Inspect a sample of the local files. The warning starts with a verb, so that the caller can put
    the name of the source before it.
    """
    step = max(1, len(files) // _SAMPLE_FILES)
    local_files = [file for file in files[::step] if isinstance(file, Path)]
    num_marked = sum(_has_markup(file) for file in local_files)
    if num_marked <= len(local_files) / 2:
        return ""
    return (
        'contains JSON, HTML or tables, and source "text" trains on their markup. '
        'Set source = "jsonl" for JSON Lines, or see docs/guides/convert_data.md to convert the '
        "files."
    )


def _has_markup(file: Path) -> bool:
    """Guess from the suffix and the first bytes of a file whether it is JSON, HTML or a table."""
    if file.suffix.lower() in _TABLES:
        return True
    with File(file).open() as stream:
        return _MARKUP.match(stream.read(_HEAD_BYTES)) is not None
