"""The training data of one data-parallel rank, which can be resumed on any number of ranks.

The classes are nested iterators, from the inside out: a `Source` yields documents,
`DocumentTokenizer` yields tokens, a packer yields sequences, `SequenceReader` selects the sequences
of this rank, a `Worker` reads ahead in another process, and `Loader` yields global batches.

Invariant: Sequence k of a global batch depends only on the seed, the sources, the tokenizer,
seq_len, packing and the batches before it. It never depends on the number of ranks, the local batch
size, the number of workers, or restarts.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.amounts import MAX_EPOCHS
from titanlite.data.batch import GlobalBatch, make_microbatch
from titanlite.data.documents import log_skipped_records
from titanlite.data.packing import DocumentPosition, StreamPosition
from titanlite.data.sources.base import Source
from titanlite.data.stream import (
    OutOfData,
    PackedSequence,
    ReaderShard,
    SequenceReader,
    open_training_data,
)
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.data.worker import Worker
from titanlite.model.microbatch import IGNORE_INDEX
from titanlite.runtime.logging import LOGGER_NAME
from titanlite.runtime.world import gathered

# Skipped records that a rank reports at once. There may be thousands of ranks.
MAX_REPORTED = 100
STATE_VERSION = 2


class Loader:
    """Yields this rank's data for each optimizer step, and saves and restores the data position.

    The trainer creates one loader per data-parallel rank. The data is a single source or a mixture
    of several. Documents that `validation.holdout` keeps for validation are left out.

    Attributes:
        global_batch_size: Number of sequences per optimizer step, summed over all ranks.
        sources: The opened sources, in the order of the job file.
    """

    def __init__(
        self,
        run: Run,
        tokenizer: Tokenizer,
        dp_rank: int,
        dp_group: dist.ProcessGroup | None,
        device: torch.device,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open all sources and read a sample of each one, so that mistakes are reported at startup.

        No data worker starts yet; see `start`.

        Args:
            run: The run whose [dataset] is read.
            tokenizer: Tokenizer of the run.
            dp_rank: Index of this data-parallel rank.
            dp_group: Process group of the data-parallel ranks. None if there is only one.
            device: Device to which microbatches are copied.
            is_stopping: Function that returns whether the run is about to stop. Called several
                times per second while the loader waits for data.

        Raises:
            UserError: If a source is missing, empty, or smaller than one sequence.
        """
        self._job = run.job
        self._device = device
        self._is_stopping = is_stopping
        self._dp_rank = dp_rank
        self._dp_size = run.degrees.data
        self._dp_group = dp_group
        self.global_batch_size = run.global_batch_size

        self._data = open_training_data(run, tokenizer)
        self.sources = self._data.sources
        self._order = {
            "seed": self._data.seed,
            "seq_len": self._data.seq_len,
            "packing": self._data.packing,
            "holdout": self._data.documents.holdout,
        }

        self._readers: list[SequenceReader] | list[Worker] = []
        # Batches that were read ahead, and the error of the batch after them.
        self._prefetched: deque[list[PackedSequence]] = deque()
        self._read_error: Exception | None = None
        # Counts of this rank since the process started: valid labels, labels, skipped records.
        self._counts = np.zeros(3, dtype=np.int64)
        self._unreported_skips: list[str] = []
        # Sources for which the warning about repetition was logged.
        self._repeated_sources: set[int] = set()
        # Positions of (source, stream) that the other ranks receive in the next _synchronize().
        self._new_positions: dict[tuple[int, int], StreamPosition] = {}

    @classmethod
    def from_job(cls, job: JobConfig) -> Loader:
        """Create a loader for a single process, with batches on the CPU.

        Use this to inspect training data from Python.

        Raises:
            UserError: If the tokenizer or a source is missing, or a source has too little text.
        """
        run = Run(job)
        tokenizer = load_tokenizer(run.tokenizer_path, run.job)
        return cls(run, tokenizer, 0, None, torch.device("cpu"))

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Yield global batches until a source ends.

        Without dataset.max_epochs, sources never end.
        """
        with suppress(OutOfData):
            while True:
                yield self.next_global_batch()

    def start(self) -> None:
        """Start the data workers, which read batches in the background.

        Call this early, so that the first batch is ready when the first step needs it. Otherwise
        reading the first batch starts the workers. With dataset.num_workers = 0, there are no
        workers and nothing is read ahead.
        """
        if self._readers:
            return  # already started

        num_workers = self._job.dataset.num_workers
        if num_workers == 0:
            # Read all sequences of this rank in this process.
            shard = ReaderShard(self._dp_rank, self._dp_size)
            self._readers = [SequenceReader(self._data, shard)]
            return

        # Divide the sequences of this rank over the workers.
        workers = []
        for i in range(num_workers):
            shard = ReaderShard(self._dp_rank, self._dp_size, i, num_workers)
            workers.append(Worker(self._data, shard, self._job, self._is_stopping))
        self._readers = workers

    def next_global_batch(self) -> GlobalBatch:
        """Return this rank's microbatches for the next optimizer step, and advance by one step.

        Raises:
            OutOfData: If a source with max_epochs ends before the batch is complete. All ranks
                raise it at the same step.
            Interrupted: If the run is stopped while the loader waits for data.
            UserError: If a record cannot be read, or a file has changed.
            WorkerError: If a data worker crashed or hangs.
        """
        error = self.prefetch(1)
        if error is not None:
            raise error
        sequences = self._prefetched.popleft()
        batch = self._make_batch(sequences)

        # Advance the data position, which `state_dict` returns.
        self._data.mixture.next_batch()
        num_skipped = 0
        for sequence in sequences:
            self._new_positions[sequence.source, sequence.stream] = sequence.position
            self._unreported_skips += sequence.skipped
            num_skipped += len(sequence.skipped)

        # Add to the counts since the process started, for `stats`.
        num_tokens = len(sequences) * self._data.seq_len
        self._counts += (batch.num_valid_tokens, num_tokens, num_skipped)
        return batch

    def _make_batch(self, sequences: list[PackedSequence]) -> GlobalBatch:
        """Divide sequences into microbatches on the device."""
        batch_size = self._job.training.local_batch_size
        microbatches = []
        num_valid_tokens = 0
        for start in range(0, len(sequences), batch_size):
            chunk = sequences[start : start + batch_size]
            microbatch, labels = make_microbatch(chunk, self._job, self._device)
            microbatches.append(microbatch)
            num_valid_tokens += int((labels != IGNORE_INDEX).sum())
        return GlobalBatch(microbatches, num_valid_tokens)

    def prefetch(self, num_batches: int) -> Exception | None:
        """Read the next global batches into memory, and return the first error if this fails.

        Call this before a step and exchange the errors between ranks, because a rank that fails
        alone would leave the others waiting in a collective.

        Args:
            num_batches: Number of batches to have in memory, including those read before.

        Returns:
            The exception that `next_global_batch` will raise for one of the batches, or None. The
            end of the data (`OutOfData`) and a stop of the run (`Interrupted`) also count as
            errors.
        """
        self.start()
        while len(self._prefetched) < num_batches:
            if self._read_error is not None:
                return self._read_error
            try:
                self._prefetched.append(self._read_batch())
            except Exception as error:
                self._read_error = error
        return None

    def _read_batch(self) -> list[PackedSequence]:
        """Return this rank's sequences of one global batch, in ascending order of their index."""
        sequences = []
        for reader in self._readers:
            sequences += reader.next_batch()
        return sorted(sequences, key=lambda sequence: sequence.index)

    def stats(self) -> dict[str, Any]:
        """Return statistics of the data that all ranks have read, for the metrics.

        All ranks of the data-parallel group must call this together, because they exchange their
        counts. The first rank also warns of sources that have been read too often.

        Returns:
            The fraction of positions with a valid label and the number of skipped records since
            this process started, and the number of tokens and epochs of each source since step 1.
        """
        num_valid, num_tokens, num_skipped = self._synchronize()
        epochs = self._count_epochs()
        if self._dp_rank == 0:
            self._warn_of_repetition(epochs)

        tokens = [count * self._data.seq_len for count in self._data.mixture.counts]
        names = self._unique_names()
        return {
            "token_utilization": num_valid / max(1, num_tokens),
            "skipped_records": num_skipped,
            "source_tokens": dict(zip(names, tokens, strict=True)),
            "source_epochs": dict(zip(names, epochs, strict=True)),
        }

    def _count_epochs(self) -> list[float]:
        """Return how often each source has been read since step 1.

        For sequential sources, count the parts (such as files) that have been read.
        """
        epochs = []
        for source, positions in zip(self.sources, self._data.positions, strict=True):
            # Each stream reads some of the documents, and `turn` counts them over all epochs.
            num_read = sum(position.document.turn for position in positions)
            epochs.append(num_read / source.num_units)
        return epochs

    def _unique_names(self) -> list[str]:
        """Return the names of the sources. Duplicate names get an index, such as "c4 (1)"."""
        names = [source.name for source in self.sources]
        return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]

    def _warn_of_repetition(self, epochs: Sequence[float]) -> None:
        """Warn once of each source that has been read `MAX_EPOCHS` times.

        There is no warning for sources with `max_epochs`, because their repetition is intended.

        Args:
            epochs: Number of epochs read so far, one value per source.
        """
        for i, (source, spec) in enumerate(zip(self.sources, self._data.specs, strict=True)):
            if epochs[i] >= MAX_EPOCHS and not spec.max_epochs and i not in self._repeated_sources:
                self._repeated_sources.add(i)
                logging.getLogger(LOGGER_NAME).warning(
                    f"{source.name} has been read {epochs[i]:.1f} times; more teaches little. "
                    "Add data, or set dataset.max_epochs to end a run after so many epochs."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the data position of the next global batch, to save in a checkpoint.

        All ranks of the data-parallel group must call this together, because each rank only knows
        the positions of the streams that it has read.

        Returns:
            A JSON value of a few kilobytes, which does not depend on the number of ranks.
        """
        self._synchronize()
        sources = []
        for source, positions in zip(self.sources, self._data.positions, strict=True):
            # [turn, window, index, offset] of each stream; see `StreamPosition`
            streams = [[*position.document, position.offset] for position in positions]
            sources.append(
                {"name": source.name, "fingerprint": source.fingerprint, "streams": streams}
            )
        return {
            "version": STATE_VERSION,
            **self._order,
            "tokenizer": self._data.documents.tokenizer.fingerprint,
            "schedule": self._data.mixture.state_dict(),
            "sources": sources,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the data position of a checkpoint, so that the next batch continues from there.

        The number of ranks may differ from the run that saved the state. If the contents of a
        source have changed and `dataset.on_change` is "warn", the source continues at the beginning
        of the document or part that was being read.

        Args:
            state: A value that `state_dict` returned.

        Raises:
            UserError: If the data, its settings or the tokenizer do not match the state.
            CheckpointError: If the state has a version that this loader cannot read.
        """
        self._reject_other_data(state)

        # Discard what was read ahead from the old position.
        self.close()
        self._new_positions = {}

        self._data.mixture.load_state_dict(state["schedule"])
        counts = self._data.mixture.counts  # sequences read from each source
        positions = []
        for source, saved, count in zip(self.sources, state["sources"], counts, strict=True):
            positions.append(_restore_positions(source, saved, count))
        self._data.positions = positions

    def _reject_other_data(self, state: dict[str, Any]) -> None:
        """Check that a saved data position belongs to the data of this loader.

        Raises:
            UserError: If the data, its settings or the tokenizer differ. Changed contents of a
                source are allowed if dataset.on_change is "warn".
        """
        incompatible, changed = self.compare(state)
        if not self._data.documents.tokenizer.is_known_as(state["tokenizer"]):
            incompatible.append("the tokenizer has changed")
        rejects_changes = self._job.dataset.on_change == "error"
        if incompatible or (changed and rejects_changes):
            differences = "; ".join([*incompatible, *changed])
            raise UserError(f"Cannot resume from the checkpoint's data position: {differences}")

    def describe(self) -> str:
        """Describe the name and the size of each source in one line, for the log."""
        return " + ".join(source.describe() for source in self.sources)

    def close(self) -> None:
        """Stop the data workers, and discard the batches that were read ahead.

        The data position is kept. Reading another batch starts new workers at this position.
        """
        for reader in self._readers:
            if isinstance(reader, Worker):
                reader.close()
        self._readers = []
        self._prefetched.clear()
        self._read_error = None

    def compare(self, state: dict[str, Any]) -> tuple[list[str], list[str]]:
        """List the differences between the data of this loader and the data of a saved state.

        `load_state_dict` uses the result to decide whether the run can resume. The tokenizer is not
        compared; see `Tokenizer.is_known_as`.

        Args:
            state: A value that `state_dict` returned.

        Returns:
            Two lists of messages, one line per difference:

            - differences with which the saved data position has no meaning, such as another seq_len
            - sources with changed contents, which are allowed if dataset.on_change is "warn"

        Raises:
            CheckpointError: If `state` has a version that this loader cannot read.
        """
        version = state["version"]
        if version != STATE_VERSION:
            raise CheckpointError(
                f"The data state has version {version}; this version of titanlite reads version "
                f"{STATE_VERSION}."
            )

        incompatible = self._compare_settings(state)
        num_before = len(state["sources"])
        if num_before != len(self.sources):
            incompatible.append(f"there were {num_before} sources and are now {len(self.sources)}")
            return incompatible, []

        changed = []
        saved_sources = zip(state["sources"], self.sources, self._data.positions, strict=True)
        for saved, source, positions in saved_sources:
            name = saved["name"]
            num_streams_before = len(saved["streams"])
            # The holdout affects the number of streams, and its change is already reported.
            same_holdout = state["holdout"] == self._order["holdout"]
            if num_streams_before != len(positions) and same_holdout:
                incompatible.append(
                    f"the source {name} was read in {num_streams_before} streams and {source.name} "
                    f"is read in {len(positions)}, because dataset.max_epochs or the number of "
                    "documents or files has changed"
                )
            elif saved["fingerprint"] != source.fingerprint:
                changed.append(
                    f"the source {name} is now {source.name}, with changed files, contents, "
                    "text_column or loss_mask_column"
                )
        return incompatible, changed

    def _compare_settings(self, state: dict[str, Any]) -> list[str]:
        """List the settings that determine the data order and differ from a saved state."""
        names = {
            "seed": "the seed of the data order",
            "seq_len": "training.seq_len",
            "packing": "dataset.packing",
            "holdout": "validation.holdout",
        }
        differences = []
        for key, name in names.items():
            if state[key] != self._order[key]:
                differences.append(f"{name} was {state[key]} and is now {self._order[key]}")
        return differences

    def _synchronize(self) -> list[int]:
        """Exchange stream positions, token counts and skipped records between all ranks.

        Afterwards every rank knows the position of every stream. The first rank logs the skipped
        records.

        Returns:
            The number of valid labels, of all labels, and of skipped records over all ranks, since
            the process started.
        """
        # The next call reports more skipped records if there are too many.
        reported_skips = self._unreported_skips[:MAX_REPORTED]
        self._unreported_skips = self._unreported_skips[MAX_REPORTED:]
        reports = self._gather((self._counts, reported_skips, self._new_positions))
        self._new_positions = {}

        totals = np.zeros_like(self._counts)
        for counts, skips, positions in reports:
            totals += counts
            self._update_positions(positions)
            if self._dp_rank == 0:
                log_skipped_records(skips)
        return totals.tolist()

    def _update_positions(self, positions: dict[tuple[int, int], StreamPosition]) -> None:
        """Store the positions of (source, stream) that a rank has reported."""
        for (source, stream), position in positions.items():
            # Several ranks may have read the stream. The largest position is the newest.
            known_positions = self._data.positions[source]
            known_positions[stream] = max(position, known_positions[stream])

    def _gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank of the data-parallel group, in the order of the ranks."""
        return [value] if self._dp_group is None else gathered(value, self._dp_group)


def _restore_positions(
    source: Source, saved: dict[str, Any], num_sequences: int
) -> list[StreamPosition]:
    """Return the position of each stream of a source, as stored in a checkpoint.

    Args:
        source: The source, whose contents may have changed since the checkpoint was saved.
        saved: Entry of the source in the saved data position.
        num_sequences: Number of sequences of the source that the run had read at the checkpoint.
    """
    has_changed = saved["fingerprint"] != source.fingerprint
    num_streams = len(saved["streams"])
    positions = []
    for stream, (turn, window, index, offset) in enumerate(saved["streams"]):
        document = DocumentPosition(turn, window, index)
        if has_changed:
            # Continue at the beginning of the document or part that was being read.
            document = DocumentPosition(turn)
            offset = 0

        # Streams take turns: of 10 sequences, 4 streams have yielded 3, 3, 2 and 2.
        num_read = math.ceil((num_sequences - stream) / num_streams)
        positions.append(StreamPosition(num_read, document, offset))
    return positions
