"""Tables with a column of text: parquet files, and what Hugging Face's `datasets` library loads.

Invariant: as in base. The libraries are imported where they are used, because that takes a second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from titanlite.config.errors import UserError
from titanlite.config.schema import TextSource
from titanlite.data.sources.base import RandomAccess, Record, Sequential, check_column, record_of

_SAMPLE_DOCUMENTS = 64
_BATCH_ROWS = 256


class Parquet(Sequential):
    """Parquet files. A part is a row group: after a restart one row group is read up to its place."""

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        super().__init__(spec, files)
        self.parts, self.num_documents = [], 0
        for file, path in enumerate(files):
            try:
                parquet = self._open(file)
                check_column(self.column, parquet.schema_arrow.names)
            except (OSError, ValueError, RuntimeError) as error:  # pyarrow's errors are of these
                raise UserError(f"cannot read {path} as parquet: {error}") from None
            rows = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
            self.parts += [(file, group) for group, count in enumerate(rows) if count]
            self.num_documents += sum(rows)
        self.fingerprint = self.files.sampled_fingerprint(self.column)

    def _open(self, file: int) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self.files.open(file))

    def raw(self, file: int, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        batches = self._open(file).iter_batches(_BATCH_ROWS, row_groups=[number], columns=[self.column])
        for row, record in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1):
            yield f"{self.files.paths[file]}, row group {number}, row {row}", record


class MappedDataset(RandomAccess):
    """A dataset on disk, memory-mapped by `datasets`. The fingerprint covers its length and a sample of its texts."""

    def __init__(self, spec: TextSource, dataset: Any) -> None:
        super().__init__(spec, [Path(file["filename"]) for file in dataset.cache_files])
        self.files.check()
        self._reads, column = 0, spec.text_column
        check_column(column, dataset.column_names)
        self._dataset = dataset.select_columns([column]).with_format(None)
        self.num_documents = self.num_units = count = len(dataset)
        digest = xxhash.xxh3_128(f"{count}".encode())
        for i in range(0, count, max(1, -(-count // _SAMPLE_DOCUMENTS))):
            digest.update(repr(self._dataset[i][column]).encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()

    def record(self, index: int) -> Record:
        self._reads += 1
        if self.files.paths:  # to read behind the end of a mapped file that became shorter ends the process
            self.files.check(self._reads % len(self.files.paths))
        return record_of(self._dataset[index], self.column, f"{self.name}, row {index}")


class StreamedDataset(Sequential):
    """A dataset that is read while it is downloaded; a part is a shard of it (on the hub: a file)."""

    def __init__(self, spec: TextSource, dataset: Any, files: list[Path]) -> None:
        super().__init__(spec, files)
        self._dataset, column = dataset, spec.text_column
        self.parts = [(None, number) for number in range(dataset.num_shards)]
        first: dict[str, Any] = next(iter(dataset), {column: ""})
        check_column(column, first)
        content = f"{self.num_units} {first[column]!r}".encode("utf-8", "surrogatepass")
        self.fingerprint = xxhash.xxh3_128(content).hexdigest()

    def raw(self, file: None, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
        self.files.check()
        for row, record in enumerate(self._dataset.shard(self.num_units, number)):
            yield f"{self.name}, part {number}, document {row}", record


def open_datasets(spec: TextSource, files: list[Path]) -> MappedDataset | StreamedDataset:
    """Load by `datasets`, which finds the files.

    Raises:
        UserError: it cannot; the message says what was tried.
    """
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    path, config, streaming = spec.path or "allenai/c4", spec.config, spec.streaming or spec.source == "c4"
    if spec.source == "c4":
        config = config or "en"
    local = Path(path).exists()
    try:
        if spec.source == "arrow":
            loaded: Any = datasets.load_from_disk(path)
            loaded = loaded[spec.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(path, name=config, split=spec.split, streaming=streaming)
        if not streaming or spec.source == "arrow":
            return MappedDataset(spec, loaded)
        return StreamedDataset(spec, loaded, [file for file in Path(path).rglob("*") if file.is_file()])
    except Exception as error:  # each part of the library raises errors of its own
        tried = "this local folder" if local else "the Hugging Face hub, because there is no such local folder"
        what = f"configuration {config or 'default'}, split {spec.split}"
        raise UserError(
            f"cannot load dataset {path!r} ({what}), looked for {tried}: {error.__cause__ or error!r}"
        ) from None
