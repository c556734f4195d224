"""`titanlite tokenizer train`: makes a vocabulary from your own text."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from titanlite.config.errors import UserError, printable
from titanlite.config.files import make_folder
from titanlite.config.load import load_job, resolve_path
from titanlite.config.mistakes import shown
from titanlite.config.options import OptionPath, Options, parse_beside_job
from titanlite.config.schema import DataSource, TextSource
from titanlite.config.schema import Tokenizer as TokenizerKeys

if TYPE_CHECKING:
    from titanlite.data.bpe import Sample

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
    specs = _specs(options, words)
    files = [options.out / name for name in ("tokenizer.model", "tokenizer.json")]
    if there := [file for file in files if os.path.lexists(file)]:
        raise UserError(f"{there[0]} exists already. Choose another folder, or remove it.")
    make_folder(options.out)

    from titanlite.data.bpe import Sample, tiktoken_to_json, train_tokens, write_tiktoken
    from titanlite.data.sources import open_source
    from titanlite.data.tokenizer import llama3_special_tokens

    total = sum(spec.weight for spec in specs)
    if not total:
        raise UserError("dataset.sources: each weight is 0, so there is nothing to read.")
    shares = [int(options.max_bytes * spec.weight / total) for spec in specs]
    samples = [Sample(open_source(s), share, options.holdout) for s, share in zip(specs, shares, strict=True) if share]
    specials = len(llama3_special_tokens())
    texts = chain.from_iterable(samples)
    if (first := next(texts, None)) is None:
        reasons = [f": {sample.first_skipped}" for sample in samples if sample.first_skipped]
        raise UserError(f"There is no text to train on{''.join(reasons[:1]) or '.'}")
    tokens = train_tokens(chain([first], texts), options.vocab_size - specials)
    try:
        write_tiktoken(tokens, files[0])
        tiktoken_to_json(*files)
    except OSError as error:
        raise UserError(f"{options.out} cannot be written: {error.strerror}. Choose another folder.") from None
    print(printable(_report(samples, files)))
    print("\n".join(["A job that uses it needs\n", *_job_lines(files[1], options.vocab_size)]))


def _specs(options: Train, words: list[str]) -> list[DataSource]:
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


def _report(parts: Sequence[Sample], files: list[Path]) -> str:
    """Report what was made and how it compares with the shipped tokenizer. Checks that both files give the same ids."""
    from titanlite.data.bpe import tokens_per_byte
    from titanlite.data.tokenizer import load_tokenizer

    ours, same, shipped = (load_tokenizer(file) for file in (*files, resolve_path(TokenizerKeys().path)))
    held_out = list(chain.from_iterable(part.held_out for part in parts))
    documents, size = sum(part.documents for part in parts), sum(part.num_bytes for part in parts)
    made = f"{ours.vocab_size:,} ids, from {documents:,} documents ({size:,} bytes)"
    lines = [f"Wrote {files[0]} and {files[1]}: {made}."]
    if skipped := sum(part.skipped for part in parts):
        lines.append(f"{skipped:,} records cannot be read and were left out.")
    assert all(ours.encode(text) == same.encode(text) for text in held_out), "the two files give different ids"
    if held_out:
        lines.append(f"{len(held_out):,} documents were kept back. Tokens per byte of them:")
        lines += [
            f"  {tokens_per_byte(tokenizer, held_out):.4f}  {name} ({tokenizer.vocab_size:,} ids)"
            for name, tokenizer in (("this tokenizer", ours), ("the shipped one", shipped))
        ]
    else:
        lines.append("No document was kept back, so nothing is measured.")
    return "\n".join(lines)


def _job_lines(path: Path, vocab_size: int) -> list[str]:
    rows = -(-vocab_size // 128) * 128  # a multiple that suits the matrix units
    return ["[tokenizer]", f"path = {shown(str(path))}", "", "[model]", f"vocab_size = {json.dumps(rows)}"]
