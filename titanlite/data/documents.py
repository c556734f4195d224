"""The documents of one virtual stream of a source, one after the other, as tokens.

Invariant: the documents of a stream and their order are a pure function of (seed, source, stream). Together the streams
of a source have each document once in an epoch. They reach the end of an epoch at different steps, because rows are
equal in tokens and documents are not.

Random access: there are N documents. Position p = 0, 1, ... means document number p % N in the order of epoch p // N.
Stream v of V reads the positions v, v + V, v + 2V, ... Sequential sources: the same with parts in place of documents. A
part is read from its front in windows of neighbours, and each window is shuffled.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from titanlite.config.errors import CheckpointError
from titanlite.data.order import EpochOrder, Permutation
from titanlite.data.sources.base import BadRecord, RandomAccess, Sequential, Source, text_hash
from titanlite.data.tokenizer import Tokenizer

MAX_STREAMS = 64
"""Changing this number changes the data order of every run. It is a power of two, so that usual numbers of ranks divide
it: each data-parallel rank then tokenizes only its own streams."""

MAX_TURN = 1 << 48
"""More documents than any stream reads, and few enough that their positions are 64-bit numbers."""

_WINDOW_DOCUMENTS, _WINDOW_CHARS = 1024, 1 << 20  # a window of a sequential source ends when it has one of these


def no_such_place(what: str) -> CheckpointError:
    """The error for a saved place beyond the end of a part, a window or a document: nothing that a run saves for the
    same data."""
    return CheckpointError(
        f"The checkpoint's place in the data does not exist: {what}. Take an older checkpoint by checkpoint.load_step, "
        'or start the data afresh by checkpoint.exclude_from_loading = ["data"].'
    )


class Exhausted(Exception):
    """The stream has read its source as often as it may."""


class Place(NamedTuple):
    """Where a document stands in its stream."""

    turn: int = 0
    """The stream's turn-th document (random access) or part (sequential), over all epochs."""
    window: int = 0
    """Sequential: number of the first document of the window within the part."""
    index: int = 0
    """Sequential: which document of the shuffled window."""


class Document(NamedTuple):
    """Tokens and where they are from."""

    part: int
    """Part of a sequential source; 0 otherwise."""
    number: int
    """Number within the source, or within the part."""
    tokens: np.ndarray
    """int32, bos and eos included; empty if the document is skipped or held out."""


def num_units(source: Source) -> int:
    """Number of what is read in an order: documents, or the parts of a sequential source."""
    return source.num_parts if isinstance(source, Sequential) else len(source)  # type: ignore[arg-type]


def num_streams(source: Source, max_epochs: int, holdout: float = 0.0) -> int:
    """V of a source: a power of two, at most its number of documents or parts, because more streams would read the same
    text at the same time. With max_epochs it is 1: then each rank sees by itself where the source ends, and no stream
    has text left when another one ends."""
    if max_epochs:
        return 1
    units = num_units(source)
    if holdout and isinstance(source, RandomAccess):
        units = max(1, units // 8)  # or a stream without a document in an epoch reads those of others
    return min(MAX_STREAMS, 1 << (units.bit_length() - 1))


@dataclass
class Encoder:
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

    def fetch(self, source: RandomAccess, index: int, again: bool = False) -> np.ndarray:
        """Tokens of document `index`: bos, text, eos; none if it is held out or skipped.

        Args:
            again: in an earlier epoch it was skipped already, and reported.

        Raises:
            BadRecord: it cannot be read, and such records are not skipped.
        """
        record = source.record(index)
        if not isinstance(record, np.ndarray):
            return self.encode(record, again)
        return record if not self.holdout or self._reads(source.text_hash(index)) else self._end[:0]

    def encode(self, record: str | BadRecord, again: bool = False) -> np.ndarray:
        """As `fetch`, for a record that has been read already."""
        if isinstance(record, BadRecord):
            if not self.skip_bad:
                key = f"{self.section}.on_bad_record"
                raise BadRecord(f'{record}. Mend the record, or leave such records out by {key} = "skip".')
            if not again:
                self.skipped.append(str(record))
            return self._end[:0]
        if self.holdout and not self._reads(text_hash(record)):
            return self._end[:0]
        return np.concatenate([self._begin, self.tokenizer.encode_array(record).view(np.int32), self._end])

    def _reads(self, hash_of_text: int) -> bool:
        """Whether a document is on the side, training or validation, that this encoder is for."""
        return (hash_of_text < self.holdout * 2**64) == self.held_out


class Documents(ABC):
    """An endless walk through one stream, which can begin at any place in it.

    Attributes:
        place: of the document that `current` returns.
    """

    place: Place

    @abstractmethod
    def seek(self, place: Place) -> None:
        """Go to `place`, one that this stream had before."""

    @abstractmethod
    def current(self) -> Document:
        """The document at `place`.

        Raises:
            Exhausted: there is none, because all epochs are read.
        """

    @abstractmethod
    def advance(self) -> None:
        """Go to the next document."""


def epoch_order(source: Source, seed: int) -> EpochOrder:
    """The order of the documents, or parts, of a source; its streams share it."""
    return EpochOrder(num_units(source), seed)


def open_documents(source: Source, encoder: Encoder, order: EpochOrder, stream: int, max_epochs: int) -> Documents:
    """Stream number `stream` of a source, at its start."""
    kind = RandomDocuments if isinstance(source, RandomAccess) else SequentialDocuments
    streams = num_streams(source, max_epochs, encoder.holdout)
    return kind(source, encoder, order, stream, streams, max_epochs)  # type: ignore[arg-type]


class RandomDocuments(Documents):
    """One stream of a source at random access."""

    def __init__(
        self, source: RandomAccess, encoder: Encoder, order: EpochOrder, stream: int, streams: int, max_epochs: int
    ) -> None:
        self._source, self._encoder, self._stream, self._streams = source, encoder, stream, streams
        self._order = order
        self._end = max_epochs * len(source) or None
        # Many turns are permuted at once, because numpy's cost is per call; at most as many as an epoch has.
        self._block_turns = max(8, min(256, len(source) // streams))
        self._block, self._numbers = -1, np.empty(0, dtype=np.int64)
        self._document: Document | None = None
        self.place = Place()

    def seek(self, place: Place) -> None:
        if place != self.place:
            self.place, self._document = place, None

    def advance(self) -> None:
        self.place, self._document = Place(self.place.turn + 1), None

    def current(self) -> Document:
        if self._document is None:
            turn = self.place.turn
            if self._end is not None and turn * self._streams + self._stream >= self._end:
                raise Exhausted
            block, place = divmod(turn, self._block_turns)
            if block != self._block:
                turns = block * self._block_turns + np.arange(self._block_turns)
                self._block, self._numbers = block, self._order(turns * self._streams + self._stream)
            number = int(self._numbers[place])
            again = turn * self._streams + self._stream >= len(self._source)
            self._document = Document(0, number, self._encoder.fetch(self._source, number, again))
        return self._document


class SequentialDocuments(Documents):
    """One stream of a sequential source."""

    def __init__(
        self, source: Sequential, encoder: Encoder, order: EpochOrder, stream: int, streams: int, max_epochs: int
    ) -> None:
        self._source, self._encoder, self._stream, self._streams = source, encoder, stream, streams
        self._order = order
        self._end = max_epochs * source.num_parts or None
        self._records: Iterator[str | BadRecord] | None = None  # the rest of the part, behind the window
        self._window: list[str | BadRecord] | None = None
        self._shuffle = np.empty(0, dtype=np.int64)
        self._document: Document | None = None
        self.place = Place()

    def seek(self, place: Place) -> None:
        if place == self.place:
            return
        if place[:2] != self.place[:2]:
            self._records = self._window = None
        self.place, self._document = place, None

    def advance(self) -> None:
        turn, window, index = self.place
        self._document = None
        assert self._window is not None
        if index + 1 < len(self._window):
            self.place = Place(turn, window, index + 1)
        else:
            self.place, self._window = Place(turn, window + len(self._window), 0), None

    def current(self) -> Document:
        if self._document is None:
            part = self._fill_window()
            assert self._window is not None
            if self.place.index >= len(self._window):
                raise no_such_place(f"document {self.place.index} of a window of {len(self._window)}")
            local = int(self._shuffle[self.place.index])
            again = self.place.turn * self._streams + self._stream >= self._source.num_parts
            tokens = self._encoder.encode(self._window[local], again)
            self._document = Document(part, self.place.window + local, tokens)
        return self._document

    def _fill_window(self) -> int:
        """Read the window of `place` if it is not in memory, and return its part. If the part is over, `place` moves to
        the stream's next one."""
        while True:
            position = self.place.turn * self._streams + self._stream
            if self._end is not None and position >= self._end:
                raise Exhausted
            part = int(self._order(np.array([position]))[0])
            if self._window is None:
                if self._records is None:
                    self._records = self._read_part(part, self.place.window)
                self._window = _take_window(self._records)
                if self._window:
                    key = f"{self._order.seed} position {position} window {self.place.window}"
                    self._shuffle = Permutation(len(self._window), key)(np.arange(len(self._window)))
            if self._window:
                return part
            if self.place.index:
                raise no_such_place(f"document {self.place.index} of an empty window")
            self.place, self._records, self._window = Place(self.place.turn + 1), None, None

    def _read_part(self, part: int, start: int) -> Iterator[str | BadRecord]:
        """Its documents from number `start` on; a window begins behind a document that is there."""
        records = self._source.read(part, max(0, start - 1))
        if start and next(records, None) is None:
            raise no_such_place(f"document {start} of {self._source.name}, part {part}, which ends before")
        return records


def _take_window(records: Iterator[str | BadRecord]) -> list[str | BadRecord]:
    window: list[str | BadRecord] = []
    chars = 0
    for record in itertools.islice(records, _WINDOW_DOCUMENTS):
        window.append(record)
        chars += len(record) if isinstance(record, str) else 0
        if chars >= _WINDOW_CHARS:
            break
    return window
