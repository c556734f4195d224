"""`titanlite prepare`, `data show` and `tokenizer train`: tokenize data once, look at it, make a vocabulary of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from titanlite.config.errors import UserError, printable
from titanlite.config.load import load_job, resolve_path
from titanlite.config.mistakes import shown
from titanlite.config.options import OptionPath, OptionRanks, Options, parse_beside_job
from titanlite.config.schema import Tokenizer as TokenizerKeys
from titanlite.load_run import load_run


class Prepare(Options):
    """Tokenize the data of a job once, into shards that training reads."""

    out: OptionPath
    """Folder for the shards. The work of an interrupted `prepare` in this folder is kept and continued."""
    workers: PositiveInt | None = None
    """Number of processes that tokenize. Left out: one per core of the machine."""


def prepare(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong, or the shards cannot be written."""
    options, words = parse_beside_job(Prepare, argv, "prepare")
    run = load_run(words, world_size=1)
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
    run = load_run(words, options.world_size)
    from titanlite.data.show import show_step

    print(show_step(run, options.step, options.row))


class Train(Options):
    """Train a byte-level BPE on your own text, with Llama 3's split pattern and special tokens."""

    vocab_size: Annotated[int, Field(gt=512, lt=1 << 24)]
    """Number of ids: the 256 bytes, the tokens that BPE merges from them, and Llama 3's 256 special tokens."""
    out: OptionPath
    """Folder for tokenizer.json and tokenizer.model, which give the same ids. Neither may exist there yet."""
    data: tuple[OptionPath, ...] = ()
    """Text files: .jsonl (also .gz and .zst), .txt and .parquet. Left out: the data of the job."""
    text_column: str = "text"
    """Name of the field of --data that has the text."""
    max_bytes: PositiveInt = 1_000_000_000
    """Largest amount of text to read. It is read in random order if the source allows that, and from a mix by its
    weights. Training needs several times this memory."""
    holdout: NonNegativeInt = 50
    """Of this many documents one is held out, to measure tokens per byte on it. 0: none is held out, and nothing is
    measured."""


def tokenizer(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: an option is wrong, or the text cannot be read or is too little."""
    options, words = parse_beside_job(Train, argv[1:] if argv[:1] == ["train"] else argv, "tokenizer train")
    if options.data and words:
        raise UserError(f"{' '.join(words)}: either --data or keys of a job say where the text is, not both.")
    from titanlite.data.sources import source_of_file
    from titanlite.data.stream import source_specs
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.data.tokenizer_files import train_tokenizer

    sources = [source_of_file(file, options.text_column) for file in options.data]
    sources = sources or source_specs(load_job(words).dataset)
    limits = {"max_bytes": options.max_bytes, "holdout": options.holdout}
    made = train_tokenizer(sources, options.out, options.vocab_size, **limits)
    read = f"{made.documents:,} documents ({made.num_bytes:,} bytes)"
    lines = [f"Wrote {made.tiktoken} and {made.json}: {options.vocab_size:,} ids, from {read}."]
    if made.skipped:
        lines.append(f"{len(made.skipped):,} records cannot be read and were left out.")
    if made.held_out:
        lines.append(f"{len(made.held_out):,} documents were kept back. Tokens per byte of them:")
        size, shipped = sum(len(text.encode()) for text in made.held_out), resolve_path(TokenizerKeys().path)
        for name, path in (("this tokenizer", made.tiktoken), ("the shipped one", shipped)):
            loaded = load_tokenizer(path)
            rate = sum(len(loaded.encode_array(text)) for text in made.held_out) / max(1, size)
            lines.append(f"  {rate:.4f}  {name} ({loaded.vocab_size:,} ids)")
    rows = -(-options.vocab_size // 128) * 128  # a multiple that suits the matrix units
    job = ["[tokenizer]", f"path = {shown(str(made.json))}", "", "[model]", f"vocab_size = {rows}"]
    print(printable("\n".join([*lines, "A job that uses it needs\n", *job])))
