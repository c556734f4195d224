"""Text to token ids and back, from a tiktoken-format `tokenizer.model` (Llama 3) or a Hugging Face `tokenizer.json`.

Invariant: text is only text. What looks like a special token in a document ("<|end_of_text|>") is encoded as ordinary
characters, so that only the packer can begin or end a document. A file that is no good tokenizer is refused when it is
loaded, in about a second, and nothing in it is executed but the patterns of a tokenizer.json, which are tried in a
process of their own first. tiktoken and tokenizers are imported where they are used, so that a job file is validated
without them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import signal
import string
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from titanlite.config.errors import UserError
from titanlite.config.files import exists, file_inside, parse_json, read_file, short
from titanlite.data.fingerprint import of_json, of_ranks

if TYPE_CHECKING:
    import tiktoken

# Llama 3's split pattern: contractions, words with one leading symbol, numbers of up to three digits, punctuation,
# line ends, spaces.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LLAMA3_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_BOS_NAMES = ("<|begin_of_text|>", "<|bos|>", "<bos>", "<s>", "[BOS]", "<|startoftext|>")
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "<|eos|>", "<eos>", "</s>", "[EOS]")

# Bounds on files; the largest vocabularies have a million tokens and 60 MB.
MOST_BYTES = 1 << 27
_LONGEST_TOKEN = 1024
TokenId = Annotated[int, Field(ge=0, lt=1 << 24)]

# Patterns that are in wide use: Llama 3's (GPT-4's), Qwen 2's and GPT-2's. They need no trial.
_KNOWN_PATTERNS = {
    LLAMA3_PATTERN,
    LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
_HARMLESS_CHARS, _PATTERN_SIGNS = 32, frozenset("*+?{|(")  # a short text without these repeats nothing
_TRIED_CHARS = 1 << 13

# Longer texts are encoded in pieces: the regex engines keep a stack that grows with the longest match.
_PIECE_CHARS = 1 << 18
_NOT_BLANK = re.compile(r"[^\S\r\n]*\S")


def llama3_special_tokens() -> list[str]:
    """The 256 special tokens of Llama 3.1 in the order of their ids, which follow the ordinary ones."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    return [_LLAMA3_NAMED.get(i) or next(reserved) for i in range(256)]


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
        self.path, self._raw = path, _read(path)
        base = len(_parse_ranks(path, self._raw))
        self._special = {name: base + i for i, name in enumerate(llama3_special_tokens())}
        self.vocab_size = base + len(self._special)
        self.bos_id = self._special["<|begin_of_text|>"]
        self.eos_id = self._special["<|end_of_text|>"]
        self.file_fingerprint = hashlib.sha256(b"tiktoken llama3 " + LLAMA3_PATTERN.encode() + self._raw).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        ranks = _parse_ranks(self.path, self._raw)
        return of_ranks(LLAMA3_PATTERN, ranks, self._special, self.bos_id, self.eos_id)

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        """Made when first used: a training rank, whose data processes encode for it, never pays for it."""
        import tiktoken

        ranks = _parse_ranks(self.path, self._raw)
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
        raw = _read(path)
        self.vocab_size, self.bos_id, self.eos_id, added = _json_ids(path, raw)
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


def read_vocab_size(path: str | Path) -> int:
    """`vocab_size` of the tokenizer at `path` without building it: no import, 0.1 s for 128 thousand tokens.

    Raises:
        UserError: as `load_tokenizer`.
    """
    path = Path(path)
    raw = _read(path)
    if path.suffix == ".json":
        return _json_ids(path, raw)[0]
    return len(_parse_ranks(path, raw)) + len(llama3_special_tokens())


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise UserError(f"tokenizer {path} is a folder; name the file in it (tokenizer.model or tokenizer.json)")
    return read_file(path, MOST_BYTES)


def _parse_ranks(path: Path, raw: bytes) -> dict[bytes, int]:
    """Token bytes -> rank of a tiktoken file, whose lines read `<base64> <rank>`.

    Raises:
        UserError: it is none, or not one that encodes every text: each byte is a token, and the ranks count from 0.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line:
            continue
        try:
            word, rank = line.split()
            token = base64.b64decode(word, validate=True)
            if token in ranks:
                raise UserError(f"{path}, line {number}: the token is there already, with the rank {ranks[token]}.")
            if len(token) > _LONGEST_TOKEN:
                raise UserError(f"{path}, line {number}: a token of more than {_LONGEST_TOKEN} bytes.")
            ranks[token] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}, line {number}: not a tiktoken tokenizer, whose lines are a token in base64 and its rank. "
                "(A SentencePiece tokenizer.model, as of Llama 2, must be converted to a tokenizer.json.)"
            ) from None
    problem = "the file is empty"
    if ranks:
        problem = ""
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if set(ranks.values()) != set(range(len(ranks))):
            problem = f"the ranks of its {len(ranks):,} tokens are not 0 to {len(ranks) - 1:,}, each once"
        elif missing:
            problem = f"{len(missing)} of the 256 bytes are no tokens, {missing[0]:#04x} for one"
    if problem:
        raise UserError(f"{path}: not a tiktoken tokenizer: {problem}")
    return ranks


class _Added(BaseModel):
    model_config = ConfigDict(strict=True)

    content: str
    id: TokenId


class _Vocabulary(BaseModel):
    model_config = ConfigDict(strict=True)

    vocab: dict[str, TokenId] | list[tuple[str, float]]  # Unigram has scores; a token's place is its id


class _TokenizerFile(BaseModel):
    """What is read of a tokenizer.json here. All the rest is for the tokenizers library to check."""

    model_config = ConfigDict(strict=True)

    model: _Vocabulary
    added_tokens: list[_Added] | None = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


class _TokenizerConfig(BaseModel):
    """What is read of a tokenizer_config.json. A token is a text, or an object that has the text as its content."""

    model_config = ConfigDict(strict=True)

    bos_token: Annotated[str | None, BeforeValidator(_content)] = None
    eos_token: Annotated[str | None, BeforeValidator(_content)] = None


def _json_ids(path: Path, raw: bytes) -> tuple[int, int | None, int, dict[str, int]]:
    """vocab_size, bos_id, eos_id and the added tokens of a tokenizer.json whose patterns take no time."""
    file = parse_json(path, raw, _TokenizerFile, "a Hugging Face tokenizer")
    vocab = file.model.vocab
    ids = vocab if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
    added = {token.content: token.id for token in file.added_tokens or []}
    ids = ids | added
    if len(set(ids.values())) < len(ids):
        raise UserError(f"{path}: not a Hugging Face tokenizer: two of its tokens have the same id")
    eos_id = _special(path, ids, "eos_token", _EOS_NAMES)
    if eos_id is None:
        raise UserError(
            f"{path}: found no token that ends documents. Looked for eos_token in tokenizer_config.json beside it, "
            f"then for {', '.join(_EOS_NAMES)}. Put a tokenizer_config.json with eos_token beside the file."
        )
    texts = list(_texts([file.normalizer, file.pre_tokenizer, file.decoder]))
    if any(len(text) > _HARMLESS_CHARS or _PATTERN_SIGNS & set(text) for text in texts):
        _try_out(path, raw, "".join(texts))
    return 1 + max(ids.values()), _special(path, ids, "bos_token", _BOS_NAMES), eos_id, added


def _special(path: Path, ids: dict[str, int], key: str, names: Sequence[str]) -> int | None:
    if exists(path.with_name("tokenizer_config.json")):
        config = file_inside(path.parent, "tokenizer_config.json")
        name = getattr(parse_json(config, read_file(config, MOST_BYTES), _TokenizerConfig), key)
        if name is not None:
            if name not in ids:
                raise UserError(f"{config}: {key} is {short(repr(name))}, which {path.name} does not hold")
            return ids[name]
    return next((ids[name] for name in names if name in ids), None)


def _texts(part: Any) -> Iterator[str]:
    """All texts in a part of a JSON file but the keys and the patterns that are known."""
    if isinstance(part, str):
        if part not in _KNOWN_PATTERNS:
            yield part
    elif isinstance(part, dict | list):
        for value in part.values() if isinstance(part, dict) else part:
            yield from _texts(value)


@lru_cache(maxsize=1)  # one start asks for the size of the vocabulary more than once
def _try_out(path: Path, raw: bytes, characters: str) -> None:
    """Let another process load a tokenizer.json and encode long texts, because a pattern can take time without end.

    Args:
        characters: of which texts are made, too: those of its patterns.

    Raises:
        UserError: it ended in an error, or took more than a second.
    """
    alphabet = [*dict.fromkeys(" \n\ta0_-.é日" + characters)][:100]
    runs = [c * _TRIED_CHARS + end for c in [*alphabet, "ab", "a ", "a0", "a_", "0."] for end in ("", "!")]
    mixed = (string.printable + characters[:1000]) * 10
    message = json.dumps([*runs, mixed]).encode()
    command = [sys.executable, "-P", "-c", _TRIAL, str(len(message))]
    try:
        ended = subprocess.run(command, input=message + raw, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{path}: to load it and to encode some texts takes more than a minute.") from None
    if ended.returncode in (-signal.SIGPROF, -signal.SIGXCPU):
        raise UserError(f"{path}: its patterns take too long on some texts: more than a second where others take none.")
    if ended.returncode:
        reason = ended.stdout.decode(errors="replace") or f"it ended with {ended.returncode}"
        raise UserError(f"{path}: the tokenizers library cannot load it, or cannot encode with it: {reason}")


# The child's program: limits of time and memory, then what a hostile file could do.
_TRIAL = """
import json, resource, signal, sys
message = sys.stdin.buffer.read()
length = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_buffer(message[length:])
    signal.setitimer(signal.ITIMER_PROF, 1.0)
    for text in json.loads(message[:length]):
        tokenizer.encode(text, add_special_tokens=False)
except BaseException as error:
    print(str(error)[:500], end="")
    sys.exit(1)
"""


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
