"""Opening the data sources of a job, and turning their records into tokenized documents."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from titanlite.config.errors import UserError, format_count
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, JobConfig
from titanlite.data.packing import is_marked, mark_ignored
from titanlite.data.sources.base import RandomAccess, Source, TokenSource
from titanlite.data.sources.files import open_source
from titanlite.data.sources.records import (
    CONVERSION_REMEDY,
    BadRecord,
    MaskedText,
    Prepared,
    Record,
    hash_text,
)
from titanlite.data.tokenizer import Tokenizer


@dataclass
class DocumentTokenizer:
    """Tokenizes the documents of one split of a source, and skips all other documents.

    The two splits are the training documents and the documents held out for validation.

    Attributes:
        tokenizer: Tokenizer of the run.
        holdout: Fraction of the documents that is held out for validation, 0 to 1.
        is_validation: Whether to select the held-out documents instead of the training documents.
        skip_bad: Whether to skip records that cannot be read instead of raising an error.
        section: Section of the job file that describes the data, "dataset" or "validation".
    """

    tokenizer: Tokenizer
    holdout: float = 0.0
    is_validation: bool = False
    skip_bad: bool = False
    section: str = "dataset"

    @classmethod
    def for_run(
        cls, run: Run, tokenizer: Tokenizer, *, validation: bool = False
    ) -> DocumentTokenizer:
        """Create a `DocumentTokenizer` for the training data or the validation data of a run.

        Validation reads the held-out documents of [dataset] if validation.holdout is set, and
        otherwise all documents of the source in [validation].
        """
        holdout = run.job.validation.holdout
        uses_holdout = validation and holdout > 0
        section = "validation" if validation and not uses_holdout else "dataset"
        skip_bad = getattr(run.job, section).on_bad_record == "skip"
        return cls(tokenizer, holdout, uses_holdout, skip_bad, section)

    def __post_init__(self) -> None:
        bos_id = self.tokenizer.bos_id
        self._bos = np.array([] if bos_id is None else [bos_id], dtype=np.int32)
        self._eos = np.array([self.tokenizer.eos_id], dtype=np.int32)
        self._no_tokens = self._eos[:0]
        self.empty_length = len(self._bos) + len(self._eos)
        """Number of tokens of a document without text: BOS, if there is one, and EOS."""

    def encode(self, record: Record) -> np.ndarray:
        """Tokenize a record, and add BOS and EOS unless it was tokenized in advance.

        Args:
            record: A text, a document that was tokenized in advance, or the error for a bad record.

        Returns:
            Tokens, shape (n,), int32. A token t that does not count in the loss is stored as ~t.
            Empty if the record is skipped or does not belong to the selected split.

        Raises:
            BadRecord: If the record cannot be read and `skip_bad` is False.
        """
        if isinstance(record, BadRecord):
            self.check_readable(record)
            return self._no_tokens  # the record is skipped
        if not self._is_selected(record):
            return self._no_tokens
        if isinstance(record, Prepared):
            return record.tokens
        if isinstance(record, MaskedText):
            return self._encode_masked(record)
        return np.concatenate([self._bos, self._encode_text(record), self._eos])

    def _encode_text(self, text: str) -> np.ndarray:
        """Return the token ids of a text as int32, without BOS and EOS."""
        return self.tokenizer.encode_array(text).view(np.int32)

    def _encode_masked(self, text: MaskedText) -> np.ndarray:
        """Tokenize a text in which only some ranges of characters count in the loss.

        To exclude a token from the loss, its id t is replaced by ~t. BOS counts if the first token
        of the text counts, and EOS if the last one does.

        Returns:
            Token ids, shape (n,), int32, with BOS and EOS.
        """
        # Tokenize each range separately, so that no token crosses its bounds.
        parts = []
        last_end = 0
        for start, end in text.trained_ranges:
            ignored_tokens = self._encode_text(text[last_end:start])
            parts.append(mark_ignored(ignored_tokens))
            trained_tokens = self._encode_text(text[start:end])
            parts.append(trained_tokens)
            last_end = end
        remaining_tokens = self._encode_text(text[last_end:])
        parts.append(mark_ignored(remaining_tokens))
        tokens = np.concatenate(parts)

        # Add BOS and EOS.
        bos = self._bos
        eos = self._eos
        has_tokens = len(tokens) > 0
        if has_tokens and is_marked(tokens[0]):
            bos = mark_ignored(bos)
        if has_tokens and is_marked(tokens[-1]):
            eos = mark_ignored(eos)
        return np.concatenate([bos, tokens, eos])

    def _is_selected(self, record: str | Prepared) -> bool:
        """Return whether a document belongs to the selected split (training or held out).

        A document is held out for validation if the 64-bit hash of its text is less than
        `holdout` * 2**64. Duplicates therefore belong to the same split.
        """
        if not self.holdout:
            return True
        text_hash = record.text_hash if isinstance(record, Prepared) else hash_text(record)
        assert text_hash is not None  # because the run has a holdout
        is_held_out = text_hash < self.holdout * 2**64
        return is_held_out == self.is_validation

    def check_readable(self, record: Record) -> None:
        """Raise an error if a record cannot be read, unless such records are skipped.

        Raises:
            BadRecord: If the record cannot be read and `skip_bad` is False. The message names the
                options of the job file to change.
        """
        if not isinstance(record, BadRecord) or self.skip_bad:
            return
        problem = str(record).replace("Set text_column", f"Set {self.section}.text_column")
        raise BadRecord(
            f"{problem}. {CONVERSION_REMEDY} If only a few records are bad, set "
            f'{self.section}.on_bad_record = "skip" to skip them.'
        )


def source_specs(dataset: Dataset) -> tuple[DataSource | Dataset, ...]:
    """Return the tables of the job file that describe the sources of a dataset.

    A mixture has one table per source in [[dataset.sources]]. Without a mixture, the section
    [dataset] itself describes the only source.
    """
    return dataset.sources or (dataset,)


def open_sources(
    dataset: Dataset, document_tokenizer: DocumentTokenizer, seq_len: int, job: JobConfig
) -> list[Source]:
    """Open all sources of a dataset in the order of the job file, and check a sample of each one.

    Args:
        dataset: Section that describes the sources.
        document_tokenizer: Tokenizes the records of the sample.
        seq_len: Number of tokens that each source must exceed.
        job: Job whose sections configure sources from plugins.

    Raises:
        UserError: If a source cannot be opened, has too little text for one sequence, or has a
            record in its sample that cannot be read.
    """
    sources = [open_source(spec, job) for spec in source_specs(dataset)]
    for source in sources:
        inspect_source(source, document_tokenizer, seq_len)
    return sources


def inspect_source(source: Source, document_tokenizer: DocumentTokenizer, seq_len: int) -> None:
    """Check that a source has enough text for one sequence, and that a sample of it can be read.

    Args:
        source: The opened source.
        document_tokenizer: Tokenizes the sample.
        seq_len: Number of tokens that the source must exceed.

    Raises:
        UserError: If the source has too little text, or a record in the sample cannot be read.
    """
    holdout = document_tokenizer.holdout
    # A source that was tokenized in advance cannot be read without the tokenizer.
    if isinstance(source, TokenSource):
        source.attach_tokenizer(document_tokenizer.tokenizer, holdout)
    num_tokens = _count_tokens(source, document_tokenizer, seq_len)
    if num_tokens <= seq_len:
        raise UserError(_explain_too_little_text(source, holdout, num_tokens, seq_len))

    # Only sources with random access can read a sample of random documents.
    if isinstance(source, RandomAccess):
        for index in source.sample():
            document_tokenizer.check_readable(source.record(index))


def _count_tokens(source: Source, document_tokenizer: DocumentTokenizer, limit: int) -> int:
    """Count the tokens of a source, and stop once there are more than `limit`.

    Count only documents that contain text and belong to the split of `document_tokenizer`.
    """
    num_tokens = 0
    for record in source:
        size = len(document_tokenizer.encode(record))
        if size > document_tokenizer.empty_length:
            num_tokens += size
        if num_tokens > limit:
            break
    return num_tokens


def _explain_too_little_text(source: Source, holdout: float, num_tokens: int, seq_len: int) -> str:
    """Return an error message for a source with fewer tokens than one sequence needs.

    For example, "text a.txt: the documents contain 5 tokens, fewer than the required 65. Add text,
    lower training.seq_len, or choose other files."

    Args:
        source: The source. It is read completely to find skipped records.
        holdout: Value of validation.holdout. If it is positive, only one split (training or held
            out) was counted.
        num_tokens: Number of tokens in this split.
        seq_len: Length of a sequence in tokens.
    """
    num_required = seq_len + 1  # labels are shifted by one
    split = f" in this split (validation.holdout = {holdout})" if holdout else ""
    problem = (
        f"{source.name}: the documents{split} contain {num_tokens:,} tokens, fewer than the "
        f"required {num_required:,}."
    )
    sentences = [problem]

    # Skipped records may be the cause.
    skipped = [record for record in source if isinstance(record, BadRecord)]
    if skipped:
        count = format_count(len(skipped), "record")
        sentences.append(f"Skipped {count}; the first one: {skipped[0]}.")

    remedies = ", ".join(_list_remedies(source, num_tokens, holdout))
    sentences.append(f"{remedies}, or choose other files.")
    return " ".join(sentences)


def _list_remedies(source: Source, num_tokens: int, holdout: float) -> list[str]:
    """Return ways to fix a source that has only `num_tokens` tokens, such as ["Add text"]."""
    remedies = ["Add text"]
    if num_tokens:
        remedies.append("lower training.seq_len")
    elif not isinstance(source, TokenSource):
        # Without any token, `text_column` probably selects the wrong field.
        remedies.append("set text_column to another field")
    if holdout:
        # A separate validation source does not take documents away from training.
        remedies += ["change validation.holdout", "replace it with validation.source"]
    return remedies


def log_skipped_records(reasons: list[str]) -> None:
    """Log a warning for each skipped record. `reasons` has one explanation per record."""
    for reason in reasons:
        logging.getLogger("titanlite").warning("Skipped a record: %s", reason)
