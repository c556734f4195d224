"""Makes tokenizer files: a byte-level BPE from text, and what other programs read.

Invariant: a tokenizer.model and the tokenizer.json made of it give the same ids on any text, and the same texts give
the same files.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder, not_writable, write_whole
from titanlite.config.schema import Dataset, JobConfig
from titanlite.data import tokenizer as formats
from titanlite.data.mixture import stage_weights
from titanlite.data.shuffle import permuted
from titanlite.data.sources.base import Prepared, RandomAccess, Source
from titanlite.data.sources.files import open_source
from titanlite.data.stream import source_specs
from titanlite.data.tokenizer import (
    HuggingFaceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    byte_level_symbols,
    llama3_special_tokens,
)

_SAMPLE_DOCUMENTS = 256


@dataclass
class Trained:
    """A tokenizer that was made, and the text that it was made from.

    Attributes:
        tiktoken, json: its files, which give the same ids.
        documents, num_bytes: what it was trained on.
        bytes_per_token: of a sample of these documents.
    """

    tiktoken: Path
    json: Path
    documents: int = 0
    num_bytes: int = 0
    bytes_per_token: float = 0.0


def train_tokenizer(
    dataset: Dataset, out: Path, vocab_size: int, max_bytes: int = 1_000_000_000, job: JobConfig | None = None
) -> Trained:
    """Make a byte-level BPE with Llama 3's split pattern and special tokens, in both file formats.

    Args:
        dataset: says where the text is. Each source of a mix is read by its weight.
        out: a folder, which is made if it is not there.
        vocab_size: number of ids, with Llama 3's 256 special tokens.
        max_bytes: largest amount of text to read.
        job: has the keys of a source that a plugin brings.

    Raises:
        UserError: `out` has a tokenizer already or cannot be written, or the text cannot be read or is too little.
    """
    made = Trained(out / "tokenizer.model", out / "tokenizer.json")
    for file in (made.tiktoken, made.json):
        if os.path.lexists(file):
            raise UserError(f"{file} exists already. Choose another folder, or remove it.")
    if problem := not_writable(out.absolute()):
        raise UserError(f"{out} cannot be made: {problem}")
    (_, weights), *_ = stage_weights(dataset)
    most = [int(max_bytes * weight / sum(weights)) for weight in weights]
    shares = [(open_source(spec, job), share) for spec, share in zip(source_specs(dataset), most, strict=True) if share]
    skip_bad = dataset.on_bad_record == "skip"
    texts = chain.from_iterable(_texts(made, source, share, skip_bad) for source, share in shares)
    sample = list(islice(texts, _SAMPLE_DOCUMENTS))
    tokens = _train(chain(sample, texts), vocab_size)
    if len(tokens) + len(llama3_special_tokens()) < vocab_size:
        raise UserError(f"There is too little text for {vocab_size:,} ids. Lower --vocab-size.")
    make_folder(out)
    write_whole(made.tiktoken, b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))
    tokenizer = TiktokenTokenizer(made.tiktoken)
    write_whole(made.json, tiktoken_to_json(tokenizer).to_str().encode())
    count = sum(len(tokenizer.encode_array(text)) for text in sample)
    made.bytes_per_token = sum(len(text.encode()) for text in sample) / max(1, count)
    return made


def _texts(made: Trained, source: Source, most_bytes: int, skip_bad: bool) -> Iterator[str]:
    """Documents of a source up to a number of bytes, in random order where it can be read so; counts them in `made`."""
    end, records = made.num_bytes + most_bytes, iter(source)
    if isinstance(source, RandomAccess):
        total = source.num_units
        records = (source.record(int(permuted(np.array([i]), total, "tokenizer")[0])) for i in range(total))
    for record in records:
        if made.num_bytes >= end:
            return
        if isinstance(record, Prepared):
            raise UserError(f"{source.name} holds tokens, not text: name the text that they were made from.")
        if isinstance(record, str):
            made.documents += 1
            made.num_bytes += len(record.encode())
            yield record
        elif not skip_bad:
            raise record


def _train(texts: Iterator[str], vocab_size: int) -> list[bytes]:
    """The tokens but the special ones, in the order in which they were joined: the 256 bytes, then ever longer ones. If
    the texts do not hold so many, there are fewer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splits()
    size, alphabet = vocab_size - len(llama3_special_tokens()), sorted(pre_tokenizers.ByteLevel.alphabet())
    # A token of more than 256 bytes is a ruler of dashes, not a word.
    trainer = trainers.BpeTrainer(vocab_size=size, max_token_length=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    vocab, to_byte = tokenizer.get_vocab(), byte_level_symbols()
    return [bytes(to_byte[symbol] for symbol in token) for token in sorted(vocab, key=vocab.__getitem__)]


def _splits() -> Any:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(formats.LLAMA3_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def tiktoken_to_json(source: TiktokenTokenizer) -> Any:
    """The same tokenizer as a `tokenizers.Tokenizer`. It gives the same ids, and puts bos before a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    specials, symbols = llama3_special_tokens(), {byte: symbol for symbol, byte in byte_level_symbols().items()}
    tokens = ["".join(map(symbols.__getitem__, token)) for token in sorted(source.ranks, key=source.ranks.__getitem__)]
    known = set(tokens)
    # tiktoken joins any neighbours whose bytes together are a token; tokenizers joins listed pairs only: list them all.
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    result: Any = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=True))
    result.pre_tokenizer, result.decoder = _splits(), decoders.ByteLevel()
    result.add_special_tokens([AddedToken(name, special=True) for name in specials])
    bos = specials[0]
    begin = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, len(tokens))])
    result.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return result


def write_tokenizer(tokenizer: Tokenizer, out: Path, max_seq_len: int) -> dict[str, int | None]:
    """Write a tokenizer into a Hugging Face folder. Tiktoken's format is converted. The file of a plugin's tokenizer is
    copied as it is, and transformers does not load it.

    Args:
        max_seq_len: longest sequence of the model, in tokens.

    Returns:
        bos_token_id and eos_token_id.
    """
    path, config = tokenizer.path, {}
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    if isinstance(tokenizer, TiktokenTokenizer):
        tiktoken_to_json(tokenizer).save(str(out / "tokenizer.json"), pretty=False)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        shutil.copyfile(path, out / "tokenizer.json")
        config = formats.read_config(path)  # it may have a chat template or other names
    else:
        shutil.copyfile(path, out / path.name)
        return ids
    if not config:
        names = {key.removesuffix("_id"): tokenizer.decode([token]) for key, token in ids.items() if token is not None}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": max_seq_len}
    config["split_special_tokens"] = True  # what looks like a special token in a text is text, as in training
    (out / formats.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return ids
