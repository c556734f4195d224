"""Training tokenizers, and writing tokenizer files for other programs.

Invariant: A tokenizer.model and the tokenizer.json converted from it encode any text to the same
ids. Training on the same texts writes the same files.
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
from titanlite.config.files import find_write_problem, make_folder, write_output
from titanlite.config.schema import Dataset, JobConfig
from titanlite.data.documents import source_specs
from titanlite.data.mixture import find_weights
from titanlite.data.shuffle import permuted
from titanlite.data.sources.base import RandomAccess, Source, TokenSource
from titanlite.data.sources.files import open_source
from titanlite.data.sources.records import CONVERSION_REMEDY, BadRecord, Prepared, Record
from titanlite.data.tokenizer import (
    LLAMA3_PATTERN,
    TOKENIZER_CONFIG,
    HuggingFaceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    decode_vocabulary,
    encode_vocabulary,
    llama3_special_tokens,
    read_config,
)

_SAMPLE_DOCUMENTS = 256
_MAX_TOKEN_BYTES = 256  # longer tokens would be lines of dashes rather than words


@dataclass
class TrainedTokenizer:
    """Files of a trained tokenizer, and statistics of its training text.

    Attributes:
        tiktoken: Path of tokenizer.model.
        json: Path of tokenizer.json, which encodes texts to the same ids.
        documents: Number of training documents.
        num_bytes: Number of bytes of the training text in UTF-8.
        bytes_per_token: Compression of the tokenizer, measured on up to 256 training documents.
    """

    tiktoken: Path
    json: Path
    documents: int = 0
    num_bytes: int = 0
    bytes_per_token: float = 0.0


def train_tokenizer(
    dataset: Dataset,
    out: str | Path,
    vocab_size: int,
    max_bytes: int = 1_000_000_000,
    job: JobConfig | None = None,
) -> TrainedTokenizer:
    """Train a byte-level BPE tokenizer with Llama 3's split pattern and special tokens.

    Args:
        dataset: Sources of the text. The sources of a mixture are read in proportion to their
            weights.
        out: Folder for tokenizer.model and tokenizer.json.
        vocab_size: Number of ids, including Llama 3's 256 special tokens.
        max_bytes: Maximum number of bytes of text to read.
        job: Job whose sections configure sources from plugins.

    Returns:
        The paths of the written files, and statistics of the text.

    Raises:
        UserError: If `out` cannot be written or already contains a tokenizer, if the weights of the
            sources are wrong, or if the text cannot be read or is too small for `vocab_size` ids.
    """
    out = Path(out)
    trained = TrainedTokenizer(out / "tokenizer.model", out / "tokenizer.json")
    for file in (trained.tiktoken, trained.json):
        if os.path.lexists(file):
            raise UserError(f"{file} already exists. Choose another folder, or remove it.")
    if problem := find_write_problem(out.absolute()):
        raise UserError(f"cannot create {out}: {problem}")

    without_stages = dataset.model_copy(update={"stages": ()})
    weights = find_weights(without_stages, step=0)
    skip_bad = dataset.on_bad_record == "skip"
    parts = []
    for spec, weight in zip(source_specs(dataset), weights, strict=True):
        source_bytes = int(max_bytes * weight / sum(weights))
        if source_bytes > 0:
            source = open_source(spec, job)
            parts.append(_read_texts(source, source_bytes, skip_bad))

    def read_and_count() -> Iterator[str]:
        for text in chain.from_iterable(parts):
            trained.documents += 1
            trained.num_bytes += len(text.encode())
            yield text

    texts = read_and_count()
    sample = list(islice(texts, _SAMPLE_DOCUMENTS))
    tokens = _train(chain(sample, texts), vocab_size)
    if len(tokens) + len(llama3_special_tokens()) < vocab_size:
        raise UserError(f"The text is too small for {vocab_size:,} ids. Lower --vocab-size.")

    make_folder(out)
    lines = [base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)]
    write_output(trained.tiktoken, b"".join(lines))
    tokenizer = TiktokenTokenizer(trained.tiktoken)
    write_output(trained.json, convert_tiktoken(tokenizer).to_str().encode())

    num_tokens = sum(len(tokenizer.encode_array(text)) for text in sample)
    num_bytes = sum(len(text.encode()) for text in sample)
    trained.bytes_per_token = num_bytes / max(1, num_tokens)
    return trained


def _read_texts(source: Source, max_bytes: int, skip_bad: bool) -> Iterator[str]:
    """Yield documents of a source, in random order if possible, up to a total of `max_bytes`.

    Args:
        source: Source of the documents.
        max_bytes: Total size, in bytes of UTF-8, at which to stop. The last document can exceed it.
        skip_bad: Skip records that cannot be read instead of raising an error.

    Raises:
        UserError: If the source contains tokens instead of text.
        BadRecord: If a record cannot be read and `skip_bad` is False.
    """
    if isinstance(source, TokenSource):
        raise _make_token_error(source)

    num_bytes = 0
    records = _read_shuffled(source) if isinstance(source, RandomAccess) else iter(source)
    for record in records:
        if num_bytes >= max_bytes:
            return
        if isinstance(record, BadRecord) and skip_bad:
            continue
        text = _get_text(record, source)
        num_bytes += len(text.encode())
        yield text


def _get_text(record: Record, source: Source) -> str:
    """Return the text of a record of `source`, or raise an error if it has no text.

    Raises:
        BadRecord: If the record cannot be read.
        UserError: If the record contains tokens. A source of a plugin can return such records.
    """
    if isinstance(record, BadRecord):
        raise BadRecord(f"{record}. {CONVERSION_REMEDY}")
    if isinstance(record, Prepared):
        raise _make_token_error(source)
    return record


def _make_token_error(source: Source) -> UserError:
    """Return the error that is raised if a tokenizer is trained on a source of tokens."""
    return UserError(
        f"{source.name} contains tokens instead of text. Choose the text that was prepared."
    )


def _read_shuffled(source: RandomAccess) -> Iterator[Any]:
    """Yield all records of a source in a random order that is the same in each call."""
    for i in range(source.num_units):
        index = permuted(np.array([i]), source.num_units, "tokenizer")[0]
        yield source.record(int(index))


def _train(texts: Iterator[str], vocab_size: int) -> list[bytes]:
    """Train a BPE vocabulary on `texts`.

    Args:
        texts: Training documents.
        vocab_size: Number of ids, including special tokens.

    Returns:
        The tokens in the order of their ids, without special tokens: the 256 single bytes, then the
        merged tokens. There are fewer than requested if the texts are too small.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _create_pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(llama3_special_tokens()),
        max_token_length=_MAX_TOKEN_BYTES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # always in the same order
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    id_of_token = decode_vocabulary(tokenizer.get_vocab())
    return sorted(id_of_token, key=id_of_token.__getitem__)


def _create_pre_tokenizer() -> Any:
    """Create a pre-tokenizer that splits texts by the Llama 3 pattern and maps bytes to symbols."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


def convert_tiktoken(source: TiktokenTokenizer) -> Any:
    """Convert a tiktoken tokenizer to a `tokenizers.Tokenizer` that encodes texts to the same ids.

    Both have the split pattern and the special tokens of Llama 3. The result also adds BOS to each
    text, as the tokenizer of Llama 3 does, unless its user passes `add_special_tokens=False`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocabulary = encode_vocabulary(source.ranks)
    merges = _list_merges(vocabulary)
    # If a whole word is a token, do not apply merges to it (ignore_merges). tiktoken does the same.
    converted: Any = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    converted.pre_tokenizer = _create_pre_tokenizer()
    converted.decoder = decoders.ByteLevel()

    # The ids of the special tokens follow the ids of the vocabulary, in this order.
    special_names = llama3_special_tokens()
    converted.add_special_tokens([AddedToken(name, special=True) for name in special_names])
    bos_name = special_names[0]
    converted.post_processor = _create_post_processor(bos_name, source.bos_id)
    return converted


def _create_post_processor(bos: str, bos_id: int | None) -> Any:
    """Create a post-processor that adds BOS before each text ($A) or pair of texts ($A and $B)."""
    from tokenizers import processors

    # Offsets of tokens in the text include their leading space.
    set_offsets = processors.ByteLevel(trim_offsets=False)
    add_bos = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, bos_id)])
    return processors.Sequence([set_offsets, add_bos])


def _list_merges(ids: dict[str, int]) -> list[tuple[str, str]]:
    """List all pairs of tokens whose concatenation is a token, in the order of the vocabulary.

    tiktoken merges all such pairs, but the tokenizers library merges only listed ones. For example,
    the token "the" can be merged from ("t", "he") and ("th", "e").

    Args:
        ids: Id of each token, keyed by the token, in ascending order of the ids.
    """
    merges = []
    for token in ids:
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in ids and right in ids:
                merges.append((left, right))
    return merges


def write_tokenizer(tokenizer: Tokenizer, out: Path, max_seq_len: int) -> dict[str, int | None]:
    """Write the tokenizer files of a model that is exported in the Hugging Face format.

    Args:
        tokenizer: The tokenizer of the model.
        out: The model folder.
        max_seq_len: Longest sequence of the model, in tokens.

    Returns:
        "bos_token_id" and "eos_token_id", as entries for the config.json of the model.
    """
    path = tokenizer.path
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    if not isinstance(tokenizer, TiktokenTokenizer | HuggingFaceTokenizer):
        # Copy the file of a plugin's tokenizer unchanged. transformers cannot load it.
        shutil.copyfile(path, out / path.name)
        return ids

    if isinstance(tokenizer, TiktokenTokenizer):
        convert_tiktoken(tokenizer).save(str(out / "tokenizer.json"), pretty=False)
        config = _create_config(tokenizer, ids, max_seq_len)
    else:
        shutil.copyfile(path, out / "tokenizer.json")
        # An existing file can have more settings, such as a chat template.
        config = read_config(path) or _create_config(tokenizer, ids, max_seq_len)

    # Text that looks like a special token is encoded as ordinary text, as in training.
    config["split_special_tokens"] = True
    (out / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return ids


def _create_config(
    tokenizer: Tokenizer, ids: dict[str, int | None], max_seq_len: int
) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json with the names of the BOS and EOS tokens.

    Args:
        tokenizer: Tokenizer that decodes the ids to names.
        ids: Token ids with the keys "bos_token_id" and "eos_token_id". None if there is no such
            token.
        max_seq_len: Longest sequence of the model, in tokens.
    """
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
    for key, token in ids.items():
        if token is not None:
            config[key.removesuffix("_id")] = tokenizer.decode([token])
    return config
