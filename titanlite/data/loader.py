"""Global batches for one data-parallel rank, and the one small state that resumes them on any number of ranks.

Invariant: row k of a global batch depends on the seed, the sources, the tokenizer, seq_len, packing and the batches
before it. It never depends on the number of ranks, the local batch size, the workers or restarts.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.batch import IGNORED, GlobalBatch, Microbatch, make_microbatch
from titanlite.data.show import lost_characters, source_table
from titanlite.data.sources.base import RandomAccess, Source
from titanlite.data.stream import (
    MAX_COUNT,
    BatchReader,
    DocumentTokenizer,
    OutOfData,
    PackedDataset,
    Part,
    Place,
    ReadRow,
    StreamPosition,
    report_skipped,
)
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.data.worker import WorkerPool

__all__ = ["GlobalBatch", "Loader", "Microbatch", "OutOfData"]

_STATE_VERSION = 2
_MOST_ROWS = 1 << 24  # of a step; the largest batches have thousands of rows
_MOST_REPORTED = 100  # reasons of skipped records that a rank hands over at once: thousands of ranks may do so

Gather = Callable[[Any], list[Any]]


def _never() -> bool:
    return False


class Loader:
    """Global batches of one source or a mix.

    Args:
        run: says which data, in which order, and how many rows a rank reads. What validation.holdout keeps for
            validation is left out.
        dp_rank: which of the run's data-parallel ranks this one is.
        dp_group: the process group of these ranks; None if this is the only one.
        gather: in place of an all-gather over dp_group, for tests.

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
        *,
        gather: Gather | None = None,
    ) -> None:
        training, comm = run.job.training, run.job.comm
        self.global_batch_size = run.global_batch_size
        """Rows of one optimizer step, over all ranks."""
        self._dataset, self._local_batch_size, self._device = run.job.dataset, training.local_batch_size, device
        self._part, self._gather = Part(dp_rank, run.degrees.data), gather or _gather_over(dp_group)
        # The other ranks wait for this one in a collective. They are told before that one's limit.
        self._patience = comm.init_timeout_seconds / 2, comm.train_timeout_seconds / 2
        skip_bad = self._dataset.on_bad_record == "skip"
        documents = DocumentTokenizer(tokenizer, run.job.validation.holdout, skip_bad=skip_bad)
        self._data = PackedDataset(self._dataset, documents, run.data_seed, training.seq_len, self.global_batch_size)
        self.sources = self._data.sources
        self._reader: BatchReader | WorkerPool | None = None
        self._ahead: deque[list[ReadRow] | Exception] = deque()  # read already, not yet asked for
        self._valid_tokens = self._tokens = self._num_skipped = 0
        self._skipped: list[str] = []  # reasons that were not reported yet

    @classmethod
    def of_job(cls, job: JobConfig) -> Loader:
        """The training data of a job in one process, on the CPU. Raises UserError as the class does."""
        run = Run(job)
        return cls(run, load_tokenizer(run.tokenizer_path), 0, None, torch.device("cpu"))

    def __iter__(self) -> Iterator[GlobalBatch]:
        """The global batches from where the loader stands, until the data ends (never, without dataset.max_epochs)."""
        with suppress(OutOfData):
            while True:
                yield self.next_global_batch()

    def start(self) -> None:
        """Start reading ahead in the background. Without this call the first batch starts it."""
        if self._reader is not None:
            return
        if workers := self._dataset.num_workers:
            self._reader = WorkerPool(self._data, self._part, workers, self._dataset.prefetch, self._patience)
        else:
            self._reader = BatchReader(self._data, self._part)

    def next_global_batch(self) -> GlobalBatch:
        """The next optimizer step's rows of this rank, on the device.

        Raises:
            OutOfData: a source with max_epochs has no further batch; all ranks raise it at the same step.
            UserError: a record cannot be read, or a file has changed.
            WorkerError: a background process died or stands still.
        """
        self._read_ahead(1)
        read = self._ahead[0]
        if isinstance(read, Exception):
            raise read
        self._ahead.popleft()
        self._data.mixture.next_batch()
        for row in read:
            self._data.positions[row.source][row.stream] = row.position
            self._skipped += row.skipped
            self._num_skipped += len(row.skipped)
        local, mask, seq_len = self._local_batch_size, self._dataset.document_mask, self._data.seq_len
        batches = [
            make_microbatch([r.row for r in read[i : i + local]], seq_len, mask, self._device)
            for i in range(0, len(read), local)
        ]
        valid = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        self._valid_tokens, self._tokens = self._valid_tokens + valid, self._tokens + len(read) * seq_len
        return GlobalBatch([microbatch for microbatch, _ in batches], valid)

    def fails_within(self, batches: int, give_up: Callable[[], bool] = _never) -> bool:
        """Whether this rank cannot read one of its next `batches` global batches; waits until they are read. The other
        ranks can then be told in time: they would wait in a collective for a rank that ends alone. The end of the data
        is no failure.

        Args:
            give_up: is asked several times a second while this waits. If it says so, the answer is True.
        """
        self._read_ahead(batches, give_up)
        ahead = list(itertools.islice(self._ahead, batches))
        ends = any(isinstance(batch, OutOfData) for batch in ahead)
        return any(isinstance(batch, Exception) and not isinstance(batch, OutOfData) for batch in ahead) or (
            len(ahead) < batches and not ends
        )

    def failure(self) -> Exception | None:
        """Why this rank cannot read its next global batch, if that is known."""
        first = self._ahead[0] if self._ahead else None
        return first if isinstance(first, Exception) and not isinstance(first, OutOfData) else None

    def _read_ahead(self, batches: int, give_up: Callable[[], bool] = _never) -> None:
        self.start()
        assert self._reader is not None
        while len(self._ahead) < batches and not (self._ahead and isinstance(self._ahead[-1], Exception)):
            try:
                if isinstance(self._reader, WorkerPool) and not self._reader.wait(give_up):
                    return
                self._ahead.append(self._reader.next_batch())
            except Exception as error:  # raised when its batch is due
                self._ahead.append(error)

    def stats(self) -> dict[str, Any]:
        """What all ranks have read: since they started, the share of the positions that are trained on and the number
        of records skipped; since the run began, the tokens of the rows of each source and how many times it was read.
        Reports the records skipped since the last call. All ranks of dp_group call it together."""
        now, self._skipped = self._skipped[:_MOST_REPORTED], self._skipped[_MOST_REPORTED:]
        turns = [[position.place.turn for position in positions] for positions in self._data.positions]
        shares = self._gather((self._valid_tokens, self._tokens, self._num_skipped, now, turns))
        valid, tokens, skipped = (sum(share[i] for share in shares) for i in range(3))
        if self._part.dp_rank == 0:
            report_skipped([reason for share in shares for reason in share[3]])
        names = [source.name for source in self.sources]
        names = [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]
        streams = zip(*(share[4] for share in shares), strict=True)  # for each source: the turns that each rank knows
        turns = [sum(map(max, zip(*known, strict=True))) for known in streams]
        epochs = [count / source.num_units for count, source in zip(turns, self.sources, strict=True)]
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
        self.stats()  # what was skipped before a checkpoint is reported before it
        everywhere = self._gather(self._data.positions)
        known = [
            [max(stream, key=lambda position: position.row) for stream in zip(*streams, strict=True)]
            for streams in zip(*everywhere, strict=True)
        ]
        for rows, positions in zip(self._data.mixture.rows, known, strict=True):
            assert all(position.row == _rows_before(rows, v, len(positions)) for v, position in enumerate(positions))
        return {
            "version": _STATE_VERSION,
            "seed": self._data.seed,
            "seq_len": self._data.seq_len,
            "packing": self._data.packing,
            "tokenizer": self._data.tokenizer.tokenizer.fingerprint,
            "holdout": self._data.tokenizer.holdout,
            "schedule": self._data.mixture.state_dict(),
            "sources": [
                {
                    "name": source.name,
                    "fingerprint": source.fingerprint,
                    "streams": [[*position.place, position.offset] for position in positions],
                }
                for source, positions in zip(self.sources, known, strict=True)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved, on any number of ranks.

        Raises:
            UserError: `compare` refuses it, or the tokenizer is another one. (A run has been told so before.)
            CheckpointError, Damage: as `compare`.
        """
        place, contents, accepted = self.compare(state)
        if not self._data.tokenizer.tokenizer.is_known_as(state["tokenizer"]):
            place.append("the tokenizer is another one")
        if place or contents:
            remedy = "Restore that, or start a new run in another job.dump_folder"
            remedy += "." if place else ', or go on with the new data by dataset.on_change = "warn".'
            listed = "; ".join([*place, *contents, *accepted])
            raise UserError(f"cannot go on with the data of the checkpoint: {listed}. {remedy}")
        self.close()
        self._data.mixture.load_state_dict(state["schedule"])
        self._data.positions = []
        for rows, saved, source in zip(self._data.mixture.rows, state["sources"], self.sources, strict=True):
            same, streams = saved["fingerprint"] == source.fingerprint, saved["streams"]
            self._data.positions.append(
                [
                    # A place within a document means nothing if the documents are others.
                    StreamPosition(
                        _rows_before(rows, v, len(streams)), Place(*(at[:3] if same else at[:1])), at[3] if same else 0
                    )
                    for v, at in enumerate(streams)
                ]
            )

    def describe(self) -> str:
        """One line for the log: what is read."""
        return " + ".join(source.describe() for source in self.sources)

    def table(self, steps: int) -> str:
        """A table of the sources for a run of `steps`, to be shown before the first one. Warns of text that the
        tokenizer cannot represent."""
        for source in self.sources:
            if lost := lost_characters(source, self._data.tokenizer.tokenizer):
                logging.getLogger("titanlite").warning(lost)
        tokens = self.global_batch_size * self._data.seq_len * steps
        return source_table(self._dataset, self._data, steps, tokens)

    def close(self) -> None:
        """End the background processes, and forget what was read ahead. The next batch starts them again."""
        if isinstance(self._reader, WorkerPool):
            self._reader.close()
        self._reader = None
        self._ahead.clear()

    def compare(self, state: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
        """What differs between this data and that of the run that saved `state`. It decides whether a run can go on
        with this data; whether it can with the tokenizer, `Tokenizer.is_known_as` says.

        Returns:
            One line for each difference: those that make the saved place meaningless, which is refused; those of the
            contents, which is refused, too, if dataset.on_change is "error", and those if it is "warn".

        Raises:
            CheckpointError: another version of titanlite wrote it, in a form that this one does not read.
            Damage: rows or a place that no run comes to.
        """
        if (found := state["version"]) != _STATE_VERSION:
            raise CheckpointError(f"the data state has version {found}; this titanlite reads {_STATE_VERSION}")
        rows, steps = sum(state["schedule"]["rows"]), state["schedule"]["step"]
        if rows >= MAX_COUNT or rows > steps * _MOST_ROWS:
            raise Damage(f"its data state counts {rows:,} rows in {steps:,} steps, which no run reads")
        place: list[str] = []
        contents: list[str] = []
        for key, now, name in (
            ("seed", self._data.seed, "the seed of the data order"),
            ("seq_len", self._data.seq_len, "training.seq_len"),
            ("packing", self._data.packing, "dataset.packing"),
            ("holdout", self._data.tokenizer.holdout, "validation.holdout"),
        ):
            if state[key] != now:
                place.append(f"{name} was {state[key]}, it is now {now}")
        if len(state["sources"]) != len(self.sources):
            place.append(f"there were {len(state['sources'])} sources, there are now {len(self.sources)}")
            return place, [], []
        for i, (saved, source) in enumerate(zip(state["sources"], self.sources, strict=True)):
            before, now, rows = len(saved["streams"]), len(self._data.positions[i]), state["schedule"]["rows"][i]
            if before != now and state["holdout"] == self._data.tokenizer.holdout:  # which decides their number, too
                cause = f"another {'dataset.max_epochs or ' if 1 in (before, now) else ''}number of documents or files"
                streams = f"{before} streams, {source.name} is read in {now}: {cause}"
                place.append(f"the source {saved['name']} was read in {streams}")
            elif saved["fingerprint"] != source.fingerprint:
                same = saved["name"] == source.name
                what = "has changed since: other files, contents or text_column" if same else f"is now {source.name}"
                contents.append(f"the source {saved['name']} {what}")
            elif not all(_can_be_reached(source, Place(*stream[:3])) for stream in saved["streams"]) or not all(
                map(any, saved["streams"][:rows])  # a stream that has had a row has moved
            ):
                raise Damage(f"its places in {source.name} are none that a run comes to")
        return (place, [], contents) if self._dataset.on_change == "warn" else (place, contents, [])


def _can_be_reached(source: Source, place: Place) -> bool:
    """Whether a stream of `source` may come to `place`, as far as that is known without reading the source."""
    return place.turn < MAX_COUNT and not (isinstance(source, RandomAccess) and (place.window or place.index))


def _rows_before(rows: int, stream: int, streams: int) -> int:
    """Rows of `stream` among the first `rows` rows of its source."""
    return (rows - stream + streams - 1) // streams


def _gather_over(group: dist.ProcessGroup | None) -> Gather:
    def gather(value: Any) -> list[Any]:
        if group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    return gather
