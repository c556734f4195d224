"""Text that is scored but never trained on: validation sequences, and windows over evaluated files.

Invariant: The validation sequences depend only on the sources, the seed and seq_len, and each token
of an evaluated text is scored exactly once, for any batch size and number of ranks. All ranks have
the same number of microbatches, because a rank with more would wait for the others in a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from titanlite.config.run import Run
from titanlite.config.schema import Dataset
from titanlite.data.batch import (
    Window,
    copy_to_device,
    make_microbatch,
    padded_length,
    padded_microbatch,
)
from titanlite.data.documents import DocumentTokenizer, log_skipped_records
from titanlite.data.packing import PackedSequence
from titanlite.data.sources.base import Source
from titanlite.data.sources.records import CONVERSION_REMEDY, BadRecord, Prepared
from titanlite.data.stream import OutOfData, PackedDataset, SequenceReader
from titanlite.data.tokenizer import Tokenizer
from titanlite.model.microbatch import IGNORE_INDEX, Microbatch

SORTED_BATCHES = 16  # windows for this many batches are sorted by length to reduce padding


class ValidationSet:
    """A fixed set of validation sequences, on which a run computes its validation loss.

    The sequences come from the source in [validation], or from the documents of [dataset] that are
    held out (validation.holdout). No document is read twice, so a small source yields fewer
    sequences than validation.sequences.

    Attributes:
        num_sequences: Number of sequences over all ranks.
        num_tokens: Number of labels that are not IGNORE_INDEX, over all ranks.
        num_bytes: Number of bytes of text that these labels represent, to compute bits per byte.
    """

    def __init__(
        self, run: Run, tokenizer: Tokenizer, data_rank: int, device: torch.device
    ) -> None:
        """Read all validation sequences, and keep one data-parallel rank's share in memory.

        Args:
            run: Run whose job describes the validation data.
            tokenizer: Tokenizer of the run.
            data_rank: Index of this data-parallel rank.
            device: Device of the microbatches.

        Raises:
            UserError: If a source is missing or smaller than one sequence.
        """
        self._device = device
        self._job = run.job
        documents = DocumentTokenizer.for_run(run, tokenizer, validation=True)
        dataset = _read_once(getattr(run.job, documents.section))
        data = PackedDataset(
            run, dataset, documents, run.validation_seed, run.job.validation.sequences
        )
        self._name = " + ".join(source.name for source in data.sources)
        sequences = _read_sequences(data)
        self.num_sequences = len(sequences)

        # Append padding sequences, so that all ranks have the same number of full microbatches. All
        # labels of a sequence without segments are IGNORE_INDEX.
        batch_size = run.job.training.local_batch_size
        num_ranks = run.degrees.data
        padding = sequences[0]._replace(segments=sequences[0].segments[:0])
        num_missing = -len(sequences) % (num_ranks * batch_size)
        padded = sequences + [padding] * num_missing
        local = padded[data_rank::num_ranks]
        self._batches = [
            local[start : start + batch_size] for start in range(0, len(local), batch_size)
        ]

        token_counts = self._count_labels(sequences)
        self.num_tokens = int(token_counts.sum())
        self.num_bytes = 0
        for token in np.flatnonzero(token_counts).tolist():
            # BOS and EOS represent no text.
            if token not in (tokenizer.bos_id, tokenizer.eos_id):
                self.num_bytes += int(token_counts[token]) * len(tokenizer.token_bytes(token))

    def batches(self) -> Iterator[Microbatch]:
        """Yield this rank's microbatches on the device.

        All ranks yield the same number of full microbatches. If necessary, they are filled up with
        padding sequences, whose labels are all IGNORE_INDEX.
        """
        for sequences in self._batches:
            microbatch = make_microbatch(sequences, self._job)
            yield copy_to_device(microbatch, self._device)

    def describe(self) -> str:
        """Describe the validation data for the log, such as "512 sequences of c4"."""
        return f"{self.num_sequences:,} sequences of {self._name}"

    def _count_labels(self, sequences: list[PackedSequence]) -> np.ndarray:
        """Count how often each token id occurs as a label, as an array indexed by token id.

        Labels that are IGNORE_INDEX do not count.
        """
        valid_labels = []
        for sequence in sequences:
            labels = make_microbatch([sequence], self._job).labels
            valid_labels.append(labels[labels != IGNORE_INDEX])
        return torch.cat(valid_labels).bincount().numpy()


def _read_once(section: Dataset) -> Dataset:
    """Return a copy of a [dataset] or [validation] section that reads each document at most once.

    Set max_epochs to 1 for all sources, and remove the batch sizes in [[dataset.stages]], because
    they apply to training only.
    """
    values = section.model_dump(include=set(Dataset.model_fields))
    for source in (values, *values["sources"]):
        source["max_epochs"] = 1
    for stage in values.get("stages", ()):
        stage["global_batch_size"] = None
    return Dataset.model_validate(values)


def _read_sequences(data: PackedDataset) -> list[PackedSequence]:
    """Read the first global batch of `data`, which is the whole validation set.

    If a source runs out of documents, the set has fewer than validation.sequences sequences.
    """
    reader = SequenceReader(data)
    sequences: list[PackedSequence] = []
    with suppress(OutOfData):
        for index, (source, number) in enumerate(data.mixture.next_batch()):
            sequence = reader.read(source, number, index)
            sequences.append(sequence)
            # Training reads the same files as held-out validation, and logs their skipped records.
            if not data.documents.is_validation:
                log_skipped_records(sequence.skipped)
    return sequences


@dataclass
class TextWindows:
    """Yields overlapping windows of tokens over the documents of files, to compute perplexity.

    Each window begins `stride` tokens after the previous one. Only the tokens that no earlier
    window of the document contains are scored. Each token is therefore predicted from at least
    `length - stride` tokens, or from all tokens before it in the document. See the guide
    "Perplexity of fixed-length models" by Hugging Face.

    Attributes:
        sources: The opened files.
        tokenizer: Tokenizer of the model.
        length: Maximum number of tokens per window.
        stride: Number of tokens between the beginnings of two windows, less than `length`.
        documents: Number of documents read so far.
        tokens: Number of scored tokens so far.
        num_bytes: Number of UTF-8 bytes that the scored tokens represent.
    """

    sources: list[Source]
    tokenizer: Tokenizer
    length: int
    stride: int
    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0

    def __iter__(self) -> Iterator[Window]:
        """Yield the windows of all documents.

        A document begins with BOS. If the tokenizer has no BOS, it begins with EOS, which precedes
        most documents in training. No EOS is scored at the end of a document, because EOS
        represents no bytes of text.

        Raises:
            BadRecord: If a record cannot be read.
        """
        for source in self.sources:
            for text in source:
                assert not isinstance(text, Prepared)
                if isinstance(text, BadRecord):
                    problem = str(text).replace("Set text_column", "Set --text-column")
                    raise BadRecord(f"{problem}. {CONVERSION_REMEDY}")
                yield from self._windows_of(text)

    def _windows_of(self, text: str) -> Iterator[Window]:
        """Yield the windows of a text, and update `documents`, `tokens` and `num_bytes`."""
        bos_id = self.tokenizer.bos_id
        first_token = self.tokenizer.eos_id if bos_id is None else bos_id
        tokens = np.append(first_token, self.tokenizer.encode_array(text))
        self.documents += 1
        self.tokens += len(tokens) - 1
        self.num_bytes += len(text.encode("utf-8", "surrogatepass"))

        scored_end = 1  # all tokens before this index are scored, except the first one
        for start in range(0, len(tokens), self.stride):
            window = tokens[start : start + self.length]
            end = start + len(window)
            if end > scored_end:
                yield Window(window, end - scored_end)
                scored_end = end


class LocalBatch(NamedTuple):
    """A microbatch of windows for one data-parallel rank."""

    microbatch: Microbatch
    window_indices: list[int]
    """Index of each window among all windows that are scored."""


def window_batches(
    windows: Iterable[Window], run: Run, data_rank: int, device: torch.device
) -> Iterator[list[LocalBatch]]:
    """Distribute windows of tokens over microbatches and data-parallel ranks.

    Read the windows for 16 microbatches of all ranks at once, and sort them by length to reduce
    padding. Every rank iterates over all windows, so that the ranks need not communicate.

    Args:
        windows: The windows, in the same order on all ranks.
        run: Run that sets the local batch size and the number of ranks.
        data_rank: Index of this data-parallel rank.
        device: Device of the microbatches.

    Yields:
        Up to 16 microbatches of rank `data_rank`. All ranks get the same number of microbatches
        with the same shapes.
    """
    windows_per_batch = run.global_microbatch_size  # in one microbatch of all ranks together
    windows_per_group = SORTED_BATCHES * windows_per_batch
    indexed_windows = enumerate(windows)
    while group := list(islice(indexed_windows, windows_per_group)):
        # Sort the group by length, the longest window first.
        group.sort(key=lambda indexed_window: len(indexed_window[1].tokens), reverse=True)

        # Divide the group into global batches, and keep this rank's share of each.
        local_batches = []
        for start in range(0, len(group), windows_per_batch):
            global_batch = group[start : start + windows_per_batch]
            local_batches.append(_make_local_batch(global_batch, run, data_rank, device))
        yield local_batches


def _make_local_batch(
    global_batch: list[tuple[int, Window]], run: Run, data_rank: int, device: torch.device
) -> LocalBatch:
    """Return this rank's microbatch of a global batch of windows.

    All ranks pad their windows to the length of the longest window in the global batch.

    Args:
        global_batch: Windows with their indices, the longest window first.
        run: Run that sets the local batch size and the number of ranks.
        data_rank: Index of this data-parallel rank.
        device: Device of the microbatch.
    """
    _, longest = global_batch[0]
    num_inputs = len(longest.tokens) - 1  # the last token is only a label
    length = padded_length(run, num_inputs)
    local_batch = global_batch[data_rank :: run.degrees.data]  # ranks take turns
    windows = [window for _, window in local_batch]
    microbatch = padded_microbatch(windows, run.job.training.local_batch_size, length, device)
    return LocalBatch(microbatch, [index for index, _ in local_batch])
