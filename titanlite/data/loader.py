"""Global batches for one data-parallel rank, and the one small state that resumes them on any number of ranks.

Invariant: row k of a global batch depends on the seed, the source, the tokenizer, seq_len and the number of rows before
that batch, never on the number of ranks, the local batch size or restarts. May import titanlite.config and data.

Sequence n = 0, 1, ... of a run is row n // V of virtual stream n % V (see packing). Global batch s holds the sequences
that follow those of batch s - 1; rank r of R takes its rows r, r + R, r + 2R, ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config import schema
from titanlite.config.errors import CheckpointError, UserError
from titanlite.data.packing import NUM_STREAMS, Cursor, Documents, Stream
from titanlite.data.sources import open_source
from titanlite.data.tokenizer import Tokenizer

_STATE_VERSION = 1

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Microbatch:
    """Rows of one forward pass."""

    input_ids: Tensor
    """(B, T) int64, on the device."""
    labels: Tensor
    """(B, T) int64, on the device: the token after each input; -100 where none is to be predicted."""


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's share of the rows of one optimizer step."""

    microbatches: list[Microbatch]
    num_valid_tokens: int
    """Labels in this rank's rows that are not -100."""


class Loader:
    """Endless global batches of one source.

    Args:
        dataset: where the text comes from; dataset.seed wins over `seed`.
        seq_len: tokens of a row, T.
        global_batch_size: rows of one optimizer step over all ranks; dp_size times local_batch_size divides it.
        dp_rank, dp_size: which of how many data-parallel ranks this one is.
        dp_group: the process group of these ranks; None if this is the only one.

    Raises:
        UserError: the source is missing or empty.
    """

    def __init__(
        self,
        dataset: schema.Dataset,
        tokenizer: Tokenizer,
        *,
        seed: int,
        seq_len: int,
        global_batch_size: int,
        local_batch_size: int,
        dp_rank: int,
        dp_size: int,
        dp_group: dist.ProcessGroup | None,
        device: torch.device,
        gather: Gather | None = None,
    ) -> None:
        assert global_batch_size % (dp_size * local_batch_size) == 0
        self._seed = seed if dataset.seed is None else dataset.seed
        self._tokenizer, self._seq_len = tokenizer, seq_len
        self._global_batch_size, self._local_batch_size = global_batch_size, local_batch_size
        self._dp_rank, self._dp_size, self._device = dp_rank, dp_size, device
        self._gather = gather or _gather_over(dp_group)
        self._source = open_source(dataset)
        self._documents = Documents(self._source, tokenizer, self._seed)
        self._start_at(0, [Cursor()] * NUM_STREAMS)

    def next_global_batch(self) -> GlobalBatch:
        """The next optimizer step's rows of this rank, on the device."""
        rows = [self._row(self._sequences + k) for k in range(self._dp_rank, self._global_batch_size, self._dp_size)]
        self._sequences += self._global_batch_size
        local = self._local_batch_size
        microbatches = [self._microbatch(rows[i : i + local]) for i in range(0, len(rows), local)]
        return GlobalBatch(microbatches, num_valid_tokens=len(rows) * self._seq_len)

    def state_dict(self) -> dict[str, Any]:
        """Where the next global batch begins: a small JSON value, the same for any number of ranks. All ranks of
        dp_group call it together, because each one knows only the streams that it read."""
        own = {number: vars(stream.cursor) for number, stream in self._streams.items()}
        known = list(self._cursors)
        for cursors in self._gather(own):
            for number, cursor in cursors.items():
                known[number] = max(known[number], Cursor(**cursor), key=lambda c: c.row)
        assert all(cursor.row == _rows_before(self._sequences, v) for v, cursor in enumerate(known))
        return {
            "version": _STATE_VERSION,
            "seed": self._seed,
            "seq_len": self._seq_len,
            "tokenizer": self._tokenizer.fingerprint,
            "source": {"name": self._source.name, "fingerprint": self._source.fingerprint},
            "sequences": self._sequences,
            "streams": [[cursor.turn, cursor.offset] for cursor in known],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state`, saved on any number of ranks, left off.

        Raises:
            UserError: the source, the tokenizer, the seed or seq_len is another one than in the run that saved it.
            CheckpointError: a version of titanlite wrote it that this one does not know.
        """
        if state["version"] != _STATE_VERSION:
            raise CheckpointError(
                f"the data state has version {state['version']}; this titanlite reads {_STATE_VERSION}"
            )
        saved, name = state["source"], self._source.name
        wrong = []
        if (saved["name"], saved["fingerprint"]) != (name, self._source.fingerprint):
            what = f"is now {name}" if saved["name"] != name else "has changed since: other files or other contents"
            wrong.append(f"the source {saved['name']} {what}")
        if state["tokenizer"] != self._tokenizer.fingerprint:
            wrong.append("the tokenizer is another one")
        if state["seed"] != self._seed:
            wrong.append(f"the seed of the data order was {state['seed']}, it is now {self._seed}")
        if state["seq_len"] != self._seq_len:
            wrong.append(f"training.seq_len was {state['seq_len']}, it is now {self._seq_len}")
        if wrong:
            raise UserError(
                f"cannot go on with the data of the checkpoint: {'; '.join(wrong)}. Restore that, or start a new run "
                "in another job.dump_folder."
            )
        self._start_at(
            state["sequences"],
            [
                Cursor(_rows_before(state["sequences"], v), turn, offset)
                for v, (turn, offset) in enumerate(state["streams"])
            ],
        )

    def describe(self) -> str:
        """One line for the log: what is read."""
        return self._source.describe()

    def close(self) -> None:
        """Let go of files and documents in memory."""
        self._streams.clear()

    def _start_at(self, sequences: int, cursors: list[Cursor]) -> None:
        self._sequences, self._cursors = sequences, cursors
        self._streams: dict[int, Stream] = {}  # those that this rank reads

    def _row(self, sequence: int) -> np.ndarray:
        row, number = divmod(sequence, NUM_STREAMS)
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = Stream(self._documents, number, self._seq_len, self._cursors[number])
        stream.skip_to(row)  # no step where dp_size divides V; else other ranks read the rows between
        return stream.next_row()

    def _microbatch(self, rows: list[np.ndarray]) -> Microbatch:
        tokens = torch.from_numpy(np.stack(rows)).to(self._device, torch.int64, non_blocking=True)  # (B, T + 1)
        return Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _rows_before(sequences: int, stream: int) -> int:
    """Rows of `stream` among the first `sequences` sequences."""
    return (sequences - stream + NUM_STREAMS - 1) // NUM_STREAMS


def _gather_over(group: dist.ProcessGroup | None) -> Gather:
    def gather(value: Any) -> list[Any]:
        if group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    return gather
