"""Documents become tokens, and tokens become rows of equal length. Nothing here imports torch, because background
processes start with this module.

A source is read in up to 64 virtual streams. Row i of a source is row i // V of its stream i % V. Rank r of R has the
rows r, r + R, r + 2R, ... of a global batch. Each stream belongs to one worker of a rank, so that a rank tokenizes a
document once.

Invariant: row i of a stream is a pure function of (seed, source, stream, packing, seq_len, i), and the five numbers of
a `StreamPosition` say where it begins. The contents of a row do not depend on the process that reads it. Together the
streams of a source have each document once in an epoch. They reach the end of an epoch at different steps, because rows
are equal in tokens and documents are not.

Random access: there are N documents. Position p = 0, 1, ... means document number p % N in the order of epoch p // N.
Stream v of V reads the positions v, v + V, v + 2V, ... Sequential sources: the same with parts in place of documents. A
part is read from its front in windows of neighbours, and each window is shuffled.
"""

from __future__ import annotations

import copy
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, JobConfig
from titanlite.data.mixture import Mixture
from titanlite.data.shuffle import epoch_order, permuted
from titanlite.data.sources.base import BadRecord, Prepared, RandomAccess, Record, Sequential, Source, text_hash
from titanlite.data.sources.files import open_source
from titanlite.data.sources.shards import Shards
from titanlite.data.tokenizer import Tokenizer

MAX_STREAMS = 64
"""Changing this number changes the data order of every run. It is a power of two, so that usual numbers of ranks divide
it: each data-parallel rank then tokenizes only its own streams."""

_NO_END = 1 << 48  # more documents than any run reads, and few enough that their positions are 64-bit numbers
_WINDOW_DOCUMENTS, _WINDOW_CHARS = 1024, 1 << 20  # a window of a sequential source ends when it has one of these
_WINDOW_ROWS = 64  # best_fit packs the documents of about so many rows at once


class OutOfData(Exception):
    """The epochs of a source are used up: the run is over, cleanly. The message names the source."""


class Place(NamedTuple):
    """Where a document stands in its stream."""

    turn: int = 0
    """The stream's turn-th document (random access) or part (sequential), over all epochs."""
    window: int = 0
    """Sequential: number of the first document of the window within the part."""
    index: int = 0
    """Sequential: which document of the shuffled window."""


class StreamPosition(NamedTuple):
    """Where the next row of a stream begins. The larger of two is the later one."""

    row: int = 0
    """Number of the row."""
    place: Place = Place()
    """concat: the document it begins in. best_fit: the first document of its window."""
    offset: int = 0
    """concat: which token of that document. best_fit: which row of the window."""


Part = tuple[int, int, int, int]
Piece = tuple[np.ndarray, tuple[int, int, int, int]]
"""Tokens of a document, and what a line of `Row.segments` says of them."""
_At = MutableSequence[int] | memoryview


class Document(NamedTuple):
    """Tokens and where they are from."""

    place: Place
    next_place: Place
    part: int
    """Part of a sequential source; 0 otherwise."""
    number: int
    """Number within the source, or within the part."""
    tokens: np.ndarray
    """int32, bos and eos included; empty if the document is skipped or held out."""

    def piece(self, offset: int, size: int) -> Piece:
        """`size` tokens from token `offset` on."""
        return self.tokens[offset : offset + size], (self.part, self.number, offset, size)


class Row(NamedTuple):
    """One sequence of a batch, and where its stream goes on after it."""

    k: int
    """Place in the global batch."""
    tokens: np.ndarray
    """(T + 1,) int32. Inputs are the first T, labels the last T. Tokens after the last segment are padding."""
    segments: np.ndarray
    """(S, 4) int64. Each line is a document or a piece of one: part, document number, offset of the first token in the
    document, number of tokens."""
    source: int
    stream: int
    position: StreamPosition
    skipped: list[str]
    """Why records were left out on the way to this row; in the first epoch only, so that each is reported once."""


@dataclass
class DocumentTokenizer:
    """Documents to tokens.

    Attributes:
        holdout: share of the documents that is held out for validation.
        held_out: whether this is the validation, which reads those and no others.
        skip_bad: leave out a record that cannot be read; otherwise it is an error.
        section: of the job file, for messages.
        skipped: why records were left out. Whoever reports it empties the list.
    """

    tokenizer: Tokenizer
    holdout: float = 0.0
    held_out: bool = False
    skip_bad: bool = False
    section: str = "dataset"
    skipped: list[str] = field(default_factory=list, init=False)

    @classmethod
    def of_run(cls, run: Run, tokenizer: Tokenizer, validation: bool = False) -> DocumentTokenizer:
        """For what a run trains on, or validates on: the sources in its `section`."""
        held_out = validation and run.job.validation.holdout > 0
        section = "validation" if validation and not held_out else "dataset"
        skip = getattr(run.job, section).on_bad_record == "skip"
        return cls(tokenizer, run.job.validation.holdout, held_out, skip, section)

    def __post_init__(self) -> None:
        bos = self.tokenizer.bos_id
        self._begin = np.array([] if bos is None else [bos], dtype=np.int32)
        self._end = np.array([self.tokenizer.eos_id], dtype=np.int32)
        self.empty_length = len(self._begin) + len(self._end)  # tokens of a document without text

    def encode(self, record: Record, again: bool = False) -> np.ndarray:
        """Tokens of a document: bos, text, eos; none if it is held out or skipped.

        Args:
            again: in an earlier epoch it was skipped already, and reported.

        Raises:
            BadRecord: it cannot be read, and such records are not skipped.
        """
        if isinstance(record, BadRecord):
            if not self.skip_bad:
                key = f"{self.section}.on_bad_record"
                remedy = f"Set {self.section}.text_column" if "(text_column)" in str(record) else "Mend the record"
                raise BadRecord(f'{record}. {remedy}, or leave such records out by {key} = "skip".')
            if not again:
                self.skipped.append(str(record))
            return self._end[:0]
        prepared = isinstance(record, Prepared)
        if self.holdout:
            found = record.text_hash if prepared else text_hash(record)
            if (found < self.holdout * 2**64) != self.held_out:
                return self._end[:0]
        if prepared:
            return record.tokens
        return np.concatenate([self._begin, self.tokenizer.encode_array(record).view(np.int32), self._end])


# ------------------------------------------------------------------------------------------------------------- packing

Rows = Iterator[tuple[list[Piece], StreamPosition]]
"""The rows of a stream, and where the row after each begins."""
_Documents = Callable[[Place], Iterator[Document]]


def concat(documents: _Documents, length: int, start: StreamPosition) -> Rows:
    """Documents are joined, and the result is cut into rows of `length` tokens. The last token of a row is also the
    first token of the next row, so that each token of the stream except the very first is predicted exactly once. Only
    the last row of a source with max_epochs is shorter."""
    number, place, last = start  # of the last token that was read, with which the next row begins
    pieces: list[Piece] = []
    need, offset = length, last
    for document in documents(place):
        size = len(document.tokens)
        while offset < size:
            read = min(need, size - offset)
            pieces.append(document.piece(offset, read))
            place, last, need = document.place, offset + read - 1, need - read
            if need:
                break
            number += 1
            yield pieces, StreamPosition(number, place, last)
            pieces, need, offset = [], length, last
        offset = 0
    if need <= length - 2:  # otherwise there are fewer than two tokens: none to predict
        yield pieces, StreamPosition(number + 1, place, last)


def best_fit(documents: _Documents, length: int, start: StreamPosition) -> Rows:
    """Documents whole in a row where they fit, after "Fewer Truncations Improve Language Modeling" (Ding et al., 2024):
    a longer one is cut into rows of its own and a rest; then the pieces of a window of documents go, the longest
    first, each into the row with the least room that is enough."""
    number, place, index = start
    stream = documents(place)
    while True:
        pieces: list[Piece] = []
        total, after = 0, place
        while total < _WINDOW_ROWS * length and (document := next(stream, None)) is not None:
            size, after = len(document.tokens), document.next_place
            starts = range(0, max(1, size - 1), length - 1) if size else ()
            pieces += [document.piece(offset, min(length, size - offset)) for offset in starts]
            total += size
        if not pieces:
            return
        rows = _fit(pieces, length)
        # The fullest rows come first. Shuffle them, so that batches are alike.
        order = permuted(np.arange(len(rows)), len(rows), f"rows {place} {total}").tolist()
        for i in range(index, len(rows)):
            number += 1
            yield rows[order[i]], StreamPosition(number, *((place, i + 1) if i + 1 < len(rows) else (after, 0)))
        place, index = after, 0


def _fit(pieces: list[Piece], length: int) -> list[list[Piece]]:
    """The pieces of each row."""
    rows: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for piece in sorted(pieces, key=lambda piece: -len(piece[0])):
        size = len(piece[0])
        at = bisect_left(room, (size, -1))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        if left > size:
            insort(room, (left - size, row))
    return rows


# -------------------------------------------------------------------------------------------------------- global batch


class PackedDataset:
    """The sources of a job, open, and where their rows go on.

    Args:
        dataset: what the run trains on, or validates on.

    Attributes:
        specs: the tables that name the sources.
        mixture: of the next global batch.
        positions: where each stream of each source stands before it.

    Raises:
        UserError: as `open_sources`.
    """

    def __init__(self, run: Run, dataset: Dataset, tokenizer: DocumentTokenizer, seed: int, batch_size: int) -> None:
        self.tokenizer, self.seed, self.packing = tokenizer, seed, dataset.packing
        self.seq_len = run.job.training.seq_len
        self.specs, self.sources = source_specs(dataset), open_sources(dataset, tokenizer, self.seq_len, run.job)
        self.mixture = Mixture(dataset, batch_size)
        self.positions = [
            [StreamPosition()] * _num_streams(source, spec.max_epochs, tokenizer.holdout)
            for source, spec in zip(self.sources, self.specs, strict=True)
        ]


def training_data(run: Run, tokenizer: Tokenizer) -> PackedDataset:
    """What a run trains on, without what validation.holdout keeps. Raises UserError as `open_sources`."""
    documents = DocumentTokenizer.of_run(run, tokenizer)
    return PackedDataset(run, run.job.dataset, documents, run.data_seed, run.global_batch_size)


def _num_streams(source: Source, max_epochs: int, holdout: float) -> int:
    """V of a source: a power of two, at most its number of documents or parts, because more streams would read the same
    text at the same time. With max_epochs it is 1: then each rank sees by itself where the source ends, and no stream
    has text left when another one ends."""
    if max_epochs:
        return 1
    units = source.num_units
    if holdout and isinstance(source, RandomAccess):
        units = max(1, units // 8)  # or a stream without a document in an epoch reads those of others
    return min(MAX_STREAMS, 1 << (units.bit_length() - 1))


class BatchReader:
    """Global batches, one after the other: a part of the rows of each.

    Args:
        part: number of the data-parallel rank, how many ranks there are, number of the worker on it, how many workers.
        at: numbers of the source, the part and the document that are being read.
    """

    def __init__(self, data: PackedDataset, part: Part = (0, 1, 0, 1), at: _At | None = None) -> None:
        self._data, self._part, self._at = data, part, [0, 0, 0] if at is None else at
        self._mixture = copy.deepcopy(data.mixture)  # because a reader is ahead of whoever trains on its rows
        self._open: dict[tuple[int, int], Rows] = {}

    def next_batch(self) -> list[Row]:
        """The rows of the next global batch.

        Raises:
            OutOfData: a source with max_epochs ends within the batch. All ranks see it, because each of them reads all
                rows of such a source.
            UserError: a record cannot be read.
        """
        rank, ranks, worker, workers = self._part
        rows = []
        for k, (source, number) in enumerate(self._mixture.next_batch()):
            stream = number % len(self._data.positions[source])
            own, mine = k % ranks == rank, (source + stream // ranks) % workers == worker
            if mine and (own or self._data.specs[source].max_epochs):
                row = self.read(source, number, k)
                if own:
                    rows.append(row)
        return rows

    def read(self, source: int, number: int, k: int) -> Row:
        """Row `number` of a source. Rows of a stream are asked for in ascending order."""
        data, length = self._data, self._data.seq_len + 1
        wanted, stream = divmod(number, len(data.positions[source]))
        if (source, stream) not in self._open:
            pack = best_fit if data.packing == "best_fit" else concat
            documents = partial(self._documents, source, stream)
            self._open[source, stream] = pack(documents, length, data.positions[source][stream])
        self._at[0] = source
        data.tokenizer.skipped.clear()
        for pieces, position in self._open[source, stream]:
            if position.row > wanted:
                segments = np.array([segment for _, segment in pieces], dtype=np.int64)
                tokens = [piece for piece, _ in pieces]
                if missing := length - sum(map(len, tokens)):
                    tokens.append(np.full(missing, data.tokenizer.tokenizer.eos_id, dtype=np.int32))
                tokens = np.concatenate(tokens).astype(np.int32, copy=False)
                return Row(k, tokens, segments, source, stream, position, data.tokenizer.skipped.copy())
            # A row of another rank, because the number of ranks does not divide V. What was skipped is for that rank
            # to report.
            data.tokenizer.skipped.clear()
        epochs = data.specs[source].max_epochs
        raise OutOfData(f"{data.sources[source].name} has no more rows (dataset.max_epochs = {epochs})")

    def _documents(self, number: int, stream: int, start: Place) -> Iterator[Document]:
        """The documents of a stream of source `number` from `start` on, a place that it had before."""
        data, source, turn = self._data, self._data.sources[number], start.turn
        count, streams = source.num_units, len(data.positions[number])
        end = data.specs[number].max_epochs * count or _NO_END
        record = source.record if isinstance(source, RandomAccess) else None
        # Many turns are permuted at once, because numpy's cost is per call; at most as many as an epoch has.
        block = max(8, min(256, count // streams))
        while turn * streams + stream < end:
            positions = np.arange(turn, turn + block) * streams + stream
            for unit in epoch_order(count, data.seed, positions[positions < end]).tolist():
                position = turn * streams + stream
                if record is not None:
                    self._at[2] = unit
                    tokens = data.tokenizer.encode(record(unit), position >= count)
                    yield Document(Place(turn), Place(turn + 1), 0, unit, tokens)
                else:
                    assert isinstance(source, Sequential)
                    yield from self._shuffled(source, unit, position, start if turn == start.turn else Place(turn))
                turn += 1

    def _shuffled(self, source: Sequential, part: int, position: int, start: Place) -> Iterator[Document]:
        """The documents of a part from `start` on, in windows of neighbours that are shuffled."""
        turn, first, index = start
        for window in self._windows(source, part, first):
            key = f"{self._data.seed} position {position} window {first}"
            order, after = permuted(np.arange(len(window)), len(window), key).tolist(), first + len(window)
            for i in range(index, len(window)):
                tokens = self._data.tokenizer.encode(window[order[i]], position >= source.num_units)
                following = Place(turn, first, i + 1) if i + 1 < len(window) else Place(turn, after)
                yield Document(Place(turn, first, i), following, part, first + order[i], tokens)
            first, index = after, 0

    def _windows(self, source: Sequential, part: int, start: int) -> Iterator[list[Record]]:
        """The documents of a part from number `start` on; a window begins behind a document that is there."""
        window, chars = list[Record](), 0
        for number, record in enumerate(source.read(part, start)):
            self._at[1], self._at[2] = part, number
            if record is not None:
                window.append(record)
                chars += len(record) if isinstance(record, str) else 0
            if len(window) == _WINDOW_DOCUMENTS or chars >= _WINDOW_CHARS:
                yield window
                window, chars = [], 0
        if window:
            yield window


# ------------------------------------------------------------------------------------------------------------- sources


def source_specs(dataset: Dataset) -> tuple[DataSource | Dataset, ...]:
    """The sources of a job: its mix, or the one that stands in [dataset]."""
    return dataset.sources or (dataset,)


def open_sources(dataset: Dataset, tokenizer: DocumentTokenizer, seq_len: int, job: JobConfig) -> list[Source]:
    """The sources of a job, after a first look into each: what can be found wrong at once is said before training.

    Raises:
        UserError: a source cannot be opened, holds less text than one row, or the first look found a record that cannot
            be read.
    """
    sources = [open_source(spec, job) for spec in source_specs(dataset)]
    for source in sources:
        look_into(source, tokenizer, seq_len)
    return sources


def look_into(source: Source, documents: DocumentTokenizer, seq_len: int) -> None:
    """Read from the front of `source` until one row is full of text, then a sample of its documents. Raises UserError:
    it holds less text, or a record that cannot be read."""
    tokens, tokenizer = 0, replace(documents)
    if isinstance(source, Shards):
        source.check(tokenizer.tokenizer, tokenizer.holdout)
    for document in map(tokenizer.encode, source):
        tokens += len(document) if len(document) > tokenizer.empty_length else 0
        if tokens > seq_len:
            break
    else:
        which = "held-out documents" if tokenizer.held_out else "documents"
        few = f"have {tokens:,} tokens together, fewer than one row of text: training.seq_len is {seq_len:,}"
        remedy = "Lower it, or add text" if tokens else "There is no text in them: name other ones"
        raise UserError(f"the {which} of {source.name} {few}. {remedy}.")
    for record in map(source.record, source.sample()) if isinstance(source, RandomAccess) else ():
        if isinstance(record, BadRecord):
            tokenizer.encode(record)


def report_skipped(reasons: list[str]) -> None:
    """Log why records were left out."""
    for reason in reasons:
        logging.getLogger("titanlite").warning("skipped a record: %s", reason)
