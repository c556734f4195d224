"""Tables with a column of text: parquet files, and what Hugging Face's `datasets` library loads.

Invariant: as in base. The libraries are imported where they are used, because that takes a second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from titanlite.config.errors import UserError
from titanlite.data.sources.base import (
    BadRecord,
    Files,
    RandomAccess,
    Sequential,
    Source,
    check_text,
    is_empty,
    no_column,
    sampled_fingerprint,
)

if TYPE_CHECKING:
    from titanlite.config.schema import TextSource

_SAMPLE_DOCUMENTS = 64
_BATCH_ROWS = 256


class Parquet(Sequential):
    """Parquet files. A part is a row group: after a restart one row group is read up to its place."""

    def __init__(self, name: str, files: list[Path], column: str) -> None:
        self.name, self.files, self._column = name, Files(files), column
        self._groups: list[tuple[int, int]] = []  # (file, row group) of each part
        self.num_documents = self.size = 0
        for number, file in enumerate(files):
            parquet = self._open(number)
            schema = parquet.schema_arrow
            if column not in schema.names:
                raise UserError(f"{file}: {no_column(column, schema.names)}")
            for group in range(parquet.num_row_groups):
                metadata = parquet.metadata.row_group(group)
                leaves = [metadata.column(i) for i in range(metadata.num_columns)]
                texts = [leaf for leaf in leaves if leaf.path_in_schema == column]
                if not texts:
                    found = schema.field(column).type
                    raise UserError(f"{file}: field {column!r} (dataset.text_column) must be a string, it is {found}")
                if metadata.num_rows:
                    self._groups.append((number, group))
                    self.num_documents += metadata.num_rows
                    self.size += texts[0].total_uncompressed_size
        self.num_units = len(self._groups)
        if not self.num_units:
            raise is_empty(name, files)
        self.fingerprint = sampled_fingerprint(self.files, column)

    def _open(self, number: int) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(self.files.open(number))
        except (pyarrow.ArrowException, OSError) as error:
            file = self.files.paths[number]
            raise UserError(f"{file}: not a parquet file, or a damaged one: {error}") from None

    def read(self, part: int, start: int = 0) -> Iterator[str | BadRecord | None]:
        number, group = self._groups[part]
        where, row = f"{self.files.paths[number]}, row group {group}", 0
        batches = self._open(number).iter_batches(_BATCH_ROWS, row_groups=[group], columns=[self._column])
        try:
            for batch in batches:
                for text in batch.column(0).to_pylist():
                    row += 1
                    place = partial("{}, row {}".format, where, row)
                    yield None if row <= start else check_text(text, self._column, place)
        except (OSError, ValueError) as error:
            self.files.check(number)
            raise UserError(f"{where}: damaged: {error}. Copy or download it again.") from None


class MappedDataset(RandomAccess):
    """A dataset on disk, memory-mapped by `datasets`. The fingerprint covers its length and a sample of its texts."""

    def __init__(self, name: str, dataset: Any, column: str) -> None:
        if column not in dataset.column_names:
            raise UserError(f"{name}: {no_column(column, dataset.column_names)}")
        self.name, self._column, self._reads = name, column, 0
        self.files = Files([Path(file["filename"]) for file in dataset.cache_files])
        self._dataset = dataset.select_columns([column]).with_format(None)
        self.num_documents = len(dataset)
        if not self.num_documents:
            raise is_empty(name, [])
        self.size = self._dataset.data.nbytes
        digest = xxhash.xxh3_128(f"{self.num_documents}".encode())
        for i in range(0, self.num_documents, -(-self.num_documents // _SAMPLE_DOCUMENTS)):
            digest.update(repr(self._dataset[i][column]).encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()

    def record(self, index: int) -> str | BadRecord:
        self._reads += 1
        if self.files.paths and self._reads % len(self.files.paths) == 0:  # one file for each document, on average
            self.files.check_all()  # to read behind the end of a mapped file that became shorter ends the process
        return check_text(self._dataset[index][self._column], self._column, lambda: f"{self.name}, row {index}")


class StreamedDataset(Sequential):
    """A dataset that is read while it is downloaded; a part is a shard of it (on the hub: a file)."""

    def __init__(self, name: str, dataset: Any, column: str, files: list[Path]) -> None:
        self.name, self._dataset, self._column, self.files = name, dataset, column, Files(files)
        self.num_units = dataset.num_shards
        first = next((example for part in range(self.num_units) for example in self._examples(part)), None)
        if first is None:
            raise is_empty(name, [])
        if column not in first:
            raise UserError(f"{name}: {no_column(column, list(first))}")
        content = f"{self.num_units} {first[column]!r}".encode("utf-8", "surrogatepass")
        self.fingerprint = xxhash.xxh3_128(content).hexdigest()

    def read(self, part: int, start: int = 0) -> Iterator[str | BadRecord | None]:
        for number, example in enumerate(self._examples(part)):
            text, place = example.get(self._column), partial("{}, part {}, document {}".format, self.name, part, number)
            yield None if number < start else check_text(text, self._column, place)

    def _examples(self, part: int) -> Iterator[dict[str, Any]]:
        self.files.check_all()
        try:
            yield from self._dataset.shard(self.num_units, part)
        except Exception as error:
            self.files.check_all()
            raise UserError(f"{self.name}, part {part}: `datasets` cannot read on: {_cause(error)}") from None
        self.files.check_all()


def open_datasets(name: str, spec: TextSource) -> Source:
    """Load by `datasets`.

    Raises:
        UserError: it cannot; the message says what was tried.
    """
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    path, config, streaming = spec.path or "", spec.config, spec.streaming
    if spec.source == "c4":
        path, config, streaming = spec.path or "allenai/c4", config or "en", True
    local = Path(path).exists()
    try:
        if spec.source == "arrow":
            loaded: Any = datasets.load_from_disk(path)
            loaded = loaded[spec.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(path, name=config, split=spec.split, streaming=streaming)
    except Exception as error:  # each part of the library raises errors of its own
        hub = f"no local folder {path!r} here, so the Hugging Face hub was asked for {path!r}"
        what = f"(configuration {config or 'default'}, split {spec.split})"
        tried = f"the local folder {Path(path).resolve()}" if local else hub
        raise UserError(f"cannot load dataset {path!r} {what}: tried {tried}: {_cause(error)}") from None
    if streaming and spec.source != "arrow":
        files = sorted(file for file in Path(path).rglob("*") if file.is_file()) if local else []
        return StreamedDataset(name, loaded, spec.text_column, files)
    return MappedDataset(name, loaded, spec.text_column)


def _cause(error: BaseException) -> str:
    """Type and first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
