"""Parquet files.

Invariant: as in base. A part is a row group: after a restart one row group is read up to its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config.errors import UserError
from titanlite.data.sources.base import (
    BadRecord,
    Sequential,
    check_text,
    listed,
    no_column,
    open_file,
    sampled_fingerprint,
)

_BATCH_ROWS = 256


class Parquet(Sequential):
    """Parquet files with a column of text."""

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
        self.fingerprint = sampled_fingerprint(files, column)

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


def _open_parquet(file: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    with open_file(file):  # for its error messages
        pass
    try:
        return pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a parquet file, or a damaged one: {error}") from None
