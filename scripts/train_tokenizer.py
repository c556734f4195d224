"""Train the tokenizer that titanlite ships: a byte-level BPE on the Python standard library, in both file formats.

    python scripts/train_tokenizer.py [--out assets/tokenizer]

3,840 byte-pair tokens and Llama 3's 256 special ones make 4,096 ids. The shipped files were made with Python 3.11.
The result depends on the interpreter's standard library alone. Takes about half a minute.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from titanlite.config.schema import DataSource
from titanlite.data.sources import RandomAccess, open_source
from titanlite.data.tokenizer import LLAMA3_PATTERN, byte_level_symbols, llama3_special_tokens

BASE_TOKENS = 3840


def byte_level(model: models.Model) -> Tokenizer:
    """A tokenizer with Llama 3's split pattern and one symbol for each byte."""
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def train(texts: list[str], size: int) -> list[str]:
    """The `size` tokens in the order in which they were merged, each written in byte-level symbols."""
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def all_merges(tokens: list[str]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third one, by the rank of the third.

    tiktoken joins any neighbours whose bytes together are a token; the tokenizers library joins listed pairs only. The
    pairs that training found are therefore not enough to get equal ids.
    """
    known = set(tokens)
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "assets" / "tokenizer")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    source = open_source(DataSource(source="python_stdlib"))
    assert isinstance(source, RandomAccess)
    tokens = train([str(source[i]) for i in range(len(source))], BASE_TOKENS)
    assert len(tokens) == BASE_TOKENS

    to_byte = byte_level_symbols()
    lines = (
        base64.b64encode(bytes(to_byte[symbol] for symbol in token)).decode() + f" {rank}\n"
        for rank, token in enumerate(tokens)
    )
    (out / "tokenizer.model").write_text("".join(lines))

    vocab = {token: rank for rank, token in enumerate(tokens)}
    tokenizer = byte_level(models.BPE(vocab, all_merges(tokens), ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in llama3_special_tokens()])
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    print(f"{out}: {tokenizer.get_vocab_size():,} tokens from {source.describe()}")


if __name__ == "__main__":
    main()
