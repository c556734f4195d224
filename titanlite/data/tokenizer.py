"""Tokenizers in the formats of tiktoken (`tokenizer.model`) and Hugging Face (`tokenizer.json`).

Invariant: Text is only text. Characters in a document that look like a special token, such as
"<|end_of_text|>", are encoded as ordinary characters, so a text cannot begin or end a document.

The tiktoken and tokenizers libraries are imported where they are used, because few processes need
both.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.files import exists, find_file_inside, read_file, read_json_object
from titanlite.config.mistakes import shorten
from titanlite.config.registry import TOKENIZERS
from titanlite.config.schema import JobConfig

if TYPE_CHECKING:
    import tiktoken

# Llama 3's split pattern: contractions, words with one leading symbol, numbers of up to three
# digits, punctuation, line ends, spaces.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 "
    "finetune_right_pad_id reserved_special_token_2 start_header_id end_header_id eom_id eot_id "
    "python_tag"
)
# Usual names of BOS and EOS, used if tokenizer_config.json does not exist or does not name them.
_USUAL_NAMES = {
    "bos_token": ("<|begin_of_text|>", "<|bos|>", "<bos>", "<s>", "[BOS]", "<|startoftext|>"),
    "eos_token": ("<|end_of_text|>", "<|endoftext|>", "<|eos|>", "<eos>", "</s>", "[EOS]"),
}
TOKENIZER_CONFIG = "tokenizer_config.json"
_MAX_BYTES = 1 << 27  # limit for a file; the largest vocabularies have 60 MB
# Longer texts are encoded in pieces, because the stack of the regular expression engines grows with
# the longest match and would overflow.
_PIECE_CHARS = 1 << 18
_NOT_BLANK = re.compile(r"[^\S\r\n]*\S")
# Parts of tokenizer.json that do not affect encoding.
_UNUSED_PARTS = {"version", "truncation", "padding", "post_processor", "decoder"}


class Tokenizer(ABC):
    """Base class of tokenizers, which convert text to token ids and back.

    Attributes:
        path: Path of the tokenizer file.
        vocab_size: Number of ids, including special tokens. All ids are less than this number.
        bos_id: Id that begins each document, or None if the tokenizer has no such token.
        eos_id: Id that ends each document.
    """

    path: Path
    vocab_size: int
    bos_id: int | None
    eos_id: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the path, so that data workers load the file themselves."""
        return type(self), (self.path,)

    @property
    @abstractmethod
    def fingerprints(self) -> tuple[str, ...]:
        """Hashes that identify this tokenizer in checkpoints and shards.

        The first hash is the current one. It covers everything that affects the token ids of a
        text, and nothing else. The others are hashes that older versions of titanlite stored:

        - Version 0.1 hashed the file and the choice of BOS and EOS.
        - Version 0.2 also identified a tokenizer.json by the fingerprint of a tokenizer.model with
          the same vocabulary.
        """

    @property
    def fingerprint(self) -> str:
        """Hash that identifies this tokenizer in new checkpoints and shards."""
        return self.fingerprints[0]

    def is_known_as(self, fingerprint: str) -> bool:
        """Return whether a fingerprint from a checkpoint or shards identifies this tokenizer.

        Fingerprints stored by older versions of titanlite are also recognized.
        """
        return fingerprint in self.fingerprints

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text as a list, without BOS and EOS.

        Names of special tokens, such as "<|end_of_text|>", are encoded as ordinary characters.
        """
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """Return the token ids of a text as an array, without BOS and EOS.

        Names of special tokens, such as "<|end_of_text|>", are encoded as ordinary characters.

        Returns:
            Token ids, shape (n,), uint32.

        Raises:
            UserError: If a Hugging Face tokenizer has no token for a part of the text.
        """
        try:
            # Encode long texts in pieces, because the regular expression engines need much stack.
            pieces = [self._encode_piece(piece) for piece in _divide(text)]
        except UnicodeEncodeError:
            # A JSON escape can contain half of a surrogate pair. Replace it with U+FFFD.
            utf16 = text.encode("utf-16", "surrogatepass")
            return self.encode_array(utf16.decode("utf-16", "replace"))
        return np.concatenate(pieces)

    @abstractmethod
    def _encode_piece(self, text: str) -> np.ndarray:
        """Return the token ids of a text of at most 256 Ki characters as a uint32 array.

        Raises:
            UnicodeEncodeError: If the text contains half of a surrogate pair.
        """
        ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of token ids, including the names of special tokens.

        Bytes that are not valid UTF-8 are replaced with U+FFFD.
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token id represents, or the name of a special token."""

    def _hash_bpe(
        self, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int]
    ) -> str:
        """Return the fingerprint of a byte-level BPE tokenizer that merges tokens like tiktoken.

        Args:
            pattern: Regular expression that splits texts.
            ranks: Merge rank of each ordinary token, keyed by the bytes of the token.
            special: Id of each special token, keyed by name.
        """
        digest = hashlib.sha256()
        header = json.dumps([pattern, sorted(special.items()), self.bos_id, self.eos_id])
        digest.update(header.encode())
        for token, rank in sorted(ranks.items()):
            digest.update(b"%d %d " % (rank, len(token)) + token)
        return f"ids:{digest.hexdigest()}"


class TiktokenTokenizer(Tokenizer):
    """A tokenizer in the tiktoken format, which Llama 3 uses for its `tokenizer.model`.

    Each line of the file contains a token in base64 and its rank, which is also its id. The file
    does not list the 256 special tokens of Llama 3. Their ids follow the largest rank.

    Attributes:
        ranks: Rank of each token, keyed by the bytes of the token.
    """

    def __init__(self, path: Path) -> None:
        """Load the file `path` and add the special tokens of Llama 3.

        Raises:
            UserError: If the file cannot be read, or is not in the tiktoken format.
        """
        self.path = path
        self._raw = read_file(path, _MAX_BYTES)
        try:
            lines = [line.split() for line in self._raw.splitlines() if line]
            self.ranks = {
                base64.b64decode(token, validate=True): int(rank) for token, rank in lines
            }
        except ValueError:
            self.ranks = {}  # raises the error below

        num_ranks = len(self.ranks)
        has_all_bytes = all(bytes([byte]) in self.ranks for byte in range(256))
        if sorted(self.ranks.values()) != list(range(num_ranks)) or not has_all_bytes:
            raise UserError(
                f"{path}: not a tokenizer in tiktoken's format, which has a base64 token and its "
                "rank (0, 1, 2, ...) on each line, and a token for each byte. Convert a "
                "SentencePiece tokenizer, such as Llama 2's, to tokenizer.json first."
            )
        self._special = {name: num_ranks + i for i, name in enumerate(llama3_special_tokens())}
        self.vocab_size = num_ranks + len(self._special)
        self.bos_id = self._special["<|begin_of_text|>"]
        self.eos_id = self._special["<|end_of_text|>"]

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """Hashes that identify this tokenizer in checkpoints and shards, the current one first."""
        current = self._hash_bpe(LLAMA3_PATTERN, self.ranks, self._special)
        of_file = _sha256(b"tiktoken llama3 " + LLAMA3_PATTERN.encode() + self._raw)
        return current, of_file

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        """The tiktoken `Encoding` object of this tokenizer, created on first use."""
        import tiktoken

        return tiktoken.Encoding(
            self.path.stem,
            pat_str=LLAMA3_PATTERN,
            mergeable_ranks=self.ranks,
            special_tokens=self._special,
        )

    def _encode_piece(self, text: str) -> np.ndarray:
        # Twice as fast as encode_ordinary and np.array, because it creates no Python integers.
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of token ids, including the names of special tokens."""
        return self.encoding.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token id, or the name of a special token."""
        return self.encoding.decode_single_token_bytes(token)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer in the Hugging Face `tokenizer.json` format.

    A `tokenizer_config.json` in the same folder can name BOS and EOS. Otherwise, they are
    recognized by their usual names, such as "<s>" and "</s>".
    """

    def __init__(self, path: Path) -> None:
        """Load the file `path` and find its BOS and EOS tokens.

        Raises:
            UserError: If the tokenizers library cannot load the file, or there is no EOS token.
        """
        import tokenizers

        self.path = path
        self._raw = read_file(path, _MAX_BYTES)
        os.environ["RUST_BACKTRACE"] = "0"  # otherwise a panic prints a long backtrace
        with self._convert_errors("load it"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._raw)
            ids = self._tokenizer.get_vocab()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True

        self.vocab_size = 1 + max(ids.values(), default=0)
        self.bos_id = self._find_special("bos_token", ids)
        eos_id = self._find_special("eos_token", ids)
        if eos_id is None:
            raise UserError(
                f"{path}: no token ends documents. Set eos_token in a {TOKENIZER_CONFIG} in the "
                "same folder."
            )
        self.eos_id = eos_id
        self._byte_of_symbol = map_symbols_to_bytes() if b"ByteLevel" in self._raw else {}

    def _find_special(self, key: str, ids: Mapping[str, int]) -> int | None:
        """Return the id of the BOS or EOS token, or None if the tokenizer has no such token.

        Args:
            key: "bos_token" or "eos_token".
            ids: Id of each token, keyed by name.

        Raises:
            UserError: If tokenizer_config.json names a token that the tokenizer does not contain.
        """
        name = read_config(self.path).get(key)
        if isinstance(name, dict):  # such as {"content": "<s>", "special": true}
            name = name.get("content")

        # If the file names no token, look for the usual names.
        if name is None:
            for usual_name in _USUAL_NAMES[key]:
                if usual_name in ids:
                    return ids[usual_name]
            return None

        if not isinstance(name, str) or name not in ids:
            problem = f"{key} is {shorten(repr(name))}, which {self.path.name} does not contain"
            raise UserError(f"{self.path.with_name(TOKENIZER_CONFIG)}: {problem}")
        return ids[name]

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        """Hashes that identify this tokenizer in checkpoints and shards, the current one first."""
        content = json.loads(self._raw)
        used_parts = {key: part for key, part in content.items() if key not in _UNUSED_PARTS}
        current = json.dumps([used_parts, self.bos_id, self.eos_id], sort_keys=True).encode()
        of_file = f"huggingface {self.bos_id} {self.eos_id} ".encode() + self._raw
        converted_from = self._hash_as_tiktoken(content)
        fingerprints = (f"ids:{_sha256(current)}", _sha256(of_file), converted_from)
        return tuple(filter(None, fingerprints))

    def _hash_as_tiktoken(self, content: dict[str, Any]) -> str | None:
        """Return the fingerprint of the tokenizer.model from which a tokenizer.json was converted.

        With this fingerprint, a run that started with the tokenizer.model can resume with the
        tokenizer.json.

        Args:
            content: Parsed tokenizer.json.

        Returns:
            The fingerprint, or None if the file was not converted from a tokenizer.model.
        """
        try:
            # Like tiktoken, a converted file does not apply merges to words that are tokens, and
            # does not normalize texts.
            model = content["model"]
            if not model["ignore_merges"] or content["normalizer"]:
                return None

            # The first pre-tokenizer splits texts by a pattern, and the second maps bytes.
            split = content["pre_tokenizer"]["pretokenizers"][0]
            pattern = split["pattern"]["Regex"]
            special_ids = {token["content"]: token["id"] for token in content["added_tokens"]}
            ranks = decode_vocabulary(model["vocab"])
        except (KeyError, TypeError, IndexError):  # a part is missing, so it was not converted
            return None
        return self._hash_bpe(pattern, ranks, special_ids)

    @contextmanager
    def _convert_errors(self, action: str, remedy: str = "") -> Iterator[None]:
        """Convert exceptions and Rust panics of the tokenizers library to UserError.

        Args:
            action: Action of the `with` block, for the error message, such as "encode a text".
            remedy: Sentence to append to the message, which proposes how to fix the problem.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic is not an Exception
            if "Regex search" in str(error):
                remedy = "Simplify the patterns of its pre_tokenizer and normalizer."
            cause = shorten(str(error)).rstrip(".")
            problem = f"{self.path}: the tokenizers library cannot {action}: {cause}."
            raise UserError(f"{problem} {remedy}".rstrip()) from None

    def _encode_piece(self, text: str) -> np.ndarray:
        text.encode()  # raises UnicodeEncodeError; the library would raise TypeError
        remedy = "Use a tokenizer with byte fallback or a byte-level vocabulary."
        with self._convert_errors("encode a text", remedy):
            # Unlike `encode`, this function releases the global interpreter lock.
            encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            return np.array(encodings[0].ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a sequence of token ids, including the names of special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token id, or the name of a special token."""
        text = self._tokenizer.id_to_token(token)
        assert text is not None
        if all(symbol in self._byte_of_symbol for symbol in text):
            return bytes(self._byte_of_symbol[symbol] for symbol in text)
        # SentencePiece vocabularies contain tokens such as <0x0A> for single bytes.
        byte_fallback = re.fullmatch(r"<0x([0-9A-F]{2})>", text)
        if byte_fallback:
            return bytes.fromhex(byte_fallback[1])
        return text.replace("\u2581", " ").encode()


def load_tokenizer(path: str | Path, job: JobConfig | None = None) -> Tokenizer:
    """Load a tokenizer file.

    Args:
        path: Tokenizer file. Its suffix selects the format: Hugging Face for .json, otherwise
            tiktoken.
        job: Job whose tokenizer.name, if it is set, selects the format instead of the suffix.
            Plugins can register formats.

    Raises:
        UserError: If the file does not exist or is not a tokenizer.
    """
    path = Path(path)
    name = "huggingface" if path.suffix == ".json" else "tiktoken"
    if job is not None and job.tokenizer.name is not None:
        name = job.tokenizer.name
    return TOKENIZERS.make_instance(Tokenizer, name, path, job=job)


def llama3_special_tokens() -> list[str]:
    """Return the names of the 256 special tokens of Llama 3.1, in the order of their ids."""
    reserved = [f"reserved_special_token_{i}" for i in range(3, 248)]
    return [f"<|{name}|>" for name in [*_LLAMA3_SPECIAL.split(), *reserved]]


def read_config(path: Path) -> dict[str, Any]:
    """Read the tokenizer_config.json next to a tokenizer file. Return {} if it does not exist.

    Raises:
        UserError: If the file is not a JSON object, or is a link to a file outside of the folder.
    """
    if not exists(path.with_name(TOKENIZER_CONFIG)):
        return {}
    return read_json_object(find_file_inside(path.parent, TOKENIZER_CONFIG), _MAX_BYTES)


def map_symbols_to_bytes() -> dict[str, int]:
    """Return a mapping from characters in a byte-level vocabulary to the bytes that they represent.

    Byte-level tokenizers write each byte as a visible character, as encoder.py of GPT-2 does.
    A printable Latin-1 character represents the byte with the same value. The characters from
    U+0100 on represent the other bytes: for example, U+0120 represents a space.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for i, byte in enumerate(others):
        symbols[chr(256 + i)] = byte
    return symbols


def decode_vocabulary(ids: Mapping[str, int]) -> dict[bytes, int]:
    """Convert a byte-level vocabulary to a mapping from the bytes of each token to its id.

    Raises:
        KeyError: If a token contains a character that represents no byte.
    """
    byte_of_symbol = map_symbols_to_bytes()
    ids_by_bytes = {}
    for token, token_id in ids.items():
        ids_by_bytes[bytes(byte_of_symbol[symbol] for symbol in token)] = token_id
    return ids_by_bytes


def encode_vocabulary(ids: Mapping[bytes, int]) -> dict[str, int]:
    """Convert a mapping from token bytes to ids into a byte-level vocabulary, sorted by id.

    Each byte becomes a visible character. This function is the inverse of `decode_vocabulary`.
    """
    symbol_of_byte = {byte: symbol for symbol, byte in map_symbols_to_bytes().items()}
    vocabulary = {}
    for token, token_id in sorted(ids.items(), key=itemgetter(1)):
        vocabulary["".join(symbol_of_byte[byte] for byte in token)] = token_id
    return vocabulary


def _divide(text: str) -> Iterator[str]:
    """Divide a text into pieces of at most `_PIECE_CHARS` characters, which are encoded separately.

    The pieces usually give the same tokens as the whole text.
    """
    start = 0
    while len(text) - start > _PIECE_CHARS:
        cut = _choose_cut(text, start, start + _PIECE_CHARS)
        yield text[start:cut]
        start = cut
    yield text[start:]


def _choose_cut(text: str, start: int, end: int) -> int:
    """Return the index, after `start` and at most `end`, at which to cut a text.

    Cut before the last line that is not blank, because no match of the Llama 3 split pattern
    crosses this point. If there is no such line, cut at `end`, which can change tokens.
    """
    line_end = text.rfind("\n", start, end)
    while line_end >= 0:
        if _NOT_BLANK.match(text, line_end + 1):
            return line_end + 1
        line_end = text.rfind("\n", start, line_end)
    return end


def _sha256(content: bytes) -> str:
    """Return the SHA-256 of `content` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
