"""Make a tokenizer: a byte-level BPE with Llama 3's split pattern and special tokens, in both file formats.

Invariant: both files give the same ids on any text, and the same texts give the same files.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder
from titanlite.config.schema import DataSource
from titanlite.data.order import Permutation
from titanlite.data.sources import open_source
from titanlite.data.sources.base import BadRecord, RandomAccess, Sequential, Source
from titanlite.data.sources.shards import Shards
from titanlite.data.tokenizer import (
    TiktokenTokenizer,
    Tokenizer,
    byte_level_symbols,
    load_tokenizer,
)
from titanlite.data.tokenizer_file import LLAMA3_PATTERN, llama3_special_tokens

LONGEST_TOKEN = 256  # bytes: a longer one is a ruler of dashes, not a word


@dataclass
class Sample:
    """Documents of a source, in random order where it can be read so, up to a number of bytes. Iterate over it once.

    Attributes:
        holdout: every so many documents one is kept back; 0: none.
        held_out: those.
        documents, num_bytes: what was given for training.
        skipped: records that could not be read.
        first_skipped: what was wrong with the first of them.
    """

    source: Source
    most_bytes: int
    holdout: int
    held_out: list[str] = field(default_factory=list)
    documents: int = 0
    num_bytes: int = 0
    skipped: int = 0
    first_skipped: BadRecord | None = None

    def __iter__(self) -> Iterator[str]:
        count = 0
        for record in self._records():
            if isinstance(record, BadRecord):
                self.skipped += 1
                self.first_skipped = self.first_skipped or record
                continue
            count += 1
            if self.holdout and count % self.holdout == 0:
                self.held_out.append(record)
                continue
            self.documents += 1
            self.num_bytes += len(record.encode())
            yield record
            if self.num_bytes >= self.most_bytes:
                return

    def _records(self) -> Iterator[str | BadRecord]:
        if isinstance(self.source, Shards):
            raise UserError(f"{self.source.name} holds tokens, not text: name the text that they were made from.")
        if isinstance(self.source, Sequential):
            for part in range(self.source.num_parts):
                yield from self.source.read(part, 0)
            return
        assert isinstance(self.source, RandomAccess)
        order = Permutation(len(self.source), "tokenizer")
        for number in range(len(self.source)):
            record = self.source.record(int(order(np.array([number]))[0]))
            assert not isinstance(record, np.ndarray)
            yield record


@dataclass(frozen=True)
class Trained:
    """A tokenizer that was made, and the text that it was made from."""

    tiktoken: Path
    """Its tokenizer.model."""
    json: Path
    """Its tokenizer.json, which gives the same ids."""
    samples: list[Sample]
    """What was read of each source."""

    @property
    def held_out(self) -> list[str]:
        """The documents that were kept back."""
        return [text for sample in self.samples for text in sample.held_out]


def train_tokenizer(
    sources: Sequence[DataSource], out: Path, vocab_size: int, *, max_bytes: int = 1_000_000_000, holdout: int = 50
) -> Trained:
    """Make a tokenizer in both file formats.

    Args:
        sources: where the text is. Each source is read by its weight.
        out: a folder, which is made if it is not there.
        vocab_size: number of ids, with Llama 3's 256 special tokens.
        max_bytes: largest amount of text to read.
        holdout: of this many documents one is held out; 0: none.

    Raises:
        UserError: `out` has a tokenizer already or cannot be written, or the text cannot be read or is too little.
    """
    files = [out / name for name in ("tokenizer.model", "tokenizer.json")]
    if there := [file for file in files if os.path.lexists(file)]:
        raise UserError(f"{there[0]} exists already. Choose another folder, or remove it.")
    make_folder(out)
    total = sum(source.weight for source in sources)
    if not total:
        raise UserError("dataset.sources: each weight is 0, so there is nothing to read.")
    shares = [int(max_bytes * source.weight / total) for source in sources]
    samples = [Sample(open_source(s), share, holdout) for s, share in zip(sources, shares, strict=True) if share]
    texts = chain.from_iterable(samples)
    if (first := next(texts, None)) is None:
        reasons = [f": {sample.first_skipped}" for sample in samples if sample.first_skipped]
        raise UserError(f"There is no text to train on{''.join(reasons[:1]) or '.'}")
    tokens = train_tokens(chain([first], texts), vocab_size - len(llama3_special_tokens()))
    try:
        write_tiktoken(tokens, files[0])
        tiktoken_to_json(*files)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}. Choose another folder.") from None
    made = Trained(files[0], files[1], samples)
    ours, same = (load_tokenizer(file) for file in files)
    assert all(ours.encode(text) == same.encode(text) for text in made.held_out), "the two files give different ids"
    return made


def train_tokens(texts: Iterator[str], size: int) -> list[bytes]:
    """`size` tokens in the order in which they were joined: the 256 bytes, then ever longer ones.

    Raises:
        UserError: the texts do not hold so many.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab, to_byte = tokenizer.get_vocab(), byte_level_symbols()
    if len(vocab) < size:
        most = len(vocab) + len(llama3_special_tokens())
        raise UserError(f"The text gives a vocabulary of {most:,} at most. Lower --vocab-size, or give more text.")
    return [bytes(to_byte[symbol] for symbol in token) for token in sorted(vocab, key=vocab.__getitem__)]


def write_tiktoken(tokens: list[bytes], out: Path) -> None:
    """Write a tokenizer.model: a token in base64 and its rank on each line."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    out.write_text("".join(lines))


def tokens_per_byte(tokenizer: Tokenizer, texts: list[str]) -> float:
    """How many tokens a byte of `texts` takes, special tokens apart."""
    return sum(len(tokenizer.encode_array(text)) for text in texts) / max(1, sum(len(t.encode()) for t in texts))


def tiktoken_to_json(path: Path, out: Path) -> None:
    """Convert Llama 3's tokenizer.model into a tokenizer.json that gives the same ids, and puts bos before a text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    source = TiktokenTokenizer(path)
    specials = llama3_special_tokens()
    symbols = {byte: symbol for symbol, byte in byte_level_symbols().items()}
    tokens = [
        "".join(symbols[byte] for byte in source.token_bytes(token))
        for token in range(source.vocab_size - len(specials))
    ]
    known = set(tokens)
    # tiktoken joins any neighbours whose bytes together are a token; tokenizers joins listed pairs only: list them all.
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    result = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
    result.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    result.add_special_tokens([AddedToken(name, special=True) for name in specials])
    bos = specials[0]
    begin = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, len(tokens))])
    result.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])  # type: ignore[assignment]
    result.save(str(out), pretty=False)
