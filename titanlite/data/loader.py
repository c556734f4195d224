"""The training data of one data-parallel rank, which can be resumed on any number of ranks.

Data passes through these layers:

- `Source` yields records.
- `DocumentTokenizer` converts records to tokens.
- A packer (`concat` or `best_fit`) yields sequences.
- `SequenceReader` returns the sequences of one data worker.
- `Worker` runs a `SequenceReader` in another process, ahead of the trainer.
- `Loader` yields this rank's microbatches of each step.

Invariant: Sequence k of a global batch depends only on the seed, the sources, the tokenizer,
seq_len, packing and the batches before it. It never depends on the number of ranks, the local batch
size, the number of workers, or restarts. If training.global_batch_size is not set, the global batch
size is the local batch size times the number of data-parallel ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.job_diff import DataChanges
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.batch import RankBatch, copy_to_device, make_microbatch
from titanlite.data.documents import log_skipped_records
from titanlite.data.packing import PackedSequence, StreamPosition
from titanlite.data.position import (
    compare_position,
    measure_progress,
    restore_position,
    save_position,
    warn_of_repetition,
)
from titanlite.data.stream import OutOfData, ReaderShard, SequenceReader, open_training_data
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.data.worker import Worker
from titanlite.model.microbatch import IGNORE_INDEX
from titanlite.runtime.world import gathered

# Maximum number of skip reasons in one report of a rank, because thousands of ranks can send one.
MAX_REPORTED = 100


class Loader:
    """Yields this rank's data for each optimizer step, and saves and restores the data position.

    Every rank creates a loader. Ranks with the same `data_rank` read the same sequences. The data
    is a single source or a mixture of several. Documents held out for validation
    (`validation.holdout`) are excluded.

    Attributes:
        sources: The opened sources, in the order of the job file.
    """

    def __init__(
        self,
        run: Run,
        tokenizer: Tokenizer,
        data_rank: int,
        data_group: dist.ProcessGroup | None,
        device: torch.device,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open all sources and read a sample of each one, so that mistakes are reported at startup.

        Call `start` to start the data workers.

        Args:
            run: The run whose [dataset] is read.
            tokenizer: Tokenizer of the run.
            data_rank: Index of this data-parallel rank.
            data_group: Process group of the data-parallel ranks. None if there is only one.
            device: Device to which microbatches are copied.
            is_stopping: Function that returns whether the run is about to stop. The loader calls it
                several times per second while it waits for data.

        Raises:
            UserError: If a source is missing, empty, or smaller than one sequence.
        """
        self._job = run.job
        self._device = device
        self._is_stopping = is_stopping
        self._data_rank = data_rank
        self._data_degree = run.degrees.data
        self._data_group = data_group

        self._data = open_training_data(run, tokenizer)
        self.sources = self._data.sources

        self._readers: list[SequenceReader] | list[Worker] = []
        # Batches that were read ahead, and the error that occurred when the next one was read.
        self._prefetched: deque[list[PackedSequence]] = deque()
        self._read_error: Exception | None = None
        # Progress that the next _synchronize() sends to the other ranks.
        self._report = _RankReport()
        # Sources for which the warning about repetition was logged.
        self._repeated_sources: set[int] = set()

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

    def __iter__(self) -> Iterator[RankBatch]:
        """Yield this rank's microbatches of each optimizer step until a source ends.

        Without dataset.max_epochs, sources never end.
        """
        with suppress(OutOfData):
            while True:
                yield self.next_global_batch()

    def start(self) -> None:
        """Start the data workers, which read batches in the background.

        Call this early, so that the first batch is ready when the first step needs it. Otherwise,
        reading the first batch starts the workers. With dataset.num_workers = 0, there are no
        workers and nothing is read ahead.
        """
        if self._readers:
            return  # already started

        num_workers = self._job.dataset.num_workers
        if num_workers == 0:
            # Read all sequences of this rank in this process.
            shard = ReaderShard(self._data_rank, self._data_degree)
            self._readers = [SequenceReader(self._data, shard)]
            return

        # Divide the sequences of this rank among the workers.
        shards = [
            ReaderShard(self._data_rank, self._data_degree, i, num_workers)
            for i in range(num_workers)
        ]
        self._readers = [
            Worker(self._data, shard, self._job, self._is_stopping) for shard in shards
        ]

    def next_global_batch(self) -> RankBatch:
        """Return this rank's microbatches for the next optimizer step, and advance by one step.

        Raises:
            OutOfData: If a source with max_epochs ends before the batch is complete. All ranks
                raise it at the same step.
            Interrupted: If the run is stopped while the loader waits for data.
            UserError: If a record cannot be read, or a file has changed.
            WorkerError: If a data worker crashed or hangs.
        """
        sequences = self._take_sequences()
        batch = self._make_batch(sequences)
        # Advance the data position, which `state_dict` returns. The readers may be ahead of it, and
        # use separate copies of the mixture.
        self._data.mixture.next_batch()
        self._report.add(sequences, batch.num_valid_tokens)
        return batch

    def _take_sequences(self) -> list[PackedSequence]:
        """Take this rank's sequences of the next global batch from the batches read in advance.

        If there are none, read the batch now. If reading fails or has failed, raise the error.
        """
        error = self.prefetch(1)  # does nothing if a batch is in memory
        if error is not None:
            raise error
        return self._prefetched.popleft()

    def _make_batch(self, sequences: list[PackedSequence]) -> RankBatch:
        """Divide this rank's sequences into microbatches on the device, and count valid labels."""
        batch_size = self._job.training.local_batch_size
        microbatches = []
        num_valid_tokens = 0
        for start in range(0, len(sequences), batch_size):
            chunk = sequences[start : start + batch_size]
            microbatch = make_microbatch(chunk, self._job)
            labels = microbatch.labels.numpy()  # still on the CPU
            num_valid_tokens += int((labels != IGNORE_INDEX).sum())
            microbatches.append(copy_to_device(microbatch, self._device))
        return RankBatch(microbatches, num_valid_tokens)

    def prefetch(self, num_batches: int) -> Exception | None:
        """Read the next global batches into memory, and return the first error if this fails.

        Call this before a step and exchange the errors between ranks, because a rank that fails
        alone would leave the others waiting in a collective.

        Args:
            num_batches: Number of batches to have in memory, including batches read earlier.

        Returns:
            The exception that `next_global_batch` will raise instead of returning one of these
            batches, such as `OutOfData` (the data has ended) or `Interrupted` (the run is
            stopping). None if all batches are in memory.
        """
        self.start()
        while len(self._prefetched) < num_batches:
            if self._read_error is not None:
                return self._read_error
            try:
                self._prefetched.append(self._read_batch())
            except Exception as error:
                self._read_error = error  # also for later calls
                return error
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
        counts. The first rank also logs a warning for each source that has been read too often.

        Returns:
            `token_utilization` (the fraction of positions with a valid label) and
            `skipped_records`, both since this process started, and the tokens and epochs read from
            each source since step 1 (`source_tokens` and `source_epochs`).
        """
        reports = self._synchronize()
        num_valid_tokens = sum(report.num_valid_tokens for report in reports)
        num_tokens = sum(report.num_tokens for report in reports)
        if self._data_rank == 0:
            warn_of_repetition(self._data, self._repeated_sources)
        return {
            "token_utilization": num_valid_tokens / max(1, num_tokens),
            "skipped_records": sum(report.num_skipped for report in reports),
            **measure_progress(self._data),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the data position of the next global batch, to save in a checkpoint.

        All ranks of the data-parallel group must call this together, because each rank reads only
        some of the documents and lacks the positions of the others.

        Returns:
            A JSON value of a few kilobytes, which does not depend on the number of ranks.
        """
        self._synchronize()
        return save_position(self._data)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the data position of a checkpoint, so that the next batch continues from there.

        The number of ranks may differ from the run that saved the state. If a source has changed
        and `dataset.on_change` is "warn", reading continues at the beginning of the document or
        part (such as a file) that was being read.

        Args:
            state: A value that `state_dict` returned.

        Raises:
            UserError: If the data, its settings or the tokenizer do not match the state.
            CheckpointError: If the state has a version that this loader cannot read.
        """
        restore_position(state, self._data, self._job.dataset.on_change)
        self.close()  # discard what was read ahead from the old position
        self._report.new_positions = {}

    def describe(self) -> str:
        """Return one line for the log with the name and size of each source."""
        return " + ".join(source.describe() for source in self.sources)

    def close(self) -> None:
        """Stop the data workers, and discard the batches that were read ahead.

        The data position is kept: reading the next batch starts new workers, which continue there.
        """
        for reader in self._readers:
            if isinstance(reader, Worker):
                reader.close()
        self._readers = []
        self._prefetched.clear()
        self._read_error = None

    def compare(self, state: dict[str, Any]) -> DataChanges:
        """List the differences between the data of this loader and the data of a saved state.

        Use this to decide whether the run can resume from the state. The tokenizer is not compared;
        call `Tokenizer.is_known_as` for this.

        Args:
            state: A value that `state_dict` returned.

        Returns:
            Two lists of messages, one line per difference:

            - differences that prevent resuming, such as a different seq_len
            - sources with changed contents, which do not prevent resuming if dataset.on_change is
              "warn"

        Raises:
            CheckpointError: If `state` has a version that this loader cannot read.
        """
        return compare_position(state, self._data)

    def _synchronize(self) -> list[_RankReport]:
        """Exchange progress with the other data-parallel ranks. The first one logs skipped records.

        All ranks of the data-parallel group must call this together. A source is divided into
        streams of documents, and each rank may read only some of them. Afterward, every rank has
        the positions of all streams in `self._data.positions`.

        Returns:
            The report of each data-parallel rank.
        """
        reports = self._gather(self._report.take())
        for rank_report in reports:
            self._merge_positions(rank_report.new_positions)
            if self._data_rank == 0:
                log_skipped_records(rank_report.skip_reasons)
        return reports

    def _gather(self, value: _RankReport) -> list[_RankReport]:
        """Return the `value` of each rank of the data-parallel group, in the order of the ranks."""
        return [value] if self._data_group is None else gathered(value, self._data_group)

    def _merge_positions(self, new_positions: dict[tuple[int, int], StreamPosition]) -> None:
        """Advance streams to their positions in `new_positions`, but never move a stream back.

        Several ranks may have read the same stream. The latest position is the current one.
        """
        for (source, stream), position in new_positions.items():
            positions = self._data.positions[source]
            positions[stream] = max(position, positions[stream])


@dataclass
class _RankReport:
    """Progress of a data-parallel rank, sent to the other ranks.

    Attributes:
        num_valid_tokens: Number of valid labels since the process started.
        num_tokens: Number of labels since the process started, valid or not.
        num_skipped: Number of skipped records since the process started.
        skip_reasons: Reasons for skipped records that have not been logged yet.
        new_positions: Position in each (source, stream) that was read since the last report.
    """

    num_valid_tokens: int = 0
    num_tokens: int = 0
    num_skipped: int = 0
    skip_reasons: list[str] = field(default_factory=list)
    new_positions: dict[tuple[int, int], StreamPosition] = field(default_factory=dict)

    def add(self, sequences: list[PackedSequence], num_valid_tokens: int) -> None:
        """Record sequences that were read, which contain `num_valid_tokens` valid labels."""
        self.num_valid_tokens += num_valid_tokens
        for sequence in sequences:
            self.num_tokens += len(sequence.tokens) - 1  # the first token is not a label
            self.num_skipped += len(sequence.skipped)
            self.skip_reasons += sequence.skipped
            self.new_positions[sequence.source, sequence.stream] = sequence.next_position

    def take(self) -> _RankReport:
        """Return the report to send now, and clear the positions and skip reasons in `self`.

        At most `MAX_REPORTED` skip reasons are sent at once. The others stay for the next call.
        """
        report = replace(self, skip_reasons=self.skip_reasons[:MAX_REPORTED])
        self.skip_reasons = self.skip_reasons[MAX_REPORTED:]
        self.new_positions = {}
        return report
