"""What a tokenizer file holds: the tokens of a tiktoken-format `tokenizer.model`, or the ids of a `tokenizer.json`.

Invariant: a file that is no good tokenizer is refused, in about a second. Nothing in it is executed but the patterns of
a tokenizer.json, which are tried in a process of their own first. Neither tiktoken nor tokenizers is imported here, so
that a job file is validated without them.
"""

from __future__ import annotations

import base64
import binascii
import json
import signal
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from titanlite.config.errors import UserError
from titanlite.config.files import exists, file_inside, parse_json, read_file, short

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


def llama3_special_tokens() -> list[str]:
    """The 256 special tokens of Llama 3.1 in the order of their ids, which follow the ordinary ones."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(256))
    return [_LLAMA3_NAMED.get(i) or next(reserved) for i in range(256)]


def read_vocab_size(path: str | Path) -> int:
    """`vocab_size` of the tokenizer at `path` without building it: no import, 0.1 s for 128 thousand tokens.

    Raises:
        UserError: the file is missing, or is not a tokenizer; the message names it.
    """
    path = Path(path)
    raw = read_tokenizer_file(path)
    if path.suffix == ".json":
        return json_ids(path, raw)[0]
    return len(parse_ranks(path, raw)) + len(llama3_special_tokens())


def read_tokenizer_file(path: Path) -> bytes:
    """The file in memory. Raises UserError: it cannot be read, or is larger than any tokenizer."""
    if path.is_dir():
        raise UserError(f"tokenizer {path} is a folder; name the file in it (tokenizer.model or tokenizer.json)")
    return read_file(path, MOST_BYTES)


def parse_ranks(path: Path, raw: bytes) -> dict[bytes, int]:
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


def json_ids(path: Path, raw: bytes) -> tuple[int, int | None, int, dict[str, int]]:
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
