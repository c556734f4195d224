"""Token shards that `titanlite prepare` made.

Invariant: what is read is what was written. Names, sizes, the tokenizer and the index are checked when shards are
opened. A block of 64 KiB is checked against its checksum when it is first touched, so that terabytes need no reading in
advance. Files are read, not mapped into memory: to touch a mapped file that became shorter would end the process.

A folder holds manifest.json and three files for each shard. NAME.bin: the token ids of its documents, bos and eos
included, as uint16 or uint32, little-endian; a record that was skipped is a document without tokens. NAME.idx: the end
of each document in tokens, then a checksum for each block, all uint64. NAME.hash: `text_hash` of each document, uint64;
only a run with a holdout reads it.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from titanlite.config.errors import UserError
from titanlite.config.files import parse_json, read_file
from titanlite.data.sources.base import Files, Prepared, RandomAccess, is_empty, open_file
from titanlite.data.tokenizer import Tokenizer

FORMAT = 2
"""Format 1 had no hashes of the texts."""
BLOCK_BYTES = 1 << 16
_REMEDY = "Copy it again, or remove the folder and run titanlite prepare again."
_NUMBERS = {1: "<Q", 2: "<2Q"}
_MOST_BYTES = 1 << 28  # of a manifest: a million shards


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

    shards: Annotated[tuple[ShardEntry, ...], Field(strict=False)]


def block_checksums(raw: bytes) -> np.ndarray:
    """xxh3 of each block of a shard, uint64."""
    view = memoryview(raw)
    sums = [xxhash.xxh3_64_intdigest(view[i : i + BLOCK_BYTES]) for i in range(0, len(view), BLOCK_BYTES)]
    return np.array(sums, dtype="<u8")


class Shards(RandomAccess):
    """Documents as token arrays.

    Raises:
        UserError: the folder is damaged, empty, or of a format that this version does not read.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder, path = name, folder, folder / "manifest.json"
        raw = read_file(path, _MOST_BYTES)
        self.manifest = manifest = parse_json(path, raw, Manifest, "what titanlite prepare wrote; it is damaged")
        if manifest.format not in (1, FORMAT):
            raise UserError(f"{folder}: shards of format {manifest.format}; this titanlite reads 1 to {FORMAT}")
        self._shards = [_Shard(folder, entry, manifest) for entry in manifest.shards]
        self._first = list(accumulate((entry.documents for entry in manifest.shards), initial=0))
        self.num_documents = self._first[-1]
        self.num_tokens = sum(entry.tokens for entry in manifest.shards)
        if not self.num_tokens:
            raise is_empty(name, [folder])
        self.size = self.num_tokens * np.dtype(manifest.dtype).itemsize
        self.fingerprint = xxhash.xxh3_128_hexdigest(raw)
        self.files = Files([Path(path) for shard in self._shards for path in shard.sizes])
        self._with_hashes = False

    def record(self, index: int) -> Prepared:
        number = bisect_right(self._first, index) - 1
        return self._shards[number].document(index - self._first[number], self._with_hashes)

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
        self._with_hashes = holdout > 0
        if self._with_hashes and self.manifest.format == 1:
            raise UserError(
                f"validation.holdout = {holdout}: {self._folder} was prepared by an older titanlite, which did not "
                "keep the hashes that say which documents are held out. Remove the folder and run titanlite prepare "
                "again, or give [validation] a source of its own."
            )

    def describe(self) -> str:
        return f"{self.name}: {self.num_documents:,} documents, {self.num_tokens:,} tokens"


class _Shard:
    """One shard. Each of its files is opened once, when it is first read.

    Attributes:
        sizes: bytes of each of its files.
    """

    def __init__(self, folder: Path, entry: ShardEntry, manifest: Manifest) -> None:
        self._entry, self._dtype = entry, np.dtype(manifest.dtype).newbyteorder("<")
        self._vocab_size, size = manifest.vocab_size, entry.tokens * self._dtype.itemsize
        blocks = -(-size // BLOCK_BYTES)
        self._bin, self._index, self._hash = (f"{folder}/{entry.name}{end}" for end in (".bin", ".idx", ".hash"))
        self.sizes = {self._bin: size, self._index: 8 * (entry.documents + blocks)}
        if manifest.format > 1:
            self.sizes[self._hash] = 8 * entry.documents
        for path, expected in self.sizes.items():
            if not os.path.isfile(path):
                raise UserError(f"{path} is missing: run titanlite prepare again")
            if (found := os.path.getsize(path)) != expected:
                raise UserError(f"{path} is truncated or altered: {found:,} bytes, not {expected:,}. {_REMEDY}")
        self._open: dict[str, int] = {}  # descriptors, by name
        self._streams: list[BinaryIO] = []  # which close them
        self._checked = bytearray(blocks)
        self._check_whole(self._index, entry.index_checksum)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_streams": []}  # a background process opens the files itself

    def document(self, index: int, with_hash: bool) -> Prepared:
        """Document `index`. `with_hash`: also the hash of its text."""
        start, end = self._numbers(self._index, index - 1, 2) if index else (0, *self._numbers(self._index, 0, 1))
        start, end = start * self._dtype.itemsize, end * self._dtype.itemsize
        raw, text_hash = self._read(self._bin, start, end), -1
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if not self._checked[block]:
                self._check(block)
        if with_hash:
            if self._hash not in self._open:
                self._check_whole(self._hash, self._entry.hash_checksum)
            (text_hash,) = self._numbers(self._hash, index, 1)
        return Prepared(np.frombuffer(raw, self._dtype), text_hash)

    def _read(self, path: str, start: int, end: int) -> bytes:
        if path not in self._open:
            self._streams.append(open_file(Path(path)))
            self._open[path] = self._streams[-1].fileno()
        raw = os.pread(self._open[path], end - start, start)
        if len(raw) < end - start:
            raise UserError(f"{path} has changed while it was read: it is shorter than it was. {_REMEDY}")
        return raw

    def _numbers(self, path: str, start: int, count: int) -> tuple[int, ...]:
        return struct.unpack(_NUMBERS[count], self._read(path, 8 * start, 8 * (start + count)))

    def _check(self, block: int) -> None:
        start = block * BLOCK_BYTES
        raw = self._read(self._bin, start, min(start + BLOCK_BYTES, self.sizes[self._bin]))
        (checksum,) = self._numbers(self._index, self._entry.documents + block, 1)
        if xxhash.xxh3_64_intdigest(raw) != checksum:
            raise UserError(f"{self._bin} is altered: the checksum of block {block} does not match. {_REMEDY}")
        if int(np.frombuffer(raw, self._dtype).max()) >= self._vocab_size:
            raise UserError(f"{self._bin} holds token ids beyond its vocabulary of {self._vocab_size:,}. {_REMEDY}")
        self._checked[block] = 1

    def _check_whole(self, path: str, checksum: str | None) -> None:
        digest = xxhash.xxh3_64()
        for start in range(0, self.sizes[path], 1 << 24):
            digest.update(self._read(path, start, min(start + (1 << 24), self.sizes[path])))
        if digest.hexdigest() != checksum:
            raise UserError(f"{path} is altered: its checksum does not match manifest.json. {_REMEDY}")
