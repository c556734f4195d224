"""Virtual streams: the documents of a source in training order, joined and cut into rows of equal length.

Invariant: row i of stream v is a pure function of (seed, source, tokenizer, seq_len, v, i), and two integers say where
it begins. May import titanlite.config and the other modules of data below it: tokenizer, sources, order.

Global document position p = 0, 1, ... means document `permutation of epoch p // N (p % N)` of a source of N documents.
Stream v of V reads the positions v, v + V, v + 2V, ...: together they read each document once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from titanlite.data.order import Permutation
from titanlite.data.sources import Source
from titanlite.data.tokenizer import Tokenizer

NUM_STREAMS = 64
"""V. Part of the data order: changing it changes every run. A power of two, so that usual numbers of data-parallel
ranks divide it and each rank then tokenizes only its own streams."""

_ORDER_BLOCK = 32  # turns permuted at once, as numpy's cost is a call, not an element
_SMALL_SOURCE = 1 << 14  # up to so many documents, the orders of the latest epochs are kept


@dataclass(frozen=True)
class Cursor:
    """Where the next row of a stream begins."""

    row: int = 0
    """Number of the row."""
    turn: int = 0
    """The document is the turn-th one of the stream, that is global position v + turn * V."""
    offset: int = 0
    """Token of the document, bos and eos counted."""


class Documents:
    """Token ids of the documents of one source, by stream and turn."""

    def __init__(self, source: Source, tokenizer: Tokenizer, seed: int) -> None:
        self._source, self._tokenizer, self._seed = source, tokenizer, seed
        self._begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        self._whole_epoch = lru_cache(maxsize=32)(lambda epoch: self._permutation(epoch)(np.arange(len(source))))

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(len(self._source), f"{self._seed} epoch {epoch}")

    def order(self, positions: np.ndarray) -> np.ndarray:
        """Document numbers at global positions: another permutation each epoch."""
        n = len(self._source)
        epochs, places = np.divmod(positions, n)
        result = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            small = n <= _SMALL_SOURCE
            result[here] = self._whole_epoch(epoch)[places[here]] if small else self._permutation(epoch)(places[here])
        return result

    def tokens(self, document: int) -> np.ndarray:
        """bos, the text, eos: int32 ids."""
        text = self._tokenizer.encode(self._source[document])
        return np.array([*self._begin, *text, self._tokenizer.eos_id], dtype=np.int32)


class Stream:
    """One virtual stream: rows of seq_len + 1 tokens whose last token is the first of the next row, so that each
    token but the very first is predicted exactly once."""

    def __init__(self, documents: Documents, number: int, seq_len: int, cursor: Cursor) -> None:
        self._documents, self._number, self._seq_len = documents, number, seq_len
        self.cursor = cursor
        self._turn, self._tokens = -1, np.empty(0, dtype=np.int32)  # the document that was read last
        self._block, self._order = -1, np.empty(0, dtype=np.int64)

    def next_row(self) -> np.ndarray:
        """The row at `cursor`, int32 of shape (seq_len + 1,); `cursor` goes on to the next row."""
        turn, offset = self.cursor.turn, self.cursor.offset
        parts: list[np.ndarray] = []
        need = self._seq_len + 1
        while True:
            part = self._read(turn)[offset : offset + need]
            parts.append(part)
            need -= len(part)
            if need == 0:
                break
            turn, offset = turn + 1, 0
        self.cursor = Cursor(self.cursor.row + 1, turn, offset + len(parts[-1]) - 1)
        return np.concatenate(parts)

    def skip_to(self, row: int) -> None:
        """Go forward to `row`. Tokenizes what lies between, as only its length says where a row begins."""
        assert row >= self.cursor.row
        while self.cursor.row < row:
            self.next_row()

    def _read(self, turn: int) -> np.ndarray:
        if turn != self._turn:
            block, place = divmod(turn, _ORDER_BLOCK)
            if block != self._block:
                turns = np.arange(block * _ORDER_BLOCK, (block + 1) * _ORDER_BLOCK)
                self._block, self._order = block, self._documents.order(turns * NUM_STREAMS + self._number)
            self._turn, self._tokens = turn, self._documents.tokens(int(self._order[place]))
        return self._tokens
