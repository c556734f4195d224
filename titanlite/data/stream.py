"""Reading the sequences of global batches from the sources of a job.

A source is read in V <= 64 virtual streams, where V does not depend on the number of ranks.
Sequence i of a source is sequence i // V of stream i % V. Data-parallel rank r of R reads sequences
r, r + R, r + 2R, ... of a global batch. A rank reads each stream with a single data worker. If
there is only one source and R divides V, each stream is also read by only one rank, so that each
document is tokenized once per epoch.

Document order, for a source of N documents with random access: stream v of V reads the positions v,
v + V, v + 2V, ..., and position p is document p % N in the shuffled order of epoch p // N. For a
sequential source the same holds for its parts (files, row groups). Each part is read from front to
back in windows of documents, and each window is shuffled.

Invariant: Sequence i of a stream is a pure function of (seed, source, stream, packing, seq_len, i),
and `StreamPosition` describes where it begins. Together, the streams of a source read each document
once per epoch. Streams complete an epoch at different steps, because sequences have equal length
and documents do not.

This module does not import torch, so that data workers start quickly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from titanlite.config.run import Run
from titanlite.config.schema import Dataset
from titanlite.data.documents import DocumentTokenizer, open_sources, source_specs
from titanlite.data.mixture import Mixture
from titanlite.data.packing import (
    Document,
    DocumentPosition,
    PackedSequence,
    Segment,
    StreamPosition,
    best_fit,
    concat,
)
from titanlite.data.shuffle import epoch_order, permutation
from titanlite.data.sources.base import RandomAccess, Sequential, Source
from titanlite.data.sources.records import BadRecord, Record, group_records
from titanlite.data.tokenizer import Tokenizer

MAX_STREAMS = 64
"""Maximum number of streams of a source. Changing it would change the data order of every run.

It is a power of two, so that common numbers of ranks divide it. Data-parallel ranks then tokenize
different streams of a single source.
"""

# Indices in the argument `progress` of `SequenceReader`, which holds the source, part and document
# being read.
_SOURCE, _PART, _DOCUMENT = range(3)
# Number of documents (or parts) of a source without max_epochs, counted over all epochs: more than
# any run reads, but few enough for 64-bit arithmetic.
_UNLIMITED = 1 << 48
WINDOW_DOCUMENTS = 1024  # a shuffle window of a sequential source ends at this many documents
WINDOW_CHARACTERS = 1 << 20  # or at this many characters


class OutOfData(Exception):
    """Raised when the last epoch of a source has ended, which ends the run normally."""


class ReaderShard(NamedTuple):
    """Identifies a data worker and its rank, to select the sequences that the worker reads.

    The sequences of each global batch are divided among the data-parallel ranks. Each rank divides
    its sequences among its data workers.
    """

    rank: int = 0
    """Data-parallel rank."""
    num_ranks: int = 1
    """Number of data-parallel ranks."""
    worker: int = 0
    """Index of the data worker in this rank."""
    num_workers: int = 1
    """Number of data workers per rank."""


WHOLE_BATCH = ReaderShard()


class _Unit(NamedTuple):
    """A unit of shuffling: a document or, for a sequential source, a part such as a file.

    A sequential source cannot read documents individually, for example because its files are
    compressed. Its parts are shuffled, and each part is read from front to back.
    """

    index: int
    """Index of the unit in the source."""
    position: int
    """Index in the shuffled order of the source, counted over all epochs."""
    index_in_stream: int
    """Index in the shuffled order of its stream, counted over all epochs."""
    is_repeated: bool
    """Whether the unit was read in an earlier epoch."""


class PackedDataset:
    """The opened sources of a job, and the data position of the next global batch.

    The documents of a source are divided into streams, so that data workers can read in parallel.
    Instances are pickled to send them to data workers.

    Attributes:
        specs: Tables of the job file that describe the sources.
        sources: The opened sources, in the same order.
        mixture: Chooses the source of each sequence of the next global batch.
        positions: For each source and each of its streams, the position before the next global
            batch. The loader updates it, and a new `SequenceReader` starts from it.
    """

    def __init__(
        self,
        run: Run,
        dataset: Dataset,
        documents: DocumentTokenizer,
        seed: int,
        batch_size: int,
    ) -> None:
        """Open the sources of a [dataset] or [validation] section, to read from the beginning.

        Args:
            run: The run, which determines the sequence length.
            dataset: Section that describes the sources.
            documents: Tokenizes records, and selects training or held-out documents.
            seed: Seed of the document order.
            batch_size: Number of sequences per global batch.

        Raises:
            UserError: If a source cannot be opened or has too little text for one sequence.
        """
        self.documents = documents
        self.seed = seed
        self.packing = dataset.packing
        self.seq_len = run.job.training.seq_len
        self.specs = source_specs(dataset)
        self.sources = open_sources(dataset, documents, self.seq_len, run.job)
        self.mixture = Mixture(dataset, batch_size)
        self.positions: list[list[StreamPosition]] = []
        for source, spec in zip(self.sources, self.specs, strict=True):
            num_streams = _choose_num_streams(source, spec.max_epochs, documents.holdout)
            self.positions.append([StreamPosition()] * num_streams)

    def count_streams(self, source: int) -> int:
        """Return the number of streams of the source with index `source`."""
        return len(self.positions[source])


def open_training_data(run: Run, tokenizer: Tokenizer) -> PackedDataset:
    """Open the sources in [dataset] at the beginning of the data order.

    Documents that are held out for validation are excluded.

    Raises:
        UserError: If a source cannot be opened or has too little text for one sequence.
    """
    documents = DocumentTokenizer.for_run(run, tokenizer)
    return PackedDataset(run, run.job.dataset, documents, run.data_seed, run.global_batch_size)


def _choose_num_streams(source: Source, max_epochs: int, holdout: float) -> int:
    """Return the number of streams into which a source is divided for parallel reading.

    A source with `max_epochs` has one stream. Otherwise, the result is a power of two, at most
    `MAX_STREAMS` and at most the number of documents (or parts, for a sequential source). It
    determines the data order, so it must not depend on the number of ranks.
    """
    if max_epochs:
        return 1  # so that all ranks find the end of the source at the same step

    num_units = source.num_units
    if holdout and isinstance(source, RandomAccess):
        # Use fewer streams, so that it is unlikely that all documents of a stream are held out.
        num_units = max(1, num_units // 8)
    largest_power_of_two = 1 << (num_units.bit_length() - 1)
    return min(MAX_STREAMS, largest_power_of_two)


class SequenceReader:
    """Reads, tokenizes and packs the sequences of each global batch for one data worker.

    Without data workers (dataset.num_workers = 0), a reader runs in the training process.

    Args:
        data: The opened sources, and the positions from which to read.
        shard: Data-parallel rank and data worker whose sequences are read. Default: all sequences.
        progress: Three integers that the reader sets to the indices of the source, the part and the
            document being read, so that another process can report where the reader hangs.
    """

    def __init__(
        self,
        data: PackedDataset,
        shard: ReaderShard = WHOLE_BATCH,
        progress: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        self._data = data
        self._shard = shard
        self._progress = [0, 0, 0] if progress is None else progress
        # A copy, because a reader runs ahead of the training step.
        self._mixture = copy.deepcopy(data.mixture)
        # For each (source, stream), the sequences that have not been read yet.
        self._streams: dict[tuple[int, int], Iterator[PackedSequence]] = {}

    def next_batch(self) -> list[PackedSequence]:
        """Read the sequences of the next global batch that belong to this reader.

        The result is in ascending order of the index in the batch.

        Raises:
            OutOfData: If a source with `max_epochs` ends within the batch.
            UserError: If a record cannot be read.
        """
        shard = self._shard
        sequences = []
        for index_in_batch, (source, index_in_source) in enumerate(self._mixture.next_batch()):
            is_for_this_rank = index_in_batch % shard.num_ranks == shard.rank
            # If a source has `max_epochs`, each rank also reads the sequences of the other ranks
            # and drops them, so that all ranks find the end of the source at the same step.
            has_end = self._data.specs[source].max_epochs > 0
            if not is_for_this_rank and not has_end:
                continue
            # On each rank, a single worker reads all sequences of a stream.
            if self._choose_worker(source, index_in_source) != shard.worker:
                continue

            sequence = self.read(source, index_in_source, index_in_batch)
            if is_for_this_rank:
                sequences.append(sequence)
        return sequences

    def _choose_worker(self, source: int, index_in_source: int) -> int:
        """Return the index of the data worker that reads a sequence of a source.

        A rank reads all sequences of a stream with the same worker. For example, with a single
        source, rank 0 of 4 reads the streams 0, 4, 8, ..., which its workers 0 and 1 read in turn.

        Args:
            source: Index of the source.
            index_in_source: Index of the sequence in the source, counted over the whole run.
        """
        stream = index_in_source % self._data.count_streams(source)
        return (source + stream // self._shard.num_ranks) % self._shard.num_workers

    def read(self, source: int, index_in_source: int, index_in_batch: int) -> PackedSequence:
        """Read one sequence of a source.

        For each source, call this method with ascending values of `index_in_source`. You can leave
        out values.

        Args:
            source: Index of the source.
            index_in_source: Index of the sequence in the source, counted over the whole run.
            index_in_batch: Index of the sequence in its global batch, to store in the result.

        Raises:
            OutOfData: If the last epoch of the source has ended.
            UserError: If a record cannot be read.
        """
        self._progress[_SOURCE] = source  # for the error message if the read hangs
        # Streams take turns: with 4 streams, sequence 9 of the source is sequence 2 of stream 1.
        num_streams = self._data.count_streams(source)
        index_in_stream, stream = divmod(index_in_source, num_streams)

        # Read the stream up to this sequence, and drop sequences that the caller left out.
        for sequence in self._get_stream(source, stream):
            if sequence.index_in_stream >= index_in_stream:
                return sequence._replace(index=index_in_batch)

        name = self._data.sources[source].name
        epochs = self._data.specs[source].max_epochs
        raise OutOfData(f"{name} has no more sequences (dataset.max_epochs = {epochs})")

    def _get_stream(self, source: int, stream: int) -> Iterator[PackedSequence]:
        """Return an iterator over the sequences of a stream that have not been read yet."""
        if (source, stream) not in self._streams:
            reader = _StreamReader(self._data, source, stream, self._progress)
            self._streams[source, stream] = reader.read_sequences()
        return self._streams[source, stream]


@dataclass
class _StreamReader:
    """Reads one stream of a source, and packs its documents into sequences.

    With n streams, a stream is every n-th document (or part) in the shuffled order of the source.

    Attributes:
        data: The opened sources, and the positions from which to read.
        source_index: Index of the source.
        stream: Index of the stream among the streams of the source.
        progress: Three integers: the source, part and document being read. The reader updates the
            last two, so that another process can report where it hangs.
        skip_reasons: Reasons why records were skipped since the last sequence.
    """

    data: PackedDataset
    source_index: int
    stream: int
    progress: MutableSequence[int] | memoryview
    skip_reasons: list[str] = field(default_factory=list)

    def read_sequences(self) -> Iterator[PackedSequence]:
        """Yield the sequences of the stream, starting at its position in `PackedDataset`."""
        data = self.data
        pack = best_fit if data.packing == "best_fit" else concat  # see packing.py
        length = data.seq_len + 1  # because labels are shifted by one
        start = data.positions[self.source_index][self.stream]
        for segments, next_position in pack(self._read_documents, length, start):
            skip_reasons = self.skip_reasons  # the packer has read all documents of the sequence
            self.skip_reasons = []
            yield self._make_sequence(segments, next_position, skip_reasons)

    def _make_sequence(
        self, segments: list[Segment], next_position: StreamPosition, skip_reasons: list[str]
    ) -> PackedSequence:
        """Join segments into a training sequence, and pad it with EOS to seq_len + 1 tokens.

        Args:
            segments: Tokens of the sequence, as pieces of documents.
            next_position: Position at which the next sequence of the stream begins.
            skip_reasons: Reasons why records were skipped before or within the sequence.
        """
        eos_id = self.data.documents.tokenizer.eos_id
        padded = np.full(self.data.seq_len + 1, eos_id, dtype=np.int32)
        tokens = np.concatenate([segment.tokens for segment in segments])
        padded[: len(tokens)] = tokens
        return PackedSequence(
            tokens=padded,
            segments=np.array([segment.origin for segment in segments], dtype=np.int64),
            source=self.source_index,
            stream=self.stream,
            next_position=next_position,
            skipped=skip_reasons,
        )

    def _read_documents(self, start: DocumentPosition) -> Iterator[Document]:
        """Yield the tokenized documents of the stream, from position `start` on."""
        source = self.data.sources[self.source_index]
        for unit in self._list_units(start.index_in_stream):
            if isinstance(source, RandomAccess):
                yield self._read_document(source, unit)
            else:
                assert isinstance(source, Sequential)
                # Only the first part may begin in the middle, at `start`.
                part_start = max(start, DocumentPosition(unit.index_in_stream))
                yield from self._read_part(source, unit, part_start)

    def _list_units(self, first: int) -> Iterator[_Unit]:
        """Yield the documents or parts of the stream in shuffled order, from index `first` on."""
        num_units = self.data.sources[self.source_index].num_units
        num_streams = self.data.count_streams(self.source_index)
        max_epochs = self.data.specs[self.source_index].max_epochs
        end = max_epochs * num_units if max_epochs else _UNLIMITED

        # A position is an index in the shuffled order of the source, counted over all epochs. The
        # streams take turns. For example, stream 1 of 4 reads the positions 1, 5, 9, ..., so index
        # 2 of this stream is position 9.
        positions_of_stream = range(self.stream, end, num_streams)
        positions = positions_of_stream[first:]

        unit_indices = _look_up_order(num_units, self.data.seed, positions)
        for position, unit_index in zip(positions, unit_indices, strict=True):
            yield _Unit(
                index=unit_index,
                position=position,
                index_in_stream=position // num_streams,
                is_repeated=position >= num_units,
            )

    def _read_document(self, source: RandomAccess, unit: _Unit) -> Document:
        """Read and tokenize the document `unit` of a source with random access."""
        self._set_progress(part=0, document=unit.index)
        record = source.record(unit.index)
        tokens = self._encode(record, unit)
        position = DocumentPosition(unit.index_in_stream)
        next_position = DocumentPosition(unit.index_in_stream + 1)
        return Document(position, next_position, part=0, index=unit.index, tokens=tokens)

    def _read_part(
        self, source: Sequential, part: _Unit, start: DocumentPosition
    ) -> Iterator[Document]:
        """Yield the tokenized documents of a part of a sequential source, from `start` on.

        The part is read in windows of consecutive documents, which are shuffled in memory.
        """
        report_progress = partial(self._set_progress, part.index)
        records = source.read(part.index, start.window_start, report_progress)
        for window in group_records(records, WINDOW_DOCUMENTS, WINDOW_CHARACTERS):
            window_end = DocumentPosition(part.index_in_stream, start.window_start + len(window))
            yield from self._shuffle_window(window, part, start, window_end)
            start = window_end

    def _shuffle_window(
        self, window: list[Record], part: _Unit, start: DocumentPosition, end: DocumentPosition
    ) -> Iterator[Document]:
        """Tokenize the records of a window, and yield them in shuffled order.

        Args:
            window: Consecutive records of a part.
            part: The part that contains them.
            start: Position of the first document to yield, counted in shuffled order.
            end: Position at which the next window begins.
        """
        # The order depends on the position of the part, so it differs between epochs.
        shuffle_key = f"{self.data.seed} position {part.position} window {start.window_start}"
        order = permutation(len(window), shuffle_key).tolist()

        for i in range(start.index_in_window, len(window)):
            position = start._replace(index_in_window=i)
            is_last = i == len(window) - 1
            next_position = end if is_last else start._replace(index_in_window=i + 1)

            unshuffled_index = order[i]
            tokens = self._encode(window[unshuffled_index], part)
            index_in_part = start.window_start + unshuffled_index
            yield Document(position, next_position, part.index, index_in_part, tokens)

    def _encode(self, record: Record, unit: _Unit) -> np.ndarray:
        """Tokenize a record. Return an empty array if it is skipped or not in the selected split.

        If an unreadable record is skipped, store the reason, but in the first epoch only, so that
        each record is reported once.

        Args:
            record: The record.
            unit: The document itself, or the part that contains it.
        """
        tokens = self.data.documents.encode(record)
        if isinstance(record, BadRecord) and not unit.is_repeated:
            self.skip_reasons.append(str(record))
        return tokens

    def _set_progress(self, part: int, document: int) -> None:
        """Record which document is being read, to report it if the read hangs."""
        self.progress[_PART] = part
        self.progress[_DOCUMENT] = document


def _look_up_order(num_units: int, seed: int, positions: range) -> Iterator[int]:
    """Yield the index of the document or part at each position in the shuffled order of a source.

    The result equals `epoch_order(num_units, seed, positions)`, but is computed lazily in blocks.
    """
    # A block has the positions of about one epoch: at most 256, and at least 8 because each numpy
    # call has a fixed cost.
    positions_per_epoch = num_units // positions.step
    block_size = max(8, min(256, positions_per_epoch))
    for start in range(0, len(positions), block_size):
        block = np.array(positions[start : start + block_size])
        yield from epoch_order(num_units, seed, block).tolist()
