"""Rows of equal length from the documents of a stream.

Invariant: row i of a stream is a pure function of (the stream, seq_len, i). Four integers say where it begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from titanlite.data.documents import Documents, Exhausted, Place, no_such_place
from titanlite.data.order import Permutation

_WINDOW_ROWS = 64  # best_fit packs the documents of about so many rows at once


class Row(NamedTuple):
    """One sequence of a batch."""

    tokens: np.ndarray
    """(T + 1,) int32. Inputs are the first T, labels the last T. Tokens after the last segment are padding."""
    segments: np.ndarray
    """(S, 4) int64. Each line is a document or a piece of one: part, document number, offset of the first token in the
    document, number of tokens."""


@dataclass(frozen=True)
class Cursor:
    """Where the next row of a stream begins."""

    row: int = 0
    """Number of the row."""
    place: Place = field(default_factory=Place)
    """concat: the document it begins in. best_fit: the first document of its window."""
    offset: int = 0
    """concat: which token of that document. best_fit: which row of the window."""


class Packer(ABC):
    """Rows of one stream.

    Attributes:
        cursor: where the next row begins.
    """

    def __init__(self, documents: Documents, seq_len: int, padding: int, cursor: Cursor) -> None:
        self._documents, self._length, self._padding = documents, seq_len + 1, padding
        self.cursor = cursor

    @abstractmethod
    def next_row(self) -> Row:
        """The row at `cursor`. Moves `cursor` to the next row.

        Raises:
            Exhausted: there is no further row.
        """

    def skip_to(self, row: int) -> None:
        """Go forward to `row`. The documents on the way are tokenized, because their lengths say where rows begin."""
        assert row >= self.cursor.row
        while self.cursor.row < row:
            self.next_row()

    def _row(self, parts: list[np.ndarray], segments: list[tuple[int, int, int, int]]) -> Row:
        missing = self._length - sum(map(len, parts))
        if missing:
            parts = [*parts, np.full(missing, self._padding, dtype=np.int32)]
        return Row(np.concatenate(parts).astype(np.int32, copy=False), np.array(segments, dtype=np.int64))


class ConcatPacker(Packer):
    """Documents are joined, and the result is cut. The last token of a row is also the first token of the next row, so
    that each token of the stream except the very first is predicted exactly once. Only the last row of a source with
    max_epochs is padded."""

    def next_row(self) -> Row:
        documents, offset = self._documents, self.cursor.offset
        documents.seek(self.cursor.place)
        parts: list[np.ndarray] = []
        segments: list[tuple[int, int, int, int]] = []
        need, last = self._length, self.cursor
        try:
            while True:
                document = documents.current()
                if offset and offset >= len(document.tokens):
                    raise no_such_place(f"token {offset} of a document of {len(document.tokens)}")
                part = document.tokens[offset : offset + need]
                if len(part):
                    parts.append(part)
                    segments.append((document.part, document.number, offset, len(part)))
                    need -= len(part)
                    # Read `place` after current(): at the end of a part, current() moves it to the next part.
                    last = Cursor(self.cursor.row + 1, documents.place, offset + len(part) - 1)
                if not need:
                    break
                documents.advance()
                offset = 0
        except Exhausted:
            if need > self._length - 2:  # fewer than two tokens: none to predict
                raise
        self.cursor = last
        return self._row(parts, segments)


class BestFitPacker(Packer):
    """Documents whole in a row where they fit, after "Fewer Truncations Improve Language Modeling" (Ding et al., 2024):
    a longer one is cut into rows of its own and a rest; then the pieces of a window of documents go, the longest
    first, each into the row with the least room that is enough."""

    _window: tuple[Place, Place, list[Row]] | None = None  # its first place, the place after it, its rows

    def next_row(self) -> Row:
        start, index = self.cursor.place, self.cursor.offset
        if self._window is None or self._window[0] != start:
            self._window = self._fill(start)
        _, after, rows = self._window
        if index >= len(rows):
            raise no_such_place(f"row {index} of a window of {len(rows)}")
        row = rows[index]
        number = self.cursor.row + 1
        self.cursor = Cursor(number, start, index + 1) if index + 1 < len(rows) else Cursor(number, after, 0)
        return row

    def _fill(self, start: Place) -> tuple[Place, Place, list[Row]]:
        self._documents.seek(start)
        pieces: list[tuple[np.ndarray, tuple[int, int, int, int]]] = []
        total = 0
        try:
            while total < _WINDOW_ROWS * self._length:
                document = self._documents.current()
                for offset in range(0, max(1, len(document.tokens) - 1), self._length - 1):
                    part = document.tokens[offset : offset + self._length]
                    if len(part):
                        pieces.append((part, (document.part, document.number, offset, len(part))))
                total += len(document.tokens)
                self._documents.advance()
        except Exhausted:
            if not pieces:
                raise
        rows = [self._row([pieces[i][0] for i in bin], [pieces[i][1] for i in bin]) for bin in self._fit(pieces)]
        # _fit returns the fullest rows first. Shuffle them, so that batches are alike.
        order = Permutation(len(rows), f"rows {start} {total}")(np.arange(len(rows)))
        return start, self._documents.place, [rows[i] for i in order]

    def _fit(self, pieces: list[tuple[np.ndarray, tuple[int, int, int, int]]]) -> list[list[int]]:
        bins: list[list[int]] = []
        room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
        for i in sorted(range(len(pieces)), key=lambda i: -len(pieces[i][0])):
            size = len(pieces[i][0])
            at = bisect_left(room, (size, -1))
            if at < len(room):
                left, number = room.pop(at)
            else:
                left, number = self._length, len(bins)
                bins.append([])
            bins[number].append(i)
            if left > size:
                insort(room, (left - size, number))
        return bins
