"""Text to token ids and back, from a tiktoken-format `tokenizer.model` (Llama 3) or a Hugging Face `tokenizer.json`.

Invariant: text is only text. What looks like a special token in a document ("<|end_of_text|>") is encoded as ordinary
characters, so that only the packer can begin or end a document. tiktoken and tokenizers are imported where they are
used, so that a rank whose data processes encode for it does not pay for tiktoken.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.files import exists, file_inside, read_file, read_object
from titanlite.config.mistakes import short
from titanlite.config.registry import TOKENIZERS
from titanlite.config.schema import JobConfig

if TYPE_CHECKING:
    import tiktoken

# Llama 3's split pattern: contractions, words with one leading symbol, numbers of up to three digits, punctuation,
# line ends, spaces.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_FIRST = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id "
    "reserved_special_token_2 start_header_id end_header_id eom_id eot_id python_tag"
)
_NAMES = {
    "bos_token": ("<|begin_of_text|>", "<|bos|>", "<bos>", "<s>", "[BOS]", "<|startoftext|>"),
    "eos_token": ("<|end_of_text|>", "<|endoftext|>", "<|eos|>", "<eos>", "</s>", "[EOS]"),
}
CONFIG = "tokenizer_config.json"
_MOST_BYTES = 1 << 27  # of a file; the largest vocabularies have a million tokens and 60 MB
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
    """

    path: Path
    vocab_size: int
    bos_id: int | None
    eos_id: int

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)  # in a background process

    @property
    @abstractmethod
    def fingerprints(self) -> tuple[str, ...]:
        """The first is of what decides about the ids of a text: no path, no order of keys, no setting that others alone
        read. The next one is version 0.1's: of the file, and of the choice of bos and eos. A third one is that of a
        tokenizer.model with the same vocabulary, which version 0.2 gave to a tokenizer.json, too."""

    @property
    def fingerprint(self) -> str:
        """What checkpoints and shards know this tokenizer by."""
        return self.fingerprints[0]

    def is_known_as(self, fingerprint: str) -> bool:
        """Whether checkpoints or shards with this fingerprint, perhaps of an older version, have these ids."""
        return fingerprint in self.fingerprints

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without bos and eos."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as uint32. Texts beyond 256 Ki characters are cut at line starts first, which for Llama 3's pattern
        changes no id.

        Raises:
            UserError: a Hugging Face tokenizer has no token for a part of the text.
        """
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
    """`tokenizer.model` as Llama 3 ships it: base64 tokens with ranks, and 256 special tokens after them.

    Attributes:
        ranks: token -> rank, which is its id.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._raw = path, read_file(path, _MOST_BYTES)
        try:
            lines = (line.split() for line in self._raw.splitlines() if line)
            self.ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        except ValueError:
            self.ranks = {}
        base, single = len(self.ranks), {bytes([byte]) for byte in range(256)}
        if sorted(self.ranks.values()) != list(range(base)) or not single <= self.ranks.keys():
            raise UserError(
                f"{path}: not a tiktoken tokenizer, whose lines are a token in base64 and its rank: 0, 1, 2 and so on, "
                "a token for each byte among them. (Convert one of SentencePiece, as of Llama 2, to a tokenizer.json.)"
            )
        self._special = {name: base + i for i, name in enumerate(llama3_special_tokens())}
        self.vocab_size = base + len(self._special)
        self.bos_id, self.eos_id = self._special["<|begin_of_text|>"], self._special["<|end_of_text|>"]

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        file = b"tiktoken llama3 " + LLAMA3_PATTERN.encode() + self._raw
        own = _fingerprint_of_ranks(LLAMA3_PATTERN, self.ranks, self._special, self.bos_id, self.eos_id)
        return own, _sha256(file)

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        """Made when first used: a training rank, whose data processes encode for it, never pays for it."""
        import tiktoken

        name, special = self.path.stem, self._special
        return tiktoken.Encoding(name, pat_str=LLAMA3_PATTERN, mergeable_ranks=self.ranks, special_tokens=special)

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

        self.path, self._raw = path, read_file(path, _MOST_BYTES)
        with self._library("load it"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._raw)
            ids = self._tokenizer.get_vocab()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size, self.bos_id = 1 + max(ids.values(), default=0), self._named("bos_token", ids)
        if (eos_id := self._named("eos_token", ids)) is None:
            raise UserError(f"{path}: no token ends documents. Name it in a {CONFIG} beside the file, as eos_token.")
        self.eos_id = eos_id
        self._byte_level = byte_level_symbols() if b"ByteLevel" in self._raw else {}

    def _named(self, key: str, ids: Mapping[str, int]) -> int | None:
        name = read_config(self.path).get(key)
        name = name.get("content") if isinstance(name, dict) else name
        if name is None:
            return next((ids[usual] for usual in _NAMES[key] if usual in ids), None)
        if not isinstance(name, str) or name not in ids:
            found = f"{key} is {short(repr(name))}, which {self.path.name} does not hold"
            raise UserError(f"{self.path.with_name(CONFIG)}: {found}")
        return ids[name]

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        value = json.loads(self._raw)
        unused = {"version", "truncation", "padding", "post_processor", "decoder"}  # encoding does without them
        kept = {key: part for key, part in value.items() if key not in unused}
        own = json.dumps([kept, self.bos_id, self.eos_id], sort_keys=True).encode()
        known = [f"ids:{_sha256(own)}", _sha256(f"huggingface {self.bos_id} {self.eos_id} ".encode() + self._raw)]
        with suppress(KeyError, TypeError, IndexError):  # it may be of another kind
            pattern = value["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
            to_byte, special = byte_level_symbols(), {token["content"]: token["id"] for token in value["added_tokens"]}
            ranks = {bytes(to_byte[c] for c in token): rank for token, rank in value["model"]["vocab"].items()}
            if value["model"]["ignore_merges"] and not value["normalizer"]:
                known.append(_fingerprint_of_ranks(pattern, ranks, special, self.bos_id, self.eos_id))
        return tuple(known)

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
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)  # it lets go of the GIL
            return np.array(encoded.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        assert text is not None
        if set(text) <= self._byte_level.keys():
            return bytes(map(self._byte_level.__getitem__, text))
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", text):  # byte fallback of SentencePiece vocabularies
            return bytes.fromhex(byte[1])
        return text.replace("\u2581", " ").encode()


def load_tokenizer(path: str | Path, job: JobConfig | None = None) -> Tokenizer:
    """Load `path` as the registered tokenizer that a job names. Without one, a name that ends in .json is a Hugging
    Face tokenizer, any other is in tiktoken's format.

    Raises:
        UserError: the file is missing, or is not a tokenizer; the message names it.
    """
    path = Path(path)
    own = job.tokenizer.name if job is not None else None
    return TOKENIZERS.make(own or ("huggingface" if path.suffix == ".json" else "tiktoken"), job, path)


def llama3_special_tokens() -> list[str]:
    """The 256 special tokens of Llama 3.1 in the order of their ids, which follow the ordinary ones."""
    names = [*_LLAMA3_FIRST.split(), *(f"reserved_special_token_{i}" for i in range(3, 248))]
    return [f"<|{name}|>" for name in names]


def read_config(path: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside the tokenizer `path`; empty if there is none. Raises UserError: it is no JSON
    object, or a link that leaves the folder."""
    if not exists(path.with_name(CONFIG)):
        return {}
    return read_object(file_inside(path.parent, CONFIG), _MOST_BYTES)


def byte_level_symbols() -> dict[str, int]:
    """Symbol -> byte in byte-level vocabularies: printable Latin-1 bytes stand for themselves, the others for U+0100
    onwards (the table of GPT-2's encoder.py)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


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


def _fingerprint_of_ranks(
    pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int], bos_id: int | None, eos_id: int
) -> str:
    """Of a byte-level BPE in tiktoken's way: texts are split by `pattern`; of the neighbours in a piece whose bytes
    together are a token, the one of the lowest rank is joined first."""
    header = json.dumps([pattern, sorted(special.items()), bos_id, eos_id]).encode()
    lines = (b"%d %d " % (rank, len(token)) + token for token, rank in sorted(ranks.items()))
    return f"ids:{_sha256(header + b''.join(lines))}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
