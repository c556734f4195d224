"""`titanlite prepare`, `data show` and `tokenizer train`: tokenize data once, look at it, make a vocabulary of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from titanlite.config.errors import UserError, counted, printable
from titanlite.config.mistakes import shown
from titanlite.config.options import OptionPath, OptionRanks, Options, parse_beside_job
from titanlite.config.run import Run
from titanlite.load_run import load_data_job, load_run


class Prepare(Options):
    """Tokenize the data of a job once, into shards that training reads."""

    out: OptionPath
    """Folder for the shards. The work of an interrupted `prepare` in this folder is kept and continued."""
    workers: Annotated[PositiveInt, Field(le=1024)] | None = None
    """Number of threads that tokenize. Left out: one per core of the machine."""


def prepare(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong, or the shards cannot be written."""
    options, words = parse_beside_job(Prepare, argv, "prepare")
    run = load_run(words, world_size=1, trains=False)
    from titanlite.data.prepare import prepare as write_shards

    write_shards(run, options.out, options.workers or os.cpu_count() or 1)


class Show(Options):
    """Print the rows of one global batch, with the documents that they consist of and their text."""

    step: PositiveInt = 1
    """Number of the global batch; the first one is 1."""
    row: NonNegativeInt | None = None
    """Number of one row of the batch, counted from 0. Left out: all rows."""
    world_size: OptionRanks = 1
    """Number of ranks of the run. It decides the global batch size if training.global_batch_size is -1."""


def data(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong, or the data cannot be read."""
    options, words = parse_beside_job(Show, argv[1:] if argv[:1] == ["show"] else argv, "data show")
    print(show_step(load_run(words, options.world_size, trains=False), options.step, options.row))


def show_step(run: Run, step: int, row: int | None) -> str:
    """The rows of global batch `step` (the first one is 1), or one of them: which documents they are made of, from
    which token on, and their text with its control characters escaped. Where the text is not prepared, everything up
    to there is tokenized first.

    Raises:
        UserError: there is no such step or row, or the data cannot be read.
    """
    from titanlite.data.stream import BatchReader, OutOfData, training_data
    from titanlite.data.tokenizer import load_tokenizer

    if step > run.job.training.steps:
        raise UserError(f"--step {step}: the run has {run.job.training.steps} (training.steps)")
    data, lines = training_data(run, load_tokenizer(run.tokenizer_path, run.job)), list[str]()
    if row is not None and row >= run.batch_size(step - 1):
        raise UserError(f"--row {row}: its global batch has the rows 0 to {run.batch_size(step - 1) - 1}")
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
        if start < len(found.tokens):
            lines.append(f"--- {len(found.tokens) - start} tokens of padding")
    return printable("\n".join(lines))


class Train(Options):
    """Train a byte-level BPE on the data of a job, with Llama 3's split pattern and special tokens."""

    dropped: ClassVar = {
        "data": (None, "is gone: the keys of a job name the text, as in --dataset.source jsonl --dataset.path FILE."),
        "text_column": (None, "is gone: --dataset.text_column."),
        "holdout": (None, "is gone: compare the bits per byte of validations with each tokenizer."),
    }

    vocab_size: Annotated[int, Field(gt=512, lt=1 << 24)]
    """Number of ids: the 256 bytes, the tokens that BPE merges from them, and Llama 3's 256 special tokens."""
    out: OptionPath
    """Folder for tokenizer.json and tokenizer.model, which give the same ids. Neither may exist there yet."""
    max_bytes: PositiveInt = 1_000_000_000
    """Largest amount of text to read. It is read in random order if the source allows that, and from a mix by its
    weights. Training needs several times this memory."""


def tokenizer(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: an option is wrong, or the text cannot be read or is too little."""
    options, words = parse_beside_job(Train, argv[1:] if argv[:1] == ["train"] else argv, "tokenizer train")
    from titanlite.data.tokenizer_files import train_tokenizer

    job = load_data_job(words)
    made = train_tokenizer(job.dataset, options.out, options.vocab_size, options.max_bytes, job)
    read = f"{counted(made.documents, 'document')} ({made.num_bytes:,} bytes, {made.bytes_per_token:.2f} a token)"
    wrote = f"Wrote {made.tiktoken} and {made.json}: {options.vocab_size:,} ids, from {read}."
    print(printable(f"{wrote}\nA job that uses it needs\n\n{tokenizer_tables(made.json, options.vocab_size)}"))


def tokenizer_tables(path: Path, vocab_size: int) -> str:
    """The part of a job file that uses the tokenizer `path`."""
    rows = -(-vocab_size // 128) * 128  # a multiple that suits the matrix units
    return f"[tokenizer]\npath = {shown(str(path))}\n\n[model]\nvocab_size = {rows}"
