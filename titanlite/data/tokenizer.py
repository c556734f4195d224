"""Text to token ids and back, from a tiktoken-format `tokenizer.model` (Llama 3) or a Hugging Face `tokenizer.json`.

Invariant: text is only text. What looks like a special token in a document ("<|end_of_text|>") is encoded as ordinary
characters, so that only the packer can begin or end a document. tiktoken and tokenizers are imported where they are
used, so that a rank whose data processes encode for it never pays for them.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.files import short
from titanlite.data.fingerprint import of_json, of_ranks
from titanlite.data.tokenizer_file import (
    LLAMA3_PATTERN,
    json_ids,
    llama3_special_tokens,
    parse_ranks,
    read_tokenizer_file,
)

if TYPE_CHECKING:
    import tiktoken

# Longer texts are encoded in pieces: the regex engines keep a stack that grows with the longest match.
_PIECE_CHARS = 1 << 18
_NOT_BLANK = re.compile(r"[^\S\r\n]*\S")


class Tokenizer(ABC):
    """Common interface of both formats.

    Attributes:
        path: the file.
        vocab_size: number of ids, special tokens included; every id is below it.
        bos_id: put before each document, or None where the tokenizer has no such token.
        eos_id: put after each document.
        file_fingerprint: by which version 0.1 knew a tokenizer: of the file, and of the choice of bos and eos.
    """

    path: Path
    vocab_size: int
    bos_id: int | None
    eos_id: int
    file_fingerprint: str

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal if and only if the ids of every text are, whatever the format of the file."""

    def is_known_as(self, fingerprint: str) -> bool:
        """Whether a checkpoint or shards with this fingerprint, perhaps of version 0.1, have the ids of this one."""
        return fingerprint in (self.fingerprint, self.file_fingerprint)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without bos and eos."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as uint32. Texts beyond 256 Ki characters are cut at line starts first, which for Llama 3's pattern
        changes no id."""
        try:
            pieces = [self._encode_piece(piece) for piece in _pieces(text)]
        except UnicodeEncodeError:  # lone surrogates, which JSON escapes can hold, have no UTF-8 form
            return self.encode_array(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @abstractmethod
    def _encode_piece(self, text: str) -> np.ndarray: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; a special token stands for its name."""


class TiktokenTokenizer(Tokenizer):
    """`tokenizer.model` as Llama 3 ships it: base64 tokens with ranks, and 256 special tokens after them."""

    def __init__(self, path: Path) -> None:
        self.path, self._raw = path, read_tokenizer_file(path)
        base = len(parse_ranks(path, self._raw))
        self._special = {name: base + i for i, name in enumerate(llama3_special_tokens())}
        self.vocab_size = base + len(self._special)
        self.bos_id = self._special["<|begin_of_text|>"]
        self.eos_id = self._special["<|end_of_text|>"]
        self.file_fingerprint = hashlib.sha256(b"tiktoken llama3 " + LLAMA3_PATTERN.encode() + self._raw).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        ranks = parse_ranks(self.path, self._raw)
        return of_ranks(LLAMA3_PATTERN, ranks, self._special, self.bos_id, self.eos_id)

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        """Made when first used: a training rank, whose data processes encode for it, never pays for it."""
        import tiktoken

        ranks = parse_ranks(self.path, self._raw)
        return tiktoken.Encoding(
            self.path.stem, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=self._special
        )

    def _encode_piece(self, text: str) -> np.ndarray:
        # Twice as fast as encode_ordinary followed by np.array, because no Python integer is made.
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoding.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(token)


class HuggingFaceTokenizer(Tokenizer):
    """`tokenizer.json`. Which tokens begin and end a document is read from a `tokenizer_config.json` beside it, else
    known by their names."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self.path = path
        raw = read_tokenizer_file(path)
        self.vocab_size, self.bos_id, self.eos_id, added = json_ids(path, raw)
        with self._library("load it"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        for name, token in added.items():
            if (given := self._tokenizer.token_to_id(name)) != token:
                raise UserError(
                    f"{path}: {short(repr(name))} has the id {token} there, but {given} in the tokenizers library."
                )
        self._byte_level = byte_level_symbols() if b"ByteLevel" in raw else {}
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        chosen = f"huggingface {self.bos_id} {self.eos_id} "
        self.file_fingerprint = hashlib.sha256(chosen.encode() + raw).hexdigest()
        self._raw = raw

    @cached_property
    def fingerprint(self) -> str:
        return of_json(self._raw, byte_level_symbols(), self.bos_id, self.eos_id)

    @contextmanager
    def _library(self, what: str) -> Iterator[None]:
        """Raises UserError for what the library raises: plain Exception, or a BaseException where its code panics."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            raise UserError(f"{self.path}: the tokenizers library cannot {what}: {short(str(error))}") from None

    def _encode_piece(self, text: str) -> np.ndarray:
        text.encode()  # raises UnicodeEncodeError for a lone surrogate, of which the library makes a TypeError
        with self._library("encode a text (one with byte fallback or a byte-level vocabulary can)"):
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        assert text is not None
        if self._byte_level and all(symbol in self._byte_level for symbol in text):
            return bytes(self._byte_level[symbol] for symbol in text)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", text):  # byte fallback of SentencePiece vocabularies
            return bytes.fromhex(byte[1])
        return text.replace("\u2581", " ").encode()


def byte_level_symbols() -> dict[str, int]:
    """Symbol -> byte in byte-level vocabularies: printable Latin-1 bytes stand for themselves, the others for U+0100
    onwards (the table of GPT-2's encoder.py)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load `path`: a name that ends in .json is a Hugging Face tokenizer, any other is in tiktoken's format.

    Raises:
        UserError: the file is missing, or is not a tokenizer; the message names it.
    """
    path = Path(path)
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else TiktokenTokenizer(path)


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of at most _PIECE_CHARS, cut before a line that is not blank: with Llama 3's pattern no match
    crosses such a place. Only a text without any such line is cut elsewhere."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        cut = end = start + _PIECE_CHARS
        while (cut := text.rfind("\n", start, cut)) >= 0 and not _NOT_BLANK.match(text, cut + 1):
            pass
        cut = cut + 1 if cut >= 0 else end
        yield text[start:cut]
        start = cut
    yield text[start:]
