"""For people: a table of the sources before a run, and the text that one step of it reads."""

from __future__ import annotations

import logging

import numpy as np

from titanlite.config.errors import UserError, printable
from titanlite.config.run import Run
from titanlite.config.schema import Dataset
from titanlite.data.mixture import stage_weights
from titanlite.data.sources.base import RandomAccess, Source
from titanlite.data.sources.files import FileSpans
from titanlite.data.sources.shards import Shards
from titanlite.data.stream import BatchReader, OutOfData, PackedDataset, sample, sample_numbers, training_data
from titanlite.data.tokenizer import Tokenizer, load_tokenizer


def source_table(dataset: Dataset, data: PackedDataset, steps: int, run_tokens: int) -> str:
    """Share, contents and epochs of each source in a run of `steps`, which reads `run_tokens`. Tokens of text are
    estimated from 64 documents. Warns of text that the tokenizer cannot represent."""
    lines, stages = list[str](), stage_weights(dataset)
    ends = np.clip([*(start for start, _ in stages[1:]), steps], 0, steps)
    shares = np.diff(ends, prepend=0) @ [np.divide(weights, sum(weights)) for _, weights in stages] / steps
    for source, share in zip(data.sources, shares, strict=True):
        line = f"{share:6.1%}  {source.describe()}"
        if tokens := _count_tokens(source, data.tokenizer.tokenizer):
            estimate = "" if isinstance(source, Shards) else f", about {tokens:,} tokens"
            line += (
                f"{estimate}; {share * run_tokens / (tokens * (1 - data.tokenizer.holdout)):,.2f} epochs in this run"
            )
        lines.append(line)
    return "\n".join(lines)


def _count_tokens(source: Source, tokenizer: Tokenizer) -> int | None:
    """Tokens of a source, estimated where it is text; None: unknown. Warns of characters that the tokenizer loses."""
    if isinstance(source, Shards) or not isinstance(source, RandomAccess):
        return source.num_tokens if isinstance(source, Shards) else None
    texts = [record for record in sample(source) if isinstance(record, str)]
    characters = sorted(set("".join(texts)))
    if lost := [c for c in characters if not c.isspace() and c not in tokenizer.decode(tokenizer.encode(c))]:
        some = f"{len(lost):,} characters in a sample of {source.name}, such as {', '.join(map(repr, lost[:5]))}"
        logging.getLogger("titanlite").warning("%s cannot represent %s", tokenizer.path, some)
    # Tokens per byte vary less than tokens per document.
    sizes = source.sizes() if isinstance(source, FileSpans) else np.ones(source.num_units, dtype=int)
    tokens = sum(len(tokenizer.encode_array(text)) + 2 for text in texts)
    return tokens * int(sizes.sum()) // int(sizes[sample_numbers(source)].sum())


def show_step(run: Run, step: int, row: int | None) -> str:
    """The rows of global batch `step` (the first one is 1), or one of them: which documents they are made of, from
    which token on, and their text with its control characters escaped. Where the text is not prepared, everything up
    to there is tokenized first.

    Raises:
        UserError: there is no such step or row, or the data cannot be read.
    """
    data, lines = training_data(run, load_tokenizer(run.tokenizer_path)), list[str]()
    if row is not None and row >= run.global_batch_size:
        raise UserError(f"--row {row}: a global batch has the rows 0 to {run.global_batch_size - 1}")
    for _ in range(step - 1):
        data.mixture.next_batch()
    try:
        rows = BatchReader(data).next_batch()
    except OutOfData as error:
        raise UserError(f"step {step} does not exist: {error}") from None
    for found in rows if row is None else [rows[row]]:
        source, start = data.sources[found.source], 0
        lines.append(f"=== step {step}, row {found.k}, {source.name}")
        for part, document, offset, length in found.segments.tolist():
            lines.append(f"--- {source.where(part, document)}, tokens {offset} to {offset + length - 1}")
            lines.append(data.tokenizer.tokenizer.decode(found.tokens[start : start + length].tolist()))
            start += length
    return printable("\n".join(lines))
