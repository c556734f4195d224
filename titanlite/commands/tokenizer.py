"""`titanlite tokenizer train`: makes a vocabulary from your own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from titanlite.config.errors import UserError, printable
from titanlite.config.load import load_job, resolve_path
from titanlite.config.mistakes import shown
from titanlite.config.options import OptionPath, Options, parse_beside_job
from titanlite.config.schema import DataSource, TextSource
from titanlite.config.schema import Tokenizer as TokenizerKeys


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


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: an option is wrong, or the text cannot be read or is too little."""
    words = list(argv)
    if words[:1] != ["train"] and not {"-h", "--help"} & set(words):
        found = f"`titanlite tokenizer {words[0]}` is unknown. " if words else ""
        raise UserError(f"{found}Write `titanlite tokenizer train --vocab-size N --out DIR --data FILES`.")
    options, words = parse_beside_job(Train, [word for word in words if word != "train"], "tokenizer train")
    if options.data and words:
        raise UserError(f"{' '.join(words)}: either --data or keys of a job say where the text is, not both.")
    from titanlite.data.sources import source_of_file
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.data.tokenizer_files import tokens_per_byte, train_tokenizer

    sources = [source_of_file(file, options.text_column) for file in options.data] or _of_job(words)
    limits = {"max_bytes": options.max_bytes, "holdout": options.holdout}
    made = train_tokenizer(sources, options.out, options.vocab_size, **limits)
    read = f"{made.documents:,} documents ({made.num_bytes:,} bytes)"
    lines = [f"Wrote {made.tiktoken} and {made.json}: {options.vocab_size:,} ids, from {read}."]
    if made.skipped[0]:
        lines.append(f"{made.skipped[0]:,} records cannot be read and were left out.")
    if made.held_out:
        lines.append(f"{len(made.held_out):,} documents were kept back. Tokens per byte of them:")
        shipped = resolve_path(TokenizerKeys().path)
        for name, path in (("this tokenizer", made.tiktoken), ("the shipped one", shipped)):
            tokenizer = load_tokenizer(path)
            rate = tokens_per_byte(tokenizer, made.held_out)
            lines.append(f"  {rate:.4f}  {name} ({tokenizer.vocab_size:,} ids)")
    else:
        lines.append("No document was kept back, so nothing is measured.")
    rows = -(-options.vocab_size // 128) * 128  # a multiple that suits the matrix units
    job = ["[tokenizer]", f"path = {shown(str(made.json))}", "", "[model]", f"vocab_size = {rows}"]
    print(printable("\n".join([*lines, "A job that uses it needs\n", *job])))


def _of_job(words: Sequence[str]) -> list[DataSource]:
    """The data of the job."""
    dataset = load_job(words).dataset
    return list(dataset.sources) or [DataSource(**{key: getattr(dataset, key) for key in TextSource.model_fields})]
