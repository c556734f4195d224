"""Text that is scored and never trained on: the fixed rows of validation, and the windows of any text.

Invariant: the rows of validation depend on the sources, the seed and seq_len alone, and each token of a text is scored
exactly once, however rows are spread over batches and ranks. All ranks have the same number of microbatches, because a
rank with more would wait for the others in a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from titanlite.config.run import Run
from titanlite.config.schema import Dataset
from titanlite.data.batch import IGNORED, Microbatch, Window, make_microbatch, padded_length, padded_microbatch
from titanlite.data.sources.base import BadRecord, Prepared, Source
from titanlite.data.stream import BatchReader, DocumentTokenizer, OutOfData, PackedDataset, Row, report_skipped
from titanlite.data.tokenizer import Tokenizer

_BATCHES = 16  # so many batches are cut from windows that were sorted by length, because that saves padding


class ValidationSet:
    """Rows of the source in [validation]; with validation.holdout, rows of the held-out documents of [dataset]. No
    document is read twice: a source that is too small gives fewer rows.

    Args:
        dp_rank: which of the run's data-parallel ranks this one is.

    Attributes:
        num_sequences: rows over all ranks.
        num_tokens: labels that are not -100, over all ranks.
        num_bytes: bytes of text that these labels stand for.

    Raises:
        UserError: a source is missing, or holds less than one row.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer, dp_rank: int, device: torch.device) -> None:
        validation, dataset = run.job.validation, run.job.dataset
        local, ranks = run.job.training.local_batch_size, run.degrees.data
        documents = DocumentTokenizer.of_run(run, tokenizer, True)
        held_out, keys = documents.held_out, getattr(run.job, documents.section)
        keys = keys.model_dump(include=set(Dataset.model_fields))
        for table in (keys, *keys["sources"]):
            table["max_epochs"] = 1
        for stage in keys.get("stages", ()):
            stage["global_batch_size"] = None  # of the training
        once = Dataset.model_validate(keys)
        data = PackedDataset(run, once, documents, run.validation_seed, validation.sequences)
        self._device, self._document_mask = device, dataset.document_mask
        self._name = " + ".join(source.name for source in data.sources)
        reader, rows = BatchReader(data), list[Row]()
        with suppress(OutOfData):  # then there are fewer rows than asked for; describe() gives their number
            for k, (source, number) in enumerate(data.mixture.next_batch()):
                rows.append(reader.read(source, number, k))
                if not held_out:  # otherwise the training reads, and reports, the same records
                    report_skipped(rows[-1].skipped)
        self.num_sequences = len(rows)
        count = -(-len(rows) // (ranks * local)) * local  # the same on all ranks
        filler = rows[0]._replace(segments=rows[0].segments[:0])  # all of it is padding
        own = [*rows[dp_rank::ranks], *[filler] * count][:count]
        self._batches = [own[i : i + local] for i in range(0, count, local)]

        starts, cpu = range(0, len(rows), local), torch.device("cpu")
        labels = [make_microbatch(rows[i : i + local], self._document_mask, cpu)[1] for i in starts]
        counts = np.bincount(np.concatenate([label[label != IGNORED] for label in labels]))  # of each token
        self.num_tokens = int(counts.sum())
        text = [token for token in np.flatnonzero(counts).tolist() if token not in (tokenizer.bos_id, tokenizer.eos_id)]
        self.num_bytes = sum(int(counts[token]) * len(tokenizer.token_bytes(token)) for token in text)

    def batches(self) -> Iterator[Microbatch]:
        """This rank's rows, the same each time. Rows that only fill up a microbatch have no valid label."""
        for rows in self._batches:
            yield make_microbatch(rows, self._document_mask, self._device)[0]

    def describe(self) -> str:
        """One line for the log."""
        return f"{self.num_sequences:,} sequences of {self._name}"


@dataclass
class TextWindows:
    """The windows of all documents of some files, as in transformers' guide on the perplexity of models with a fixed
    length. Each begins `stride` tokens after the one before, and is scored on the tokens that no earlier one of its
    document has reached. So a token has at least `length - stride` tokens before it, or all that the document has.

    Attributes:
        stride: less than `length`.
        documents, tokens, num_bytes: what was read so far: documents, tokens that are scored, and the UTF-8 bytes that
            they stand for.
    """

    sources: list[Source]
    tokenizer: Tokenizer
    length: int
    stride: int
    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0

    def __iter__(self) -> Iterator[Window]:
        """Raises UserError if a record cannot be read.

        A document begins with the tokenizer's bos, or with its eos if it has no bos, because in training an eos stands
        before each document but the first. Its end is not scored, because it stands for no byte of the text.
        """
        begin = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        for text in (text for source in self.sources for text in source):
            assert not isinstance(text, Prepared)
            if isinstance(text, BadRecord):
                raise BadRecord(str(text).replace("(text_column)", "(--text-column)"))
            tokens = np.append(begin, self.tokenizer.encode_array(text))
            self.documents += 1
            self.tokens += len(tokens) - 1
            self.num_bytes += len(text.encode("utf-8", "surrogatepass"))
            reached = 1
            for start in range(0, len(tokens), self.stride):
                window = tokens[start : start + self.length]
                if (end := start + len(window)) > reached:
                    yield Window(window, end - reached)
                    reached = end


def window_batches(
    windows: Iterable[Window], run: Run, dp_rank: int, device: torch.device
) -> Iterator[tuple[list[Microbatch], list[list[int]]]]:
    """The microbatches of one data-parallel rank, some at a time, and for each the numbers of its windows, from 0. All
    ranks get the same number of the same shapes.

    Every rank reads all windows, because a model takes much longer than a tokenizer and the ranks need not agree.
    """
    rows, ranks, numbered = run.job.training.local_batch_size, run.degrees.data, enumerate(windows)
    while chunk := list(islice(numbered, _BATCHES * rows * ranks)):
        chunk.sort(key=lambda each: -len(each[1].tokens))
        batches, numbers = list[Microbatch](), list[list[int]]()
        for start in range(0, len(chunk), rows * ranks):
            part = chunk[start : start + rows * ranks]
            own, length = part[dp_rank::ranks], padded_length(run, len(part[0][1].tokens) - 1)
            batches.append(padded_microbatch([window for _, window in own], rows, length, device))
            numbers.append([number for number, _ in own])
        yield batches, numbers
