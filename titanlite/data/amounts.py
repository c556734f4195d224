"""How much text a run has, how often it reads it, and what is said where that or the vocabulary is a toy.

Invariant: torch is not imported. `titanlite check` answers at once, so it guesses by one block of a large source.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from titanlite.config.run import Run
from titanlite.config.schema import TextSource
from titanlite.config.storage import url_of
from titanlite.data.hub import known
from titanlite.data.mixture import source_shares
from titanlite.data.sources.base import File, RandomAccess, Source
from titanlite.data.sources.files import COMPRESSIONS, find_files, open_quickly
from titanlite.data.stream import DocumentTokenizer, look_into, source_specs
from titanlite.data.tokenizer import Tokenizer

# Up to here, text that is read again teaches almost as much as new text: "Scaling Data-Constrained Language Models"
# (Muennighoff et al., 2023).
MOST_EPOCHS = 4
LEAST_VOCABULARY = 1 / 16  # of the rows of the embedding
_SAMPLE_DOCUMENTS, _SAMPLE_BYTES = 64, 1 << 16


class Size(NamedTuple):
    """How large a source is. None: unknown."""

    contents: str
    """What is said about the source."""
    tokens: int | None = None
    bytes_per_token: float | None = None


def measured(source: Source, tokenizer: Tokenizer) -> Size:
    """The size of an open source; of text by a sample of 64 documents, of which those of a sequential source are the
    first. Warns of characters that the tokenizer loses."""
    if source.num_tokens:
        return Size(source.describe(), source.num_tokens)
    numbers = source.sample() if isinstance(source, RandomAccess) else []
    few = map(source.record, numbers) if isinstance(source, RandomAccess) else islice(source, _SAMPLE_DOCUMENTS)
    texts = [record for record in few if isinstance(record, str)]
    characters = sorted(set("".join(texts)))
    if lost := [c for c in characters if not c.isspace() and c not in tokenizer.decode(tokenizer.encode(c))]:
        some = f"{len(lost):,} characters in a sample of {source.name}, such as {', '.join(map(repr, lost[:5]))}"
        logging.getLogger("titanlite").warning("%s cannot represent %s", tokenizer.path, some)
    tokens, num_bytes = (sum(map(len, map(of, texts))) for of in (tokenizer.encode_array, str.encode))
    width, tokens = num_bytes / max(1, tokens), tokens + 2 * len(texts)  # bos and eos
    if isinstance(source, RandomAccess):
        sizes = source.sizes()  # tokens per byte vary less than tokens per document
        return Size(source.describe(), tokens * int(sizes.sum()) // int(sizes[numbers].sum()), width)
    return Size(source.describe(), tokens * (source.num_documents or 0) // max(1, len(texts)), width)


def guessed(spec: TextSource, tokenizer: Tokenizer) -> Size:
    """About the size of local text that is not opened. Raises UserError: a file cannot be read."""
    name, files = f"{spec.source} {spec.path or ''}".rstrip(), find_files(spec)
    is_plain = spec.source in ("python_stdlib", "text", "jsonl") and not url_of(spec.path)
    if not is_plain or any(file.suffix in COMPRESSIONS for file in files):
        return Size(name)
    with File(files[len(files) // 2]).open() as stream:
        raw = stream.read(_SAMPLE_BYTES)  # JSON with its keys, so rather too many tokens
    tokens = len(tokenizer.encode_array(raw.decode(errors="ignore")))
    return Size(name, sum(file.stat().st_size for file in files) * tokens // max(1, len(raw)))


def looked_at(run: Run, tokenizer: Tokenizer) -> list[Size]:
    """The sizes of a run's sources, after the look into them and into those of the validation that a start takes:
    measured if that takes no time, guessed otherwise. Raises UserError as `open_sources`."""
    sizes, job = list[Size](), run.job
    for validation in (False, True) if job.validation.freq else (False,):
        documents = DocumentTokenizer.of_run(run, tokenizer, validation)
        for spec in source_specs(getattr(job, documents.section)):
            if source := open_quickly(spec, job):
                look_into(source, documents, job.training.seq_len)
            counted = source if source and source.num_documents else None
            sizes.append(measured(counted, tokenizer) if counted else guessed(spec, tokenizer))
    return sizes[: len(source_specs(job.dataset))]


def reads(run: Run, sizes: Sequence[Size]) -> list[tuple[float, float]]:
    """Of each source: its share of the rows, and how often a run reads it, which is 0 where that is unknown."""
    dones, rows = zip(*run.rows, strict=True)
    shares = (np.array(rows) @ [source_shares(run.job.dataset, done) for done in dones] / sum(rows)).tolist()
    tokens = sum(rows) * run.job.training.seq_len / (1 - run.job.validation.holdout)
    return [(share, share * tokens / (size.tokens or math.inf)) for share, size in zip(shares, sizes, strict=True)]


def table(run: Run, sizes: Sequence[Size]) -> str:
    """What a start shows of each source: its share, size and epochs."""
    lines = []
    for (line, tokens, width), (share, epochs) in zip(sizes, reads(run, sizes), strict=True):
        line += f", about {tokens:,} tokens" if tokens and width else ""
        line += f", {width:.2f} bytes a token" if width else ""
        lines.append(f"{share:6.1%}  {line}" + (f"; {epochs:,.2f} epochs in this run" if tokens else ""))
    return "\n".join(lines)


def toy_note(run: Run, tokenizer: Tokenizer, sizes: Sequence[Size]) -> str:
    """What is said, so that nobody overlooks it, where the data or the vocabulary is too small for the run. Empty if
    neither is."""
    lines, rows, specs = list[str](), run.arch.vocab_size, source_specs(run.job.dataset)
    for spec, (text, tokens, _), (_, epochs) in zip(specs, sizes, reads(run, sizes), strict=True):
        if epochs > MOST_EPOCHS and not spec.max_epochs:
            lines += [f"{text}: this run reads all of it {epochs:,.1f} times, because it has about {tokens:,} tokens."]
            lines += [f"After {MOST_EPOCHS} times there is little left to learn from a text. For more text:"]
            lines += ["    titanlite get data fineweb-edu-10bt"]
    if (ids := tokenizer.vocab_size) <= LEAST_VOCABULARY * rows:
        lines += [f"{run.job.tokenizer.path} has {ids:,} tokens, and the model has rows for {rows:,}"]
        lines += ["(model.vocab_size). The others are never trained. For a tokenizer that fits:"]
        fits = [name for name, row in known().items() if row.get("tokens", math.inf) <= rows]
        lines += [f"    titanlite get {['tokenizer gpt2', *fits][-1]}"]
    lines = [f"{' THIS RUN TRAINS A TOY ':=^56}", *lines, "`titanlite get` prints the lines for a job file.", "=" * 56]
    return "\n".join(lines) if len(lines) > 3 else ""
