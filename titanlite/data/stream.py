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
import itertools
import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.schema import Dataset, DataSource
from titanlite.data.mixture import Mixture
from titanlite.data.shuffle import Permutation, epoch_order
from titanlite.data.sources import open_source
from titanlite.data.sources.base import BadRecord, Prepared, RandomAccess, Record, Sequential, Source, text_hash
from titanlite.data.sources.shards import Shards
from titanlite.data.tokenizer import Tokenizer

MAX_STREAMS = 64
"""Changing this number changes the data order of every run. It is a power of two, so that usual numbers of ranks divide
it: each data-parallel rank then tokenizes only its own streams."""
MAX_COUNT = 1 << 48
"""More documents or rows than any run reads, and few enough that their positions are 64-bit numbers."""

_WINDOW_DOCUMENTS, _WINDOW_CHARS = 1024, 1 << 20  # a window of a sequential source ends when it has one of these
_WINDOW_ROWS = 64  # best_fit packs the documents of about so many rows at once
_SAMPLE_DOCUMENTS = 64
_MOST_EMPTY = 100_000  # so many empty documents at the front, and no other, are a mistake


_At = MutableSequence[int] | memoryview
"""What is being read: numbers of source, part and document."""


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
    """Where the next row of a stream begins."""

    row: int = 0
    """Number of the row."""
    place: Place = Place()
    """concat: the document it begins in. best_fit: the first document of its window."""
    offset: int = 0
    """concat: which token of that document. best_fit: which row of the window."""


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


class Row(NamedTuple):
    """One sequence of a batch."""

    tokens: np.ndarray
    """(T + 1,) int32. Inputs are the first T, labels the last T. Tokens after the last segment are padding."""
    segments: np.ndarray
    """(S, 4) int64. Each line is a document or a piece of one: part, document number, offset of the first token in the
    document, number of tokens."""


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
                raise BadRecord(f'{record}. Mend the record, or leave such records out by {key} = "skip".')
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


# ----------------------------------------------------------------------------------------------------------- documents


class SourceReader:
    """The streams of one source.

    Args:
        max_epochs: how often it is read; 0: without end.
        at: of three numbers, of which the last two say what is being read: part and document.
    """

    def __init__(self, source: Source, tokenizer: DocumentTokenizer, seed: int, max_epochs: int, at: _At) -> None:
        self.source, self.max_epochs = source, max_epochs
        self.streams = num_streams(source, max_epochs, tokenizer.holdout)
        self._tokenizer, self._seed, self._at = tokenizer, seed, at
        self._end = max_epochs * source.num_units or MAX_COUNT

    def documents(self, stream: int, start: Place) -> Iterator[Document]:
        """The documents of a stream from `start` on, which is one that this stream had before.

        Raises:
            CheckpointError: there is no such place.
        """
        return (self._at_random if isinstance(self.source, RandomAccess) else self._in_windows)(stream, start)

    def _at_random(self, stream: int, start: Place) -> Iterator[Document]:
        assert isinstance(self.source, RandomAccess)
        # Many turns are permuted at once, because numpy's cost is per call; at most as many as an epoch has.
        block = max(8, min(256, len(self.source) // self.streams))
        turn, count = start.turn, len(self.source)
        while turn * self.streams + stream < self._end:
            positions = np.arange(turn, turn + block) * self.streams + stream
            numbers = epoch_order(count, self._seed, positions[positions < self._end]).tolist()
            for number in numbers:
                self._at[2] = number
                tokens = self._tokenizer.encode(self.source.record(number), turn * self.streams + stream >= count)
                turn += 1
                yield Document(Place(turn - 1), Place(turn), 0, number, tokens)

    def _in_windows(self, stream: int, start: Place) -> Iterator[Document]:
        assert isinstance(self.source, Sequential)
        turn, first, index = start
        while (position := turn * self.streams + stream) < self._end:
            (part,) = epoch_order(self.source.num_units, self._seed, np.array([position])).tolist()
            records = self._from(part, first)
            while window := _take_window(records):
                shuffle = Permutation(len(window), f"{self._seed} position {position} window {first}")
                if index >= len(window):
                    raise no_such_place(f"document {index} of a window of {len(window)}")
                after = first + len(window)
                for i, number in enumerate(shuffle(np.arange(index, len(window))).tolist(), index + 1):
                    tokens = self._tokenizer.encode(window[number], position >= self.source.num_units)
                    following = Place(turn, first, i) if i < len(window) else Place(turn, after)
                    yield Document(Place(turn, first, i - 1), following, part, first + number, tokens)
                first, index = after, 0
            if index:
                raise no_such_place(f"document {index} of an empty window")
            turn, first = turn + 1, 0

    def _from(self, part: int, start: int) -> Iterator[Record]:
        """The documents of a part from number `start` on; a window begins behind a document that is there."""
        assert isinstance(self.source, Sequential)
        number, said = 0, time.monotonic()
        for number, record in enumerate(self.source.read(part, start), 1):
            self._at[1], self._at[2] = part, number - 1
            if record is not None:
                yield record
            elif time.monotonic() - said > 5:
                said = time.monotonic()
                logging.getLogger("titanlite").info(
                    "%s, part %d: skipped %s of %s documents", self.source.name, part, f"{number:,}", f"{start:,}"
                )
        if number < start:
            raise no_such_place(f"document {start} of {self.source.name}, part {part}, which ends before")


def _take_window(records: Iterator[Record]) -> list[Record]:
    window: list[Record] = []
    chars = 0
    for record in itertools.islice(records, _WINDOW_DOCUMENTS):
        window.append(record)
        chars += len(record) if isinstance(record, str) else 0
        if chars >= _WINDOW_CHARS:
            break
    return window


def num_streams(source: Source, max_epochs: int, holdout: float) -> int:
    """V of a source: a power of two, at most its number of documents or parts, because more streams would read the same
    text at the same time. With max_epochs it is 1: then each rank sees by itself where the source ends, and no stream
    has text left when another one ends."""
    if max_epochs:
        return 1
    units = source.num_units
    if holdout and isinstance(source, RandomAccess):
        units = max(1, units // 8)  # or a stream without a document in an epoch reads those of others
    return min(MAX_STREAMS, 1 << (units.bit_length() - 1))


def no_such_place(what: str) -> CheckpointError:
    """The error for a saved place beyond the end of a part, a window or a document: nothing that a run saves for the
    same data."""
    return CheckpointError(
        f"The checkpoint's place in the data does not exist: {what}. Take an older checkpoint by checkpoint.load_step, "
        'or start the data afresh by checkpoint.exclude_from_loading = ["data"].'
    )


# ------------------------------------------------------------------------------------------------------------- packing

Rows = Iterator[tuple[Row, StreamPosition]]
"""The rows of a stream, and where the row after each begins."""
_Documents = Callable[[Place], Iterator[Document]]
_Segment = tuple[int, int, int, int]


def concat(documents: _Documents, length: int, padding: int, start: StreamPosition) -> Rows:
    """Documents are joined, and the result is cut into rows of `length` tokens. The last token of a row is also the
    first token of the next row, so that each token of the stream except the very first is predicted exactly once. Only
    the last row of a source with max_epochs is padded."""
    number, place, offset = start
    last = offset
    parts: list[np.ndarray] = []
    segments: list[_Segment] = []
    need = length
    for document in documents(place):
        tokens = document.tokens
        if offset and offset >= len(tokens):
            raise no_such_place(f"token {offset} of a document of {len(tokens)}")
        while offset < len(tokens):
            part = tokens[offset : offset + need]
            parts.append(part)
            segments.append((document.part, document.number, offset, len(part)))
            # The last token that was read, with which the next row begins.
            place, offset, need = document.place, offset + len(part) - 1, need - len(part)
            last = offset
            if need:
                break
            number += 1
            yield _row(parts, segments, length, padding), StreamPosition(number, place, offset)
            parts, segments, need = [], [], length
        offset = 0
    if need <= length - 2:  # otherwise there are fewer than two tokens: none to predict
        yield _row(parts, segments, length, padding), StreamPosition(number + 1, place, last)


def best_fit(documents: _Documents, length: int, padding: int, start: StreamPosition) -> Rows:
    """Documents whole in a row where they fit, after "Fewer Truncations Improve Language Modeling" (Ding et al., 2024):
    a longer one is cut into rows of its own and a rest; then the pieces of a window of documents go, the longest
    first, each into the row with the least room that is enough."""
    number, place, index = start
    stream = documents(place)
    while True:
        pieces: list[tuple[np.ndarray, _Segment]] = []
        total, after = 0, place
        while total < _WINDOW_ROWS * length and (document := next(stream, None)) is not None:
            tokens, after = document.tokens, document.next_place
            for offset in range(0, max(1, len(tokens) - 1), length - 1):
                if len(part := tokens[offset : offset + length]):
                    pieces.append((part, (document.part, document.number, offset, len(part))))
            total += len(tokens)
        if not pieces:
            return
        bins = _fit([len(part) for part, _ in pieces], length)
        # The fullest rows come first. Shuffle them, so that batches are alike.
        order = Permutation(len(bins), f"rows {place} {total}")(np.arange(len(bins))).tolist()
        if index >= len(bins):
            raise no_such_place(f"row {index} of a window of {len(bins)}")
        for i in range(index, len(bins)):
            chosen = [pieces[piece] for piece in bins[order[i]]]
            row = _row([part for part, _ in chosen], [segment for _, segment in chosen], length, padding)
            number += 1
            yield row, StreamPosition(number, *((place, i + 1) if i + 1 < len(bins) else (after, 0)))
        place, index = after, 0


def _fit(sizes: list[int], length: int) -> list[list[int]]:
    """The numbers of the pieces in each row."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(room, (sizes[i], -1))
        if at < len(room):
            left, number = room.pop(at)
        else:
            left, number = length, len(bins)
            bins.append([])
        bins[number].append(i)
        if left > sizes[i]:
            insort(room, (left - sizes[i], number))
    return bins


def _row(parts: list[np.ndarray], segments: list[_Segment], length: int, padding: int) -> Row:
    if missing := length - sum(map(len, parts)):
        parts = [*parts, np.full(missing, padding, dtype=np.int32)]
    return Row(np.concatenate(parts).astype(np.int32, copy=False), np.array(segments, dtype=np.int64))


# -------------------------------------------------------------------------------------------------------- global batch


class ReadRow(NamedTuple):
    """A row, and where its stream goes on after it."""

    k: int
    """Place in the global batch."""
    row: Row
    source: int
    stream: int
    position: StreamPosition
    skipped: list[str]
    """Why records were left out on the way to this row; in the first epoch only, so that each is reported once."""


@dataclass(frozen=True)
class Part:
    """Which rows: those of worker `worker` of `workers` on rank `dp_rank` of `dp_size`."""

    dp_rank: int = 0
    dp_size: int = 1
    worker: int = 0
    workers: int = 1


class PackedDataset:
    """The sources of a job, open, and where their rows go on.

    Attributes:
        specs: the tables that name the sources.
        mixture: of the next global batch.
        positions: where each stream of each source stands before it.

    Raises:
        UserError: as `open_sources`.
    """

    def __init__(
        self, dataset: Dataset, tokenizer: DocumentTokenizer, seed: int, seq_len: int, global_batch_size: int
    ) -> None:
        self.tokenizer, self.seed, self.seq_len, self.packing = tokenizer, seed, seq_len, dataset.packing
        self.specs, self.sources = source_specs(dataset), open_sources(dataset, tokenizer, seq_len)
        self.mixture = Mixture(dataset, global_batch_size)
        self.positions = [
            [StreamPosition()] * num_streams(source, spec.max_epochs, tokenizer.holdout)
            for source, spec in zip(self.sources, self.specs, strict=True)
        ]


class BatchReader:
    """Global batches, one after the other: the rows of `part` in each. `at` says at any time what is being read."""

    def __init__(self, data: PackedDataset, part: Part, at: _At | None = None) -> None:
        self._data, self._part, self._at = data, part, [0, 0, 0] if at is None else at
        self._mixture = copy.deepcopy(data.mixture)  # because a reader is ahead of whoever trains on its rows
        self._readers = [
            SourceReader(source, data.tokenizer, data.seed, spec.max_epochs, self._at)
            for source, spec in zip(data.sources, data.specs, strict=True)
        ]
        self._open: dict[tuple[int, int], Rows] = {}

    def next_batch(self) -> list[ReadRow]:
        """The rows of the next global batch.

        Raises:
            OutOfData: a source with max_epochs ends within the batch. All ranks see it, because each of them reads all
                rows of such a source.
            UserError: a record cannot be read.
        """
        part, rows = self._part, []
        for k, (source, number) in enumerate(self._mixture.next_batch()):
            own, stream = k % part.dp_size == part.dp_rank, number % self._readers[source].streams
            mine = (source + stream // part.dp_size) % part.workers == part.worker
            if mine and (own or self._readers[source].max_epochs):
                row, position = self.read(source, number)
                if own:
                    rows.append(ReadRow(k, row, source, stream, position, self._data.tokenizer.skipped.copy()))
        return rows

    def read(self, source: int, number: int) -> tuple[Row, StreamPosition]:
        """Row `number` of a source and where its stream goes on. Rows of a stream are asked for in ascending order."""
        reader, data = self._readers[source], self._data
        wanted, stream = divmod(number, reader.streams)
        if (source, stream) not in self._open:
            pack, start = best_fit if data.packing == "best_fit" else concat, data.positions[source][stream]
            documents, padding = partial(reader.documents, stream), data.tokenizer.tokenizer.eos_id
            self._open[source, stream] = pack(documents, data.seq_len + 1, padding, start)
        self._at[0] = source
        data.tokenizer.skipped.clear()
        for row, position in self._open[source, stream]:
            if position.row > wanted:
                return row, position
            # A row of another rank, because dp_size does not divide V. What was skipped is for that rank to report.
            data.tokenizer.skipped.clear()
        times = "once" if reader.max_epochs == 1 else f"{reader.max_epochs} times"
        raise OutOfData(f"{reader.source.name} has been read {times} (dataset.max_epochs)")


def source_specs(dataset: Dataset) -> tuple[DataSource | Dataset, ...]:
    """The sources of a job: its mix, or the one that stands in [dataset]."""
    return dataset.sources or (dataset,)


def open_sources(dataset: Dataset, tokenizer: DocumentTokenizer, seq_len: int) -> list[Source]:
    """The sources of a job, after a first look into each: what can be found wrong at once is said before training.

    Raises:
        UserError: a source cannot be opened, holds less than one row or no text, or the first look found a record that
            cannot be read.
    """
    sources = [open_source(spec) for spec in source_specs(dataset)]
    for source in sources:
        if isinstance(source, Shards):
            source.check(tokenizer.tokenizer, tokenizer.holdout)
        _look_into(source, replace(tokenizer), seq_len)
    return sources


def _look_into(source: Source, tokenizer: DocumentTokenizer, seq_len: int) -> None:
    """Read from the front of `source` until one row is full, then a sample of its documents."""
    tokens = texts = empty = 0
    for document in map(tokenizer.encode, source):
        tokens += len(document)
        texts += len(document) > tokenizer.empty_length
        empty += 0 < len(document) <= tokenizer.empty_length
        if (texts and tokens > seq_len) or (empty == _MOST_EMPTY and not texts):
            break
    what = f"the {'held-out ' if tokenizer.held_out else ''}documents of {source.name}"
    if empty and not texts:
        raise UserError(f"{what} are empty: none of the first {empty:,} has any text.")
    if tokens <= seq_len:
        too_few = f"fewer than one sequence: training.seq_len is {seq_len:,}. Lower it, or add text."
        raise UserError(f"{what} have {tokens:,} tokens together, {too_few if seq_len else 'there is no text.'}")
    for record in sample(source):
        if isinstance(record, BadRecord):
            tokenizer.encode(record)


def sample_numbers(source: RandomAccess) -> list[int]:
    """Numbers of a few documents, spread over the whole source."""
    count = len(source)
    return Permutation(count, "sample")(np.arange(min(count, _SAMPLE_DOCUMENTS))).tolist()


def sample(source: Source) -> Iterator[Record]:
    """Those documents; none of a source that is not at random access."""
    return map(source.record, sample_numbers(source)) if isinstance(source, RandomAccess) else iter(())


def report_skipped(reasons: list[str]) -> None:
    """Log why records were left out."""
    for reason in reasons:
        logging.getLogger("titanlite").warning("skipped a record: %s", reason)
