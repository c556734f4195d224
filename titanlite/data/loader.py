"""Global batches for one data-parallel rank, and the one small state that resumes them on any number of ranks.

Invariant: row k of a global batch depends on the seed, the sources, the tokenizer, seq_len, packing and the batches
before it. It never depends on the number of ranks, the local batch size, the workers or restarts.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.batch import IGNORED, GlobalBatch, make_microbatch
from titanlite.data.stream import BatchReader, OutOfData, Place, Row, StreamPosition, report_skipped, training_data
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.data.worker import Worker
from titanlite.runtime.world import gathered

_MOST_REPORTED = 100  # reasons of skipped records that a rank hands over at once: thousands of ranks may do so
_STATE_VERSION = 2


class Loader:
    """Global batches of one source or a mix.

    Args:
        run: says which data, in which order, and how many rows a rank reads. What validation.holdout keeps for
            validation is left out.
        dp_rank: which of the run's data-parallel ranks this one is.
        dp_group: the process group of these ranks; None if this is the only one.
        stopping: whether the run is told to stop; asked several times a second while this waits for data.

    Raises:
        UserError: a source is missing, empty, or smaller than one row.
    """

    def __init__(
        self,
        run: Run,
        tokenizer: Tokenizer,
        dp_rank: int,
        dp_group: dist.ProcessGroup | None,
        device: torch.device,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._job, self._device, self._stopping = run.job, device, stopping
        self._dp_rank, self._dp_size, self._dp_group = dp_rank, run.degrees.data, dp_group
        self.global_batch_size = run.global_batch_size
        """Rows of one optimizer step, over all ranks."""
        self._data = data = training_data(run, tokenizer)
        self.sources = data.sources
        holdout = data.tokenizer.holdout
        self._order = {"seed": data.seed, "seq_len": data.seq_len, "packing": data.packing, "holdout": holdout}
        self._readers: list[BatchReader] | list[Worker] = []
        self._ahead: deque[list[Row] | Exception] = deque()  # read already, not yet asked for
        self._counts = np.zeros(3, dtype=np.int64)  # since the start: labels that are trained on, positions, skipped
        self._skipped: list[str] = []  # reasons that were not reported yet
        self._moved: dict[tuple[int, int], StreamPosition] = {}  # positions that only this rank knows

    @classmethod
    def of_job(cls, job: JobConfig) -> Loader:
        """The training data of a job in one process, on the CPU. Raises UserError as the class does."""
        run = Run(job)
        return cls(run, load_tokenizer(run.tokenizer_path, run.job), 0, None, torch.device("cpu"))

    def __iter__(self) -> Iterator[GlobalBatch]:
        """The global batches from where the loader stands, until the data ends (never, without dataset.max_epochs)."""
        with suppress(OutOfData):
            while True:
                yield self.next_global_batch()

    def start(self) -> None:
        """Start reading ahead in the background. Without this call the first batch starts it."""
        if self._readers:
            return
        if workers := self._job.dataset.num_workers:
            parts = [(self._dp_rank, self._dp_size, number, workers) for number in range(workers)]
            self._readers = [Worker(self._data, part, self._job, self._stopping) for part in parts]
        else:
            self._readers = [BatchReader(self._data, (self._dp_rank, self._dp_size, 0, 1))]

    def next_global_batch(self) -> GlobalBatch:
        """The next optimizer step's rows of this rank, on the device.

        Raises:
            OutOfData: a source with max_epochs has no further batch; all ranks raise it at the same step.
            Interrupted: the run was told to stop.
            UserError: a record cannot be read, or a file has changed.
            WorkerError: a background process died or stands still.
        """
        self.failure()
        read = self._ahead[0]
        if isinstance(read, Exception):
            raise read
        self._ahead.popleft()
        self._data.mixture.next_batch()
        for row in read:
            self._moved[row.source, row.stream] = row.position
            self._skipped += row.skipped
        local, mask = self._job.training.local_batch_size, self._job.dataset.document_mask
        batches = [make_microbatch(read[i : i + local], mask, self._device) for i in range(0, len(read), local)]
        valid = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        self._counts += (valid, len(read) * self._data.seq_len, sum(len(row.skipped) for row in read))
        return GlobalBatch([microbatch for microbatch, _ in batches], valid)

    def failure(self, batches: int = 1) -> Exception | None:
        """Why this rank cannot read one of its next `batches` global batches; waits until they are read. The other
        ranks can then be told in time: they would wait in a collective for a rank that ends alone. The end of the data
        is a failure, too, and so is that the run was told to stop meanwhile; then no further batch is read."""
        self.start()
        while len(self._ahead) < batches and not (self._ahead and isinstance(self._ahead[-1], Exception)):
            try:
                self._ahead.append(sorted(itertools.chain(*(reader.next_batch() for reader in self._readers))))
            except Exception as error:  # raised when its batch is due
                self._ahead.append(error)
        read = itertools.islice(self._ahead, batches)
        return next((batch for batch in read if isinstance(batch, Exception)), None)

    def stats(self) -> dict[str, Any]:
        """What all ranks have read: since they started, the share of the positions that are trained on and the number
        of records skipped; since the run began, the tokens of the rows of each source and how many times it was read.
        Reports the records skipped since the last call. All ranks of dp_group call it together."""
        valid, tokens, skipped = self._meet()
        names = [source.name for source in self.sources]
        names = [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]
        read = zip(self._data.positions, self.sources, strict=True)
        epochs = [sum(at.place.turn for at in positions) / source.num_units for positions, source in read]
        rows = [rows * self._data.seq_len for rows in self._data.mixture.rows]
        return {
            "utilization": valid / max(1, tokens),
            "skipped_records": skipped,
            "source_tokens": dict(zip(names, rows, strict=True)),
            "source_epochs": dict(zip(names, epochs, strict=True)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the next global batch begins: a small JSON value, the same for any number of ranks. All ranks of
        dp_group call it together, because each one knows only the streams that it has read."""
        self._meet()  # what was skipped before a checkpoint is reported before it
        state = {"version": _STATE_VERSION, **self._order, "tokenizer": self._data.tokenizer.tokenizer.fingerprint}
        sources = []
        for source, positions in zip(self.sources, self._data.positions, strict=True):
            streams = [[*position.place, position.offset] for position in positions]
            sources.append({"name": source.name, "fingerprint": source.fingerprint, "streams": streams})
        return state | {"schedule": self._data.mixture.state_dict(), "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved, on any number of ranks.

        Raises:
            UserError: `compare` refuses it, or the tokenizer is another one. (A run has been told so before.)
            CheckpointError: as `compare`.
        """
        place, contents = self.compare(state)
        if not self._data.tokenizer.tokenizer.is_known_as(state["tokenizer"]):
            place.append("the tokenizer is another one")
        if place or (contents and self._job.dataset.on_change == "error"):
            raise UserError(f"cannot go on with the data of the checkpoint: {'; '.join([*place, *contents])}")
        self.close()
        self._moved = {}
        self._data.mixture.load_state_dict(state["schedule"])
        for i, (rows, saved) in enumerate(zip(self._data.mixture.rows, state["sources"], strict=True)):
            same, streams = saved["fingerprint"] == self.sources[i].fingerprint, saved["streams"]
            self._data.positions[i] = [
                # Rows of the stream so far. A place within a document means nothing if the documents are others.
                StreamPosition(-(-(rows - v) // len(streams)), Place(*at[: 3 if same else 1]), at[3] if same else 0)
                for v, at in enumerate(streams)
            ]

    def describe(self) -> str:
        """One line for the log: what is read."""
        return " + ".join(source.describe() for source in self.sources)

    def close(self) -> None:
        """End the background processes, and forget what was read ahead. The next batch starts them again."""
        for reader in self._readers:
            if isinstance(reader, Worker):
                reader.close()
        self._readers = []
        self._ahead.clear()

    def compare(self, state: dict[str, Any]) -> tuple[list[str], list[str]]:
        """What differs between this data and that of the run that saved `state`. It decides whether a run can go on
        with this data; whether it can with the tokenizer, `Tokenizer.is_known_as` says.

        Returns:
            One line for each difference: those that make the saved place meaningless, and those of the contents, which
            dataset.on_change decides about.

        Raises:
            CheckpointError: another version of titanlite wrote it, in a form that this one does not read.
        """
        if (found := state["version"]) != _STATE_VERSION:
            raise CheckpointError(f"the data state has version {found}; this titanlite reads {_STATE_VERSION}")
        names = ("the seed of the data order", "training.seq_len", "dataset.packing", "validation.holdout")
        order = zip(names, self._order.items(), strict=True)
        place = [f"{name} was {state[key]}, it is now {now}" for name, (key, now) in order if state[key] != now]
        contents: list[str] = []
        if (before := len(state["sources"])) != len(self.sources):
            place.append(f"there were {before} sources, there are now {len(self.sources)}")
            return place, []
        for saved, source, positions in zip(state["sources"], self.sources, self._data.positions, strict=True):
            name, before, now = saved["name"], len(saved["streams"]), len(positions)
            if before != now and state["holdout"] == self._order["holdout"]:  # which decides their number, too
                cause = "another dataset.max_epochs, or another number of documents or files"
                place.append(f"the source {name} was read in {before} streams, {source.name} is in {now}: {cause}")
            elif saved["fingerprint"] != source.fingerprint:
                contents.append(f"the source {name} is now {source.name}, with other files, contents or text_column")
        return place, contents

    def _meet(self) -> list[int]:
        """Report what was skipped, learn from the other ranks where their streams stand, and add up the counts."""
        now, self._skipped = self._skipped[:_MOST_REPORTED], self._skipped[_MOST_REPORTED:]
        counts, reasons, moved = zip(*self._gather((self._counts.tolist(), now, self._moved)), strict=True)
        if self._dp_rank == 0:
            report_skipped(list(itertools.chain(*reasons)))
        for (source, stream), position in itertools.chain(*(positions.items() for positions in moved)):
            self._data.positions[source][stream] = max(position, self._data.positions[source][stream])
        self._moved = {}
        return [sum(each) for each in zip(*counts, strict=True)]

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks of dp_group."""
        return [value] if self._dp_group is None else gathered(value, self._dp_group)
