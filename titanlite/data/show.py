"""For people: a table of the sources before a run, and the text that one step of it reads."""

from __future__ import annotations

from fractions import Fraction

from titanlite.config.errors import UserError, printable
from titanlite.config.run import Run
from titanlite.config.schema import Dataset
from titanlite.data.documents import Encoder
from titanlite.data.mixing import Schedule, stage_weights
from titanlite.data.reader import (
    BatchReader,
    OutOfData,
    Part,
    Row,
    open_sources,
    sample_numbers,
    source_specs,
    start_cursors,
)
from titanlite.data.sources.base import RandomAccess, Source
from titanlite.data.sources.files import FileSpans
from titanlite.data.sources.shards import Shards
from titanlite.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer


def source_table(
    dataset: Dataset, sources: list[Source], encoder: Encoder, seq_len: int, global_batch_size: int, steps: int
) -> str:
    """Documents, tokens, share and epochs of each source in a run of `steps`. A "~" marks a number of tokens that is
    estimated from 64 documents."""
    lines = [("source", "documents", "tokens", "share", "epochs in this run", "left out")]
    shares = _shares(dataset, steps)
    for source, spec, share in zip(sources, source_specs(dataset), shares, strict=True):
        tokens, exact = estimate_tokens(source, encoder)
        kept = None if tokens is None else tokens * (1 - encoder.holdout)
        read = float(share) * steps * global_batch_size * seq_len
        epochs = "unknown" if kept is None else f"{read / max(1, kept):,.2f}"
        if spec.max_epochs:
            epochs += f" (ends after {spec.max_epochs})"
        documents = "unknown" if source.num_documents is None else f"{source.num_documents:,}"
        count = "unknown" if tokens is None else f"{'' if exact else '~'}{tokens:,}"
        left_out = f"{encoder.holdout:.2%} held out" if encoder.holdout else "nothing"
        lines.append((source.name, documents, count, f"{float(share):.1%}", epochs, left_out))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _shares(dataset: Dataset, steps: int) -> list[Fraction]:
    stages = stage_weights(dataset)
    ends = [start for start, _ in stages[1:]] + [steps]
    shares = [Fraction(0)] * len(stages[0][1])
    for (start, weights), end in zip(stages, ends, strict=True):
        length = max(0, min(end, steps) - start)
        shares = [share + Fraction(w * length, sum(weights) * steps) for share, w in zip(shares, weights, strict=True)]
    return shares


def lost_characters(source: Source, tokenizer: Tokenizer) -> str | None:
    """What to say about characters in a sample of `source` that the tokenizer cannot represent; None if it keeps all.
    tiktoken's format always does."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or not isinstance(source, RandomAccess):
        return None
    characters: set[str] = set()
    for index in sample_numbers(source):
        record = source.record(index)
        characters.update(record if isinstance(record, str) else "")
    lost = [c for c in sorted(characters) if not c.isspace() and c not in tokenizer.decode(tokenizer.encode(c))]
    if not lost:
        return None
    some = ", ".join(map(repr, lost[:5]))
    return (
        f"{tokenizer.path} cannot represent {len(lost):,} characters in a sample of {source.name}, such as {some}: the "
        "model does not see them. A tokenizer with a byte-level vocabulary or byte fallback keeps every text."
    )


def estimate_tokens(source: Source, encoder: Encoder) -> tuple[int | None, bool]:
    """Tokens of a source (None: unknown), and whether this number is exact."""
    if isinstance(source, Shards):
        return source.num_tokens, True
    if not isinstance(source, RandomAccess):
        return None, False
    whole = Encoder(encoder.tokenizer, skip_bad=True)
    sample = sample_numbers(source)
    tokens = sum(len(whole.fetch(source, index)) for index in sample)
    if len(sample) == len(source):
        return tokens, True
    if isinstance(source, FileSpans):  # tokens per byte vary less than tokens per document
        sizes = source.sizes()
        return int(tokens * sizes.sum() / max(1, sizes[sample].sum())), False
    return tokens * len(source) // len(sample), False


def show_step(run: Run, step: int, row: int | None) -> str:
    """The rows of global batch `step` (the first one is 1), or one of them: which documents they are made of, from
    which token on, and their text with its control characters escaped. Where the text is not prepared, everything up
    to there is tokenized first.

    Raises:
        UserError: there is no such step or row, or the data cannot be read.
    """
    training, dataset, size = run.job.training, run.job.dataset, run.global_batch_size
    if not 1 <= step <= training.steps:
        raise UserError(f"--step {step}: the run has the steps 1 to {training.steps:,} (training.steps)")
    if row is not None and not 0 <= row < size:
        raise UserError(f"--row {row}: a global batch has the rows 0 to {size - 1}")
    tokenizer = load_tokenizer(run.tokenizer_path)
    holdout = run.job.validation.holdout
    encoder = Encoder(tokenizer, holdout, False, dataset.on_bad_record == "skip")
    sources = open_sources(dataset, encoder, training.seq_len)
    schedule = Schedule(dataset, size)
    for _ in range(step - 1):
        schedule.next_batch()
    cursors = start_cursors(dataset, sources, holdout)
    reader = BatchReader(dataset, sources, encoder, run.data_seed, training.seq_len, schedule, cursors, Part(0, 1))
    parts = []
    for k, (source, number) in enumerate(schedule.next_batch()):
        if row is None or k == row:
            try:
                read = reader.read(source, number)[0]
            except OutOfData as error:
                raise UserError(f"step {step} does not exist: {error}") from None
            parts.append(
                f"=== step {step}, row {k}, {sources[source].name}\n" + _show_row(read, sources[source], reader)
            )
    return printable("\n".join(parts))


def _show_row(row: Row, source: Source, reader: BatchReader) -> str:
    lines, start = [], 0
    for part, number, offset, length in row.segments.tolist():
        tokens = row.tokens[start : start + length].tolist()
        lines.append(f"--- {source.where(part, number)}, tokens {offset} to {offset + length - 1}")
        lines.append(reader.tokenizer.decode(tokens))
        start += length
    if start < len(row.tokens):
        lines.append(f"--- {len(row.tokens) - start} tokens of padding")
    return "\n".join(lines)
