"""For people: a table of the sources before a run, and the text that one step of it reads."""

from __future__ import annotations

import numpy as np

from titanlite.config.errors import UserError, printable
from titanlite.config.run import Run
from titanlite.config.schema import Dataset
from titanlite.data.mixture import stage_weights
from titanlite.data.sources.base import RandomAccess, Source
from titanlite.data.sources.files import FileSpans
from titanlite.data.sources.shards import Shards
from titanlite.data.stream import BatchReader, OutOfData, PackedDataset, sample, sample_numbers, training_data
from titanlite.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer


def source_table(dataset: Dataset, data: PackedDataset, steps: int, run_tokens: int) -> str:
    """Documents, tokens, share and epochs of each source in a run of `steps`, which reads `run_tokens`. A "~" marks a
    number of tokens that is estimated from 64 documents."""
    lines = [("source", "documents", "tokens", "share", "epochs in this run")]
    stages = stage_weights(dataset)
    ends = np.clip([*(start for start, _ in stages[1:]), steps], 0, steps)
    shares = np.diff(ends, prepend=0) @ [np.divide(weights, sum(weights)) for _, weights in stages] / steps
    for source, spec, share in zip(data.sources, data.specs, shares, strict=True):
        documents = "unknown" if source.num_documents is None else f"{source.num_documents:,}"
        count = epochs = "unknown"
        if tokens := _estimate_tokens(source, data.tokenizer.tokenizer):
            count = f"{'' if isinstance(source, Shards) else '~'}{tokens:,}"
            epochs = f"{share * run_tokens / (tokens * (1 - data.tokenizer.holdout)):,.2f}"
        ends_after = f" (ends after {spec.max_epochs})" if spec.max_epochs else ""
        lines.append((source.name, documents, count, f"{share:.1%}", epochs + ends_after))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _estimate_tokens(source: Source, tokenizer: Tokenizer) -> int | None:
    """Tokens of a source; None: unknown."""
    if isinstance(source, Shards):
        return source.num_tokens
    if not isinstance(source, RandomAccess):
        return None
    # Tokens per byte vary less than tokens per document.
    sizes = source.sizes() if isinstance(source, FileSpans) else np.ones(source.num_units, dtype=int)
    tokens = sum(len(tokenizer.encode_array(text)) + 2 for text in sample(source) if isinstance(text, str))
    return tokens * int(sizes.sum()) // int(sizes[sample_numbers(source)].sum())


def lost_characters(source: Source, tokenizer: Tokenizer) -> str | None:
    """What to say about characters in a sample of `source` that the tokenizer cannot represent; None if it keeps all.
    tiktoken's format always does."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    characters = sorted(set("".join(record for record in sample(source) if isinstance(record, str))))
    lost = [c for c in characters if not c.isspace() and c not in tokenizer.decode(tokenizer.encode(c))]
    some = f"{len(lost):,} characters in a sample of {source.name}, such as {', '.join(map(repr, lost[:5]))}"
    return f"{tokenizer.path} cannot represent {some}: the model does not see them." if lost else None


def show_step(run: Run, step: int, row: int | None) -> str:
    """The rows of global batch `step` (the first one is 1), or one of them: which documents they are made of, from
    which token on, and their text with its control characters escaped. Where the text is not prepared, everything up
    to there is tokenized first.

    Raises:
        UserError: there is no such step or row, or the data cannot be read.
    """
    data = training_data(run, load_tokenizer(run.tokenizer_path))
    for _ in range(step - 1):
        data.mixture.next_batch()
    reader, lines = BatchReader(data), list[str]()
    for k, (number, of_source) in enumerate(data.mixture.next_batch()):
        if row not in (None, k):
            continue
        source = data.sources[number]
        try:
            found = reader.read(number, of_source, k)
        except OutOfData as error:
            raise UserError(f"step {step} does not exist: {error}") from None
        lines.append(f"=== step {step}, row {k}, {source.name}")
        start = 0
        for part, document, offset, length in found.segments.tolist():
            lines.append(f"--- {source.where(part, document)}, tokens {offset} to {offset + length - 1}")
            lines.append(data.tokenizer.tokenizer.decode(found.tokens[start : start + length].tolist()))
            start += length
        if start < len(found.tokens):
            lines.append(f"--- {len(found.tokens) - start} tokens of padding")
    if not lines:
        raise UserError(f"--row {row}: a global batch has the rows 0 to {run.global_batch_size - 1}")
    return printable("\n".join(lines))
