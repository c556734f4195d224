"""The fixed rows of validation, divided among the ranks.

Invariant: the rows depend on the sources, the seed and seq_len alone. All ranks have the same number of microbatches,
because a rank with more would wait for the others in a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch

from titanlite.config import schema
from titanlite.config.run import Run
from titanlite.data.batch import IGNORED, Microbatch, make_microbatch
from titanlite.data.stream import BatchReader, DocumentTokenizer, OutOfData, PackedDataset, Part, Row, report_skipped
from titanlite.data.tokenizer import Tokenizer


class ValidationSet:
    """Rows of the source in [validation]; with validation.holdout, rows of the held-out documents of [dataset]. No
    document is read twice: a source that is too small gives fewer rows.

    Args:
        dp_rank: which of the run's data-parallel ranks this one is.

    Attributes:
        num_sequences: rows over all ranks.
        num_tokens: labels in this rank's rows that are not -100. The loss is the sum of cross entropies over all ranks,
            divided by the sum of this number.
        num_bytes: bytes of text that these labels stand for. Bits per byte are the same sum / ln 2, divided by the sum
            of this number.

    Raises:
        UserError: a source is missing, or holds less than one row.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer, dp_rank: int, device: torch.device) -> None:
        validation, dataset, seq_len = run.job.validation, run.job.dataset, run.job.training.seq_len
        local_batch_size, dp_size = run.job.training.local_batch_size, run.degrees.data
        held_out = validation.holdout > 0
        chosen = dataset if held_out else _as_dataset(validation)
        once = {"max_epochs": 1}
        mix = tuple(spec.model_copy(update=once) for spec in chosen.sources)
        chosen = chosen.model_copy(update={"sources": mix, **once})
        section, skip_bad = "dataset" if held_out else "validation", chosen.on_bad_record == "skip"
        documents = DocumentTokenizer(tokenizer, validation.holdout, held_out, skip_bad, section)
        data = PackedDataset(chosen, documents, run.validation_seed, seq_len, validation.sequences)
        self._seq_len, self._device, self._document_mask = seq_len, device, dataset.document_mask
        self._name = " + ".join(source.name for source in data.sources)
        reader = BatchReader(data, Part())
        rows: list[Row] = []
        with suppress(OutOfData):  # then there are fewer rows than asked for; describe() gives their number
            for source, number in data.mixture.next_batch():
                rows.append(reader.read(source, number)[0])
                if not held_out:  # otherwise the training reads, and reports, the same records
                    report_skipped(documents.skipped)
        self.num_sequences = len(rows)
        filler = Row(np.full(seq_len + 1, tokenizer.eos_id, dtype=np.int32), np.empty((0, 4), dtype=np.int64))
        own = rows[dp_rank::dp_size]
        count = -(-len(rows) // (dp_size * local_batch_size)) * local_batch_size  # the same on all ranks
        own += [filler] * (count - len(own))
        self._batches = [own[i : i + local_batch_size] for i in range(0, count, local_batch_size)]

        labels = [
            make_microbatch(batch, seq_len, self._document_mask, torch.device("cpu"))[1] for batch in self._batches
        ]
        valid = np.concatenate([label[label != IGNORED] for label in labels])
        self.num_tokens = len(valid)
        ids, counts = np.unique(valid, return_counts=True)
        special = {tokenizer.bos_id, tokenizer.eos_id}
        sizes = [0 if token in special else len(tokenizer.token_bytes(token)) for token in ids.tolist()]
        self.num_bytes = int(np.dot(sizes, counts))

    def batches(self) -> Iterator[Microbatch]:
        """This rank's rows, the same each time. Rows that only fill up a microbatch have no valid label."""
        for rows in self._batches:
            yield make_microbatch(rows, self._seq_len, self._document_mask, self._device)[0]

    def describe(self) -> str:
        """One line for the log."""
        return f"{self.num_sequences:,} sequences of {self._name}"


def _as_dataset(validation: schema.Validation) -> schema.Dataset:
    place = set(schema.TextSource.model_fields)
    tables = [schema.DataSource(**table.model_dump(include=place), weight=table.weight) for table in validation.sources]
    return schema.Dataset(
        **validation.model_dump(include=place),
        sources=tuple(tables),
        packing=validation.packing,
        on_bad_record=validation.on_bad_record,
    )
