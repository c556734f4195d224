"""The rows that one process reads of each global batch: all rows of a rank, or those of one of its workers.

Invariant: the contents of a row do not depend on the process that reads it. Nothing here imports torch, because
background processes start with this module.

Row i of a source is row i // V of its stream i % V. Rank r of R has the rows r, r + R, r + 2R, ... of a global batch.
Each stream belongs to one worker of a rank, so that a rank tokenizes a document once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset, DataSource
from titanlite.data.documents import Encoder, Exhausted, epoch_order, num_streams, open_documents
from titanlite.data.mixing import Schedule
from titanlite.data.order import Permutation
from titanlite.data.packing import BestFitPacker, ConcatPacker, Cursor, Packer
from titanlite.data.packing import Row as Row
from titanlite.data.sources import open_source
from titanlite.data.sources.base import BadRecord, RandomAccess, Sequential, Source
from titanlite.data.sources.shards import Shards
from titanlite.data.tokenizer import Tokenizer

_SAMPLE_DOCUMENTS = 64
_MOST_EMPTY = 100_000  # so many empty documents at the front, and no other, are a mistake


class OutOfData(Exception):
    """The epochs of a source are used up: the run is over, cleanly. The message names the source."""


class ReadRow(NamedTuple):
    """A row, and where its stream goes on after it."""

    k: int
    """Place in the global batch."""
    row: Row
    source: int
    stream: int
    cursor: Cursor
    skipped: list[str]
    """Why records were left out on the way to this row; in the first epoch only, so that each is reported once."""


@dataclass(frozen=True)
class Part:
    """Which rows: those of worker `worker` of `workers` on rank `dp_rank` of `dp_size`."""

    dp_rank: int
    dp_size: int
    worker: int = 0
    workers: int = 1


def source_specs(dataset: Dataset) -> tuple[DataSource | Dataset, ...]:
    """The sources of a job: its mix, or the one that stands in [dataset]."""
    return dataset.sources or (dataset,)


class BatchReader:
    """Global batches, one after the other: the rows of `part` in each.

    Args:
        cursors: where each stream of each source stands before the next batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        sources: list[Source],
        encoder: Encoder,
        seed: int,
        seq_len: int,
        schedule: Schedule,
        cursors: list[list[Cursor]],
        part: Part,
    ) -> None:
        self._specs, self._sources, self._encoder = source_specs(dataset), sources, encoder
        self._seq_len, self._schedule, self._cursors, self._part = seq_len, schedule, cursors, part
        self._orders = [epoch_order(source, seed) for source in sources]
        self._packer = BestFitPacker if dataset.packing == "best_fit" else ConcatPacker
        self._open: dict[tuple[int, int], Packer] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the rows."""
        return self._encoder.tokenizer

    def next_batch(self) -> list[ReadRow]:
        """The rows of the next global batch.

        Raises:
            OutOfData: a source with max_epochs ends within the batch. All ranks see it, because each of them reads all
                rows of such a source.
            UserError: a record cannot be read.
        """
        part, rows = self._part, []
        for k, (source, number) in enumerate(self._schedule.next_batch()):
            own = k % part.dp_size == part.dp_rank
            stream = number % len(self._cursors[source])
            if not own and not self._specs[source].max_epochs:
                continue
            if (source + stream // part.dp_size) % part.workers != part.worker:
                continue
            row, cursor = self.read(source, number)
            if own:
                rows.append(ReadRow(k, row, source, stream, cursor, self._encoder.skipped.copy()))
        return rows

    def read(self, source: int, number: int) -> tuple[Row, Cursor]:
        """Row `number` of a source and where its stream goes on. Rows of a stream are asked for in ascending order."""
        row, stream = divmod(number, len(self._cursors[source]))
        packer = self._open.get((source, stream))
        if packer is None:
            packer = self._open[source, stream] = self._open_stream(source, stream)
        try:
            packer.skip_to(row)  # nothing to skip if dp_size divides V; otherwise other ranks have the rows between
            self._encoder.skipped.clear()  # these are theirs to report
            return packer.next_row(), packer.cursor
        except Exhausted:
            epochs = self._specs[source].max_epochs
            times = "once" if epochs == 1 else f"{epochs} times"
            raise OutOfData(f"{self._sources[source].name} has been read {times} (dataset.max_epochs)") from None

    def _open_stream(self, source: int, stream: int) -> Packer:
        max_epochs = self._specs[source].max_epochs
        documents = open_documents(self._sources[source], self._encoder, self._orders[source], stream, max_epochs)
        padding = self._encoder.tokenizer.eos_id
        return self._packer(documents, self._seq_len, padding, self._cursors[source][stream])


def open_sources(dataset: Dataset, encoder: Encoder, seq_len: int) -> list[Source]:
    """The sources of a job, after a first look into each: what can be found wrong at once is said before training.

    Raises:
        UserError: a source cannot be opened, holds less than one row or no text, or the first look found a record that
            cannot be read.
    """
    sources = [open_source(spec) for spec in source_specs(dataset)]
    for source in sources:
        if isinstance(source, Shards):
            source.check(encoder.tokenizer, encoder.holdout)
        _look_into(source, replace(encoder), seq_len)
    return sources


def _look_into(source: Source, encoder: Encoder, seq_len: int) -> None:
    """Read from the front of `source` until one row is full, then a sample of its documents."""
    tokens = texts = empty = 0
    for document in _from_the_front(source, encoder):
        tokens += len(document)
        texts += len(document) > encoder.empty_length
        empty += 0 < len(document) <= encoder.empty_length
        if (texts and tokens > seq_len) or (empty == _MOST_EMPTY and not texts):
            break
    what = "held-out documents of" if encoder.held_out else "documents of"
    if empty and not texts:
        raise UserError(f"the {what} {source.name} are empty: none of the first {empty:,} has any text.")
    if tokens <= seq_len:
        too_few = f"fewer than one sequence: training.seq_len is {seq_len:,}. Lower it, or add text."
        raise UserError(
            f"the {what} {source.name} have {tokens:,} tokens together, {too_few if seq_len else 'there is no text.'}"
        )
    if isinstance(source, RandomAccess) and not isinstance(source, Shards):
        for index in sample_numbers(source):
            record = source.record(index)
            if isinstance(record, BadRecord):
                encoder.encode(record)


def sample_numbers(source: RandomAccess) -> list[int]:
    """Numbers of a few documents, spread over the whole source."""
    count = len(source)
    return Permutation(count, "sample")(np.arange(min(count, _SAMPLE_DOCUMENTS))).tolist()


def _from_the_front(source: Source, encoder: Encoder) -> Iterator[np.ndarray]:
    if isinstance(source, RandomAccess):
        for index in range(len(source)):
            yield encoder.fetch(source, index)
    else:
        assert isinstance(source, Sequential)
        for part in range(source.num_parts):
            for record in source.read(part, 0):
                yield encoder.encode(record)


def report_skipped(reasons: list[str]) -> None:
    """Log why records were left out."""
    for reason in reasons:
        logging.getLogger("titanlite").warning("skipped a record: %s", reason)


def start_cursors(dataset: Dataset, sources: list[Source], holdout: float) -> list[list[Cursor]]:
    """All streams of all sources at their starts."""
    return [
        [Cursor()] * num_streams(source, spec.max_epochs, holdout)
        for source, spec in zip(sources, source_specs(dataset), strict=True)
    ]
