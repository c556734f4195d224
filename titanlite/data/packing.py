"""Packing: documents become sequences of equal length.

A packer is a generator over one stream of documents. (A source is divided into streams; see
`titanlite.data.stream`.) It yields each sequence together with the data position at which the next
sequence begins. A new packer that starts from this position yields exactly the following sequences,
which makes runs resumable.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from titanlite.data.shuffle import permutation

BEST_FIT_WINDOW = 64  # a window contains the tokens of about this many sequences


class DocumentPosition(NamedTuple):
    """Position of a document in a stream of documents, from which reading can be resumed.

    Sequential sources, such as compressed files, are read in parts (files or row groups). Each part
    is read in windows of consecutive documents, which are shuffled in memory.
    """

    index_in_stream: int = 0
    """Index of the document in the stream, counted over all epochs. For sequential sources, index
    of the part that contains it."""
    window_start: int = 0
    """For sequential sources, index of the first document of the window, within its part."""
    index_in_window: int = 0
    """For sequential sources, index of the document in the shuffled window."""


class StreamPosition(NamedTuple):
    """Position in a stream of documents at which a training sequence begins.

    Later positions compare greater. The meaning of `document` and `offset` depends on
    dataset.packing, which is "concat" or "best_fit".
    """

    num_sequences: int = 0
    """Number of sequences of the stream before this position."""
    document: DocumentPosition = DocumentPosition()
    """With "concat", the document in which the sequence begins. With "best_fit", the first document
    of the window of documents that are packed together."""
    offset: int = 0
    """With "concat", index in `document` of the first token of the sequence. With "best_fit", index
    of the sequence in the window."""


class Segment(NamedTuple):
    """Consecutive tokens of one document that were placed into one training sequence."""

    tokens: np.ndarray
    """(n,) int32. A token t that does not count in the loss is stored as ~t."""
    origin: tuple[int, int, int, int]
    """Where the tokens come from: index of the part (0 without parts), index of the document in the
    source or part, offset of the first token in the document, and number of tokens."""


class Document(NamedTuple):
    """A tokenized document, with its position in the stream and the position after it."""

    position: DocumentPosition
    next_position: DocumentPosition
    part: int
    """Index of the part in a sequential source. 0 for other sources."""
    index: int
    """Index of the document in the source. For sequential sources, index in the part."""
    tokens: np.ndarray
    """(n,) int32, with BOS and EOS. A token t that does not count in the loss is stored as ~t.
    Empty if the document is skipped or held out."""

    def segment(self, offset: int, size: int) -> Segment:
        """Return the segment of `size` tokens that begins at token `offset` of this document."""
        tokens = self.tokens[offset : offset + size]
        return Segment(tokens, (self.part, self.index, offset, size))


class PackedSequence(NamedTuple):
    """A training sequence, and the position from which a reader continues after it."""

    tokens: np.ndarray
    """(T + 1,) int32. The first T are inputs, the last T are labels. A token t that does not count
    in the loss is stored as ~t. Padding follows the segments."""
    segments: np.ndarray
    """(S, 4) int64, one row per segment of a document: part, index of the document, offset of the
    first token in the document, number of tokens."""
    source: int
    """Index of the source."""
    stream: int
    """Index of the stream among the streams of the source."""
    next_position: StreamPosition
    """Position at which the next sequence of the stream begins."""
    skipped: list[str]
    """Reasons why records were skipped before or within this sequence, in the first epoch only."""
    index: int = 0
    """Index in the global batch."""

    @property
    def index_in_stream(self) -> int:
        """Index of this sequence among the sequences of its stream."""
        return self.next_position.num_sequences - 1

    @property
    def segment_sizes(self) -> np.ndarray:
        """Number of tokens of each segment, shape (S,)."""
        return self.segments[:, 3]


def mark_ignored(ids: np.ndarray) -> np.ndarray:
    """Mark tokens that do not count in the loss, by replacing each id t with ~t = -t - 1."""
    return ~ids


def is_marked(tokens: np.ndarray) -> np.ndarray:
    """Return whether each token was marked by `mark_ignored`, which makes it negative."""
    return tokens < 0


def remove_marks(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Undo `mark_ignored`: return the token ids, and whether each token was marked.

    For example, [7, ~8] gives the ids [7, 8] and the booleans [False, True].
    """
    return np.maximum(tokens, ~tokens), is_marked(tokens)


PackedSegments = Iterator[tuple[list[Segment], StreamPosition]]
"""Segments of each sequence, and the position at which the next sequence begins."""

ReadDocuments = Callable[[DocumentPosition], Iterator[Document]]
"""Function that reads the documents of a stream from a position."""


def concat(read_documents: ReadDocuments, length: int, start: StreamPosition) -> PackedSegments:
    """Concatenate documents, and divide the result into sequences of `length` tokens.

    The last token of a sequence is also the first token of the next one, so every token except the
    first is a label exactly once. For example, the documents "abc" and "defg" become "abcd" and
    "defg" with a length of 4. Only the last sequence of a source with `max_epochs` can be shorter.

    Args:
        read_documents: Reads the documents of the stream from a position.
        length: Number of tokens per sequence: training.seq_len + 1, because labels are shifted by
            one.
        start: Position of the first sequence to yield.

    Yields:
        The segments of a sequence, and the position at which the next sequence begins.
    """
    # In the example above:
    #
    #   document  offset  segment  last_token
    #   abc       0       abc      2           the sequence lacks 1 token
    #   defg      0       d        0           yields abc + d; the next one begins with d
    #   defg      0       defg     3           yields defg; the next one begins with g
    #   defg      3       g        3           the document ends
    num_sequences, position, offset = start
    segments: list[Segment] = []
    num_missing = length  # tokens that the current sequence still lacks
    last_token = offset  # index in its document of the last token of the sequence

    for document in read_documents(position):
        size = len(document.tokens)
        while offset < size:
            # Append as much of the document as the sequence lacks.
            count = min(num_missing, size - offset)
            segments.append(document.segment(offset, count))
            position = document.position
            last_token = offset + count - 1
            num_missing -= count
            if num_missing > 0:
                break  # the document ends before the sequence is complete

            # The sequence is complete. The next one begins with its last token.
            num_sequences += 1
            yield segments, StreamPosition(num_sequences, position, last_token)
            segments = []
            num_missing = length
            offset = last_token
        offset = 0  # read the next document from its first token

    # The source has ended. A single token has no successor to predict.
    has_label = length - num_missing >= 2
    if has_label:
        yield segments, StreamPosition(num_sequences + 1, position, last_token)


def best_fit(read_documents: ReadDocuments, length: int, start: StreamPosition) -> PackedSegments:
    """Pack documents into sequences, and cut only documents that are longer than a sequence.

    Documents are packed in windows of about 64 sequences each. Packing changes the order of the
    documents in a window. The yielded sequences can be shorter than `length`.

    Args:
        read_documents: Reads the documents of the stream from a position.
        length: Maximum number of tokens per sequence: training.seq_len + 1, because labels are
            shifted by one.
        start: Position of the first sequence to yield. Its `document` is the first document of a
            window, and its `offset` is the index of the sequence in the window.

    Yields:
        The segments of a sequence, and the position at which the next sequence begins.
    """
    num_sequences = start.num_sequences
    first_index = start.offset  # the sequences before it were yielded by an earlier packer
    window_tokens = BEST_FIT_WINDOW * length

    for window in _read_windows(read_documents, start.document, window_tokens):
        sequences = _pack_window(window, length)
        for index in range(first_index, len(sequences)):
            num_sequences += 1
            next_index = index + 1
            if next_index < len(sequences):
                next_position = StreamPosition(num_sequences, window.start, offset=next_index)
            else:  # the next sequence is the first one of the next window
                next_position = StreamPosition(num_sequences, window.end, offset=0)
            yield sequences[index], next_position
        first_index = 0  # only the first window can begin in the middle


class _Window(NamedTuple):
    """Consecutive documents of a stream that are packed together."""

    start: DocumentPosition
    """Position at which the window begins."""
    documents: list[Document]

    @property
    def end(self) -> DocumentPosition:
        """Position at which the next window begins."""
        return self.documents[-1].next_position


def _pack_window(window: _Window, length: int) -> list[list[Segment]]:
    """Pack the documents of a window into sequences of at most `length` tokens, and shuffle them.

    Without shuffling, the fullest sequences would come first, and the number of tokens per batch
    would vary.
    """
    segments: list[Segment] = []
    for document in window.documents:
        segments += _cut(document, length)
    sequences = _place_segments(segments, length)
    order = permutation(len(sequences), _make_shuffle_key(window))
    return [sequences[i] for i in order]


def _make_shuffle_key(window: _Window) -> str:
    """Return the seed that determines the order of the sequences of a window.

    The key contains legacy field names, such as "turn" for `index_in_stream`. Do not change them,
    because resumed runs must keep their data order.
    """
    start = window.start
    num_tokens = sum(len(document.tokens) for document in window.documents)
    return (
        f"rows Place(turn={start.index_in_stream}, window={start.window_start}, "
        f"index={start.index_in_window}) {num_tokens}"
    )


def _read_windows(
    read_documents: ReadDocuments, start: DocumentPosition, num_tokens: int
) -> Iterator[_Window]:
    """Divide a stream, from position `start` on, into windows of at least `num_tokens` tokens.

    If the source ends, the last window can be smaller.
    """
    window = _Window(start, [])
    num_read = 0
    for document in read_documents(start):
        window.documents.append(document)
        num_read += len(document.tokens)
        if num_read >= num_tokens:
            yield window
            window = _Window(window.end, [])
            num_read = 0
    if window.documents:
        yield window


def _cut(document: Document, length: int) -> list[Segment]:
    """Cut a document into segments of at most `length` tokens.

    Consecutive segments overlap by one token, because the last token of a segment is only a label.
    For example, "abcde" becomes "abc" and "cde" if `length` is 3.
    """
    size = len(document.tokens)
    if size == 0:
        return []
    starts = range(0, max(1, size - 1), length - 1)
    return [document.segment(start, min(length, size - start)) for start in starts]


def _place_segments(segments: list[Segment], length: int) -> list[list[Segment]]:
    """Distribute segments over sequences of at most `length` tokens by best-fit-decreasing.

    Start with the longest segment, and put each one into the fullest sequence that has space for
    it. For example, segments of 2, 5, 3 and 6 tokens become sequences of 6 + 2 and 5 + 3 tokens if
    `length` is 8. See "Fewer Truncations Improve Language Modeling" (Ding et al., 2024).
    """
    sequences: list[list[Segment]] = []
    # Number of free tokens and index of each sequence that is not full, sorted.
    free_space: list[tuple[int, int]] = []
    longest_first = sorted(segments, key=lambda segment: len(segment.tokens), reverse=True)

    for segment in longest_first:
        size = len(segment.tokens)

        # Choose the fullest sequence that has enough space, or begin a new one.
        fullest = bisect_left(free_space, size, key=itemgetter(0))
        if fullest < len(free_space):
            num_free, index = free_space.pop(fullest)
        else:
            num_free = length
            index = len(sequences)
            sequences.append([])

        # Add the segment, and record the space that remains.
        sequences[index].append(segment)
        num_remaining = num_free - size
        if num_remaining > 0:
            insort(free_space, (num_remaining, index))
    return sequences
