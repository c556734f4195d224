"""Token shards that `titanlite prepare` made, memory-mapped.

Invariant: what is read is what was written. Names, sizes, the tokenizer and the index are checked when shards are
opened. A block of 64 KiB is checked against its checksum when it is first touched, so that terabytes need no reading in
advance.

A folder holds manifest.json and three files for each shard. NAME.bin: the token ids of its documents, bos and eos
included, as uint16 or uint32, little-endian; a record that was skipped is a document without tokens. NAME.idx: the end
of each document in tokens, then a checksum for each block, all uint64. NAME.hash: `text_hash` of each document, uint64;
only a run with a holdout reads it.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from titanlite.config.errors import UserError
from titanlite.data.sources.base import RandomAccess, open_file
from titanlite.data.tokenizer import Tokenizer

FORMAT = 2
"""Format 1 had no hashes of the texts."""
BLOCK_BYTES = 1 << 16
_REMEDY = "Copy it again, or remove the folder and run titanlite prepare again."


class ShardEntry(BaseModel):
    """A shard in the manifest."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: Annotated[str, Field(pattern=r"^shard-\d{5,9}$")]
    documents: NonNegativeInt
    tokens: NonNegativeInt
    skipped: NonNegativeInt
    index_checksum: str
    hash_checksum: str | None = None


class Header(BaseModel):
    """What all shards of a folder have in common; prepared again with another header, they would be others."""

    model_config = ConfigDict(strict=True, frozen=True)

    format: int
    source: str
    source_fingerprint: str
    tokenizer: str
    tokenizer_path: str
    vocab_size: PositiveInt
    dtype: Literal["uint16", "uint32"]
    on_bad_record: Literal["error", "skip"]


class Manifest(Header):
    """manifest.json."""

    shards: tuple[ShardEntry, ...]


def read_manifest(path: Path) -> Manifest:
    """The manifest in the file `path`.

    Raises:
        UserError: it is damaged, or of a format that this version does not read.
    """
    with open_file(path) as file:
        raw = file.read()
    try:
        manifest = Manifest.model_validate_json(raw, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path} is damaged: {place}: {first['msg']}. {_REMEDY}") from None
    if manifest.format not in (1, FORMAT):
        raise UserError(f"{path.parent}: shards of format {manifest.format}; this titanlite reads 1 to {FORMAT}")
    return manifest


def block_checksums(raw: memoryview | bytes) -> np.ndarray:
    """xxh3 of each block of a shard, uint64."""
    view = memoryview(raw)
    sums = [xxhash.xxh3_64_intdigest(view[i : i + BLOCK_BYTES]) for i in range(0, len(view), BLOCK_BYTES)]
    return np.array(sums, dtype="<u8")


class Shards(RandomAccess):
    """Documents as token arrays."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self.manifest = read_manifest(folder / "manifest.json")
        self._shards = [_Shard(folder, entry, self.manifest) for entry in self.manifest.shards]
        self._first = list(accumulate((entry.documents for entry in self.manifest.shards), initial=0))
        self.num_documents = self._first[-1]
        self.num_tokens = sum(entry.tokens for entry in self.manifest.shards)
        if not self.num_tokens:
            raise UserError(f"{name} is empty: no token in {folder}")
        self.size = self.num_tokens * np.dtype(self.manifest.dtype).itemsize
        self.fingerprint = xxhash.xxh3_128_hexdigest((folder / "manifest.json").read_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.name, self._folder)  # a background process maps the files itself

    def record(self, index: int) -> np.ndarray:
        number = bisect_right(self._first, index) - 1
        return self._shards[number].document(index - self._first[number])

    def text_hash(self, index: int) -> int:
        number = bisect_right(self._first, index) - 1
        return self._shards[number].text_hash(index - self._first[number])

    def check(self, tokenizer: Tokenizer, holdout: float) -> None:
        """Refuse ids of another tokenizer, and shards that do not know which documents are held out.

        Raises:
            UserError: they are such.
        """
        if not tokenizer.is_known_as(self.manifest.tokenizer):
            raise UserError(
                f"{self._folder} was made with another tokenizer ({self.manifest.tokenizer_path}) than "
                f"{tokenizer.path}. Set tokenizer.path to that one, or run titanlite prepare again."
            )
        if holdout and self.manifest.format == 1:
            raise UserError(
                f"validation.holdout = {holdout}: {self._folder} was prepared by an older titanlite, which did not "
                "keep the hashes that say which documents are held out. Remove the folder and run titanlite prepare "
                "again, or give [validation] a source of its own."
            )

    def describe(self) -> str:
        return f"{self.name}: {self.num_documents:,} documents, {self.num_tokens:,} tokens"


class _Shard:
    def __init__(self, folder: Path, entry: ShardEntry, manifest: Manifest) -> None:
        self._entry, self._dtype = entry, np.dtype(manifest.dtype).newbyteorder("<")
        self._path, self._hash_path = folder / f"{entry.name}.bin", folder / f"{entry.name}.hash"
        self._vocab_size, size = manifest.vocab_size, entry.tokens * self._dtype.itemsize
        blocks = -(-size // BLOCK_BYTES)
        index = folder / f"{entry.name}.idx"
        sizes = {self._path: size, index: 8 * (entry.documents + blocks)}
        if manifest.format > 1:
            sizes[self._hash_path] = 8 * entry.documents
        for path, expected in sizes.items():
            if not path.is_file():
                raise UserError(f"{path} is missing: run titanlite prepare again")
            if path.stat().st_size != expected:
                found = path.stat().st_size
                raise UserError(f"{path} is truncated or altered: {found:,} bytes, not {expected:,}. {_REMEDY}")
        numbers = _map_checked(index, entry.index_checksum)
        self._ends, self._sums = numbers[: entry.documents], numbers[entry.documents :]
        self._checked = bytearray(blocks)
        self._tokens: np.ndarray | None = None
        self._hashes: np.ndarray | None = None

    def document(self, index: int) -> np.ndarray:
        if self._tokens is None:
            self._raw = _map(self._path)
            self._tokens = np.frombuffer(self._raw, dtype=self._dtype)
        start, end = (int(self._ends[index - 1]) if index else 0), int(self._ends[index])
        size = self._dtype.itemsize
        for block in range(start * size // BLOCK_BYTES, (end * size - 1) // BLOCK_BYTES + 1):
            if not self._checked[block]:
                self._check(block)
        return self._tokens[start:end]

    def text_hash(self, index: int) -> int:
        if self._hashes is None:
            self._hashes = _map_checked(self._hash_path, self._entry.hash_checksum)
        return int(self._hashes[index])

    def _check(self, block: int) -> None:
        raw = memoryview(self._raw)[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if xxhash.xxh3_64_intdigest(raw) != int(self._sums[block]):
            raise UserError(f"{self._path} is altered: the checksum of block {block} does not match. {_REMEDY}")
        if int(np.frombuffer(raw, dtype=self._dtype).max()) >= self._vocab_size:
            raise UserError(f"{self._path} holds token ids beyond its vocabulary of {self._vocab_size:,}. {_REMEDY}")
        self._checked[block] = 1


def _map_checked(path: Path, checksum: str | None) -> np.ndarray:
    """The numbers in a file, uint64."""
    raw = _map(path)
    if xxhash.xxh3_64_hexdigest(raw) != checksum:
        raise UserError(f"{path} is altered: its checksum does not match manifest.json. {_REMEDY}")
    return np.frombuffer(raw, dtype="<u8")


def _map(path: Path) -> mmap.mmap | bytes:
    with open_file(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
