"""`titanlite tokenizer train`: makes a vocabulary from your own text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from titanlite.config.errors import UserError, printable
from titanlite.config.load import load_job, resolve_path
from titanlite.config.mistakes import shown
from titanlite.config.options import OptionPath, Options, parse_beside_job
from titanlite.config.schema import DataSource, TextSource
from titanlite.config.schema import Tokenizer as TokenizerKeys

if TYPE_CHECKING:
    from titanlite.data.bpe import Trained

_LINES = dict.fromkeys((".jsonl", ".json", ".gz", ".zst"), "jsonl")
_SUFFIXES = _LINES | {".txt": "text", ".parquet": "parquet"}


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
    sources = _sources(options, words)
    from titanlite.data.bpe import train_tokenizer

    made = train_tokenizer(
        sources, options.out, options.vocab_size, max_bytes=options.max_bytes, holdout=options.holdout
    )
    print(printable(_report(made)))
    print("\n".join(["A job that uses it needs\n", *_job_lines(made.json, options.vocab_size)]))


def _sources(options: Train, words: list[str]) -> list[DataSource]:
    """The sources of the text: the files, or the data of the job."""
    if not options.data:
        dataset = load_job(words).dataset
        fields = TextSource.model_fields
        return list(dataset.sources) or [DataSource(**{key: getattr(dataset, key) for key in fields})]
    if words:
        raise UserError(f"{' '.join(words)}: either --data or keys of a job say where the text is, not both.")
    if unknown := [file for file in options.data if file.suffix not in _SUFFIXES]:
        raise UserError(f"--data {unknown[0]}: the name must end in {', '.join(_SUFFIXES)}.")
    return [
        DataSource.model_validate(
            {"source": _SUFFIXES[file.suffix], "path": str(file), "text_column": options.text_column}
        )
        for file in options.data
    ]


def _report(made: Trained) -> str:
    """What was made, and how it compares with the shipped tokenizer."""
    from titanlite.data.bpe import tokens_per_byte
    from titanlite.data.tokenizer import load_tokenizer

    ours, shipped = load_tokenizer(made.tiktoken), load_tokenizer(resolve_path(TokenizerKeys().path))
    documents = sum(sample.documents for sample in made.samples)
    size = sum(sample.num_bytes for sample in made.samples)
    text = f"{ours.vocab_size:,} ids, from {documents:,} documents ({size:,} bytes)"
    lines = [f"Wrote {made.tiktoken} and {made.json}: {text}."]
    if skipped := sum(sample.skipped for sample in made.samples):
        lines.append(f"{skipped:,} records cannot be read and were left out.")
    if not made.held_out:
        return "\n".join([*lines, "No document was kept back, so nothing is measured."])
    lines.append(f"{len(made.held_out):,} documents were kept back. Tokens per byte of them:")
    lines += [
        f"  {tokens_per_byte(tokenizer, made.held_out):.4f}  {name} ({tokenizer.vocab_size:,} ids)"
        for name, tokenizer in (("this tokenizer", ours), ("the shipped one", shipped))
    ]
    return "\n".join(lines)


def _job_lines(path: Path, vocab_size: int) -> list[str]:
    rows = -(-vocab_size // 128) * 128  # a multiple that suits the matrix units
    return ["[tokenizer]", f"path = {shown(str(path))}", "", "[model]", f"vocab_size = {json.dumps(rows)}"]
