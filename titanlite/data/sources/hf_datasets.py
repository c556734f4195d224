"""What Hugging Face's `datasets` library loads: ids on the hub, local folders, folders that it saved; streaming or not.

Invariant: as in base. The library is imported where it is used, because that takes a second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from titanlite.config.errors import UserError
from titanlite.data.sources.base import (
    BadRecord,
    RandomAccess,
    Sequential,
    Source,
    check_text,
    no_column,
    skip_progress,
)

if TYPE_CHECKING:
    from titanlite.config.schema import TextSource

_SAMPLE_DOCUMENTS = 64


class MappedDataset(RandomAccess):
    """A dataset on disk, memory-mapped by `datasets`. The fingerprint covers its length and a sample of its texts."""

    def __init__(self, name: str, dataset: Any, column: str) -> None:
        _check_column(name, column, dataset.column_names)
        self.name, self._column = name, column
        self._dataset = dataset.select_columns([column]).with_format(None)
        self.num_documents = len(dataset)
        if not self.num_documents:
            raise UserError(f"{name} is empty: no document in it")
        self.size = self._dataset.data.nbytes
        digest = xxhash.xxh3_128(f"{self.num_documents}".encode())
        for i in range(0, self.num_documents, -(-self.num_documents // _SAMPLE_DOCUMENTS)):
            digest.update(repr(self._dataset[i][column]).encode("utf-8", "surrogatepass"))
        self.fingerprint = digest.hexdigest()

    def record(self, index: int) -> str | BadRecord:
        return check_text(self._dataset[index][self._column], self._column, lambda: f"{self.name}, row {index}")


class StreamedDataset(Sequential):
    """A dataset that is read while it is downloaded; a part is a shard of it (on the hub: a file)."""

    def __init__(self, name: str, dataset: Any, column: str) -> None:
        self.name, self._dataset, self._column = name, dataset, column
        self.num_parts, self.num_documents, self.size = dataset.num_shards, None, None
        first = next((example for part in range(self.num_parts) for example in self._examples(part, 0)), None)
        if first is None:
            raise UserError(f"{name} is empty: no document in it")
        _check_column(name, column, list(first))
        content = f"{self.num_parts} {first[column]!r}".encode("utf-8", "surrogatepass")
        self.fingerprint = xxhash.xxh3_128(content).hexdigest()

    def read(self, part: int, start: int) -> Iterator[str | BadRecord]:
        for number, example in enumerate(self._examples(part, start), start):
            text = example.get(self._column)
            yield check_text(text, self._column, lambda n=number: f"{self.name}, part {part}, document {n}")

    def _examples(self, part: int, start: int) -> Iterator[dict[str, Any]]:
        progress = skip_progress(f"{self.name}, part {part}", start)
        try:
            for number, example in enumerate(self._dataset.shard(self.num_parts, part)):
                if number >= start:
                    yield example
                else:
                    progress(number)
        except Exception as error:
            raise UserError(f"{self.name}, part {part}: `datasets` cannot read on: {_cause(error)}") from None


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
    try:
        if spec.source == "arrow":
            loaded: Any = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[spec.split]
        else:
            loaded = datasets.load_dataset(path, name=config, split=spec.split, streaming=streaming)
    except Exception as error:  # each part of the library raises errors of its own
        where = (
            f"the local folder {Path(path).resolve()}"
            if Path(path).exists()
            else (f"no local folder {path!r} here, so the Hugging Face hub was asked for {path!r}")
        )
        what = f"(configuration {config or 'default'}, split {spec.split})"
        raise UserError(f"cannot load dataset {path!r} {what}: tried {where}: {_cause(error)}") from None
    if streaming and spec.source != "arrow":
        return StreamedDataset(name, loaded, spec.text_column)
    return MappedDataset(name, loaded, spec.text_column)


def _check_column(name: str, column: str, columns: list[str]) -> None:
    if column not in columns:
        raise UserError(f"{name}: {no_column(column, columns)}")


def _cause(error: BaseException) -> str:
    """Type and first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
