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

import struct
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, Field, NonNegativeInt

from titanlite.config.errors import UserError
from titanlite.config.files import parse_json
from titanlite.config.schema import TextSource
from titanlite.data.sources.base import File, Prepared, RandomAccess
from titanlite.data.tokenizer import Tokenizer

FORMAT = 2
"""Format 1 had no hashes of the texts."""
BLOCK_BYTES = 1 << 16
_ENDINGS = (".bin", ".idx", ".hash")
_PAIR, _ZERO = struct.Struct("<2Q"), bytes(8)
_REMEDY = "Copy it again, or remove the folder and run titanlite prepare again."
# Each shard has two or three files, and a process may usually open 1,024.
_opened = lru_cache(maxsize=500)(lambda file: file.open(0))
MOST_BYTES = 1 << 28  # of a manifest: a million shards


class ShardEntry(BaseModel, strict=True, frozen=True):
    """A shard in the manifest."""

    name: Annotated[str, Field(pattern=r"^shard-\d{5,9}$")]
    documents: NonNegativeInt
    tokens: NonNegativeInt
    index_checksum: str
    hash_checksum: str | None = None


class Manifest(BaseModel, strict=True, frozen=True):
    """What manifest.json must hold. `titanlite prepare` also writes what the shards were made of."""

    format: Literal[1, 2]
    tokenizer: str
    tokenizer_path: str
    dtype: Literal["uint16", "uint32"]
    shards: Annotated[tuple[ShardEntry, ...], Field(strict=False)]


def block_checksums(raw: bytes) -> np.ndarray:
    """xxh3 of each block of a shard, uint64."""
    view = memoryview(raw)
    sums = [xxhash.xxh3_64_intdigest(view[i : i + BLOCK_BYTES]) for i in range(0, len(view), BLOCK_BYTES)]
    return np.array(sums, dtype="<u8")


class Shards(RandomAccess):
    """Documents as token arrays.

    Raises:
        UserError: the folder is damaged, or of a format that this version does not read.
    """

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        super().__init__(spec, files)
        (path,) = files
        raw, file = self.files[0].open().read(MOST_BYTES), type(self.files[0])
        self._manifest = manifest = parse_json(path, raw, Manifest, "what titanlite prepare wrote; it is damaged")
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._shards = [[file(path.with_name(entry.name + end)) for end in _ENDINGS] for entry in manifest.shards]
        self._first = list(accumulate((entry.documents for entry in manifest.shards), initial=0))
        self.num_documents = self.num_units = self._first[-1]
        self.num_tokens = sum(entry.tokens for entry in manifest.shards)
        self.fingerprint = xxhash.xxh3_128_hexdigest(raw)
        self._with_hashes = False
        with ThreadPoolExecutor() as pool:  # because a storage takes a tenth of a second to answer
            self._checked = [*pool.map(self._blocks_of, manifest.shards, self._shards)]  # whether each block was

    def _blocks_of(self, entry: ShardEntry, shard: list[File]) -> bytearray:
        """A byte for each block of a shard, whose size and index are as the manifest says."""
        tokens, index, _ = shard
        size = entry.tokens * self._dtype.itemsize
        if (found := tokens.check()[0]) != size:
            raise _damage(tokens, f"is truncated or altered: it has {found:,} of {size:,} bytes")
        _check_whole(index, entry.index_checksum)
        return bytearray(-(-size // BLOCK_BYTES))

    def record(self, index: int) -> Prepared:
        number = bisect_right(self._first, index) - 1
        local, width, text_hash = index - self._first[number], self._dtype.itemsize, -1
        tokens, ends, hashes = self._shards[number]
        start, end = _PAIR.unpack(self._read(ends, 8 * local - 8, 16) if local else _ZERO + self._read(ends, 0, 8))
        start, end = start * width, end * width
        raw, checked = self._read(tokens, start, end - start), self._checked[number]
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if not checked[block]:
                self._check(number, block)
        if self._with_hashes:
            text_hash = int.from_bytes(self._read(hashes, 8 * local, 8), "little")
        return Prepared(np.frombuffer(raw, self._dtype), text_hash)

    def _read(self, file: File, start: int, size: int) -> bytes:
        stream = _opened(file)
        stream.seek(start)
        if len(raw := stream.read(size)) < size:
            raise _damage(file, "has become shorter while it was read")
        return raw

    def _check(self, number: int, block: int) -> None:
        """Compare a block of a shard with its checksum."""
        entry, (tokens, index, _) = self._manifest.shards[number], self._shards[number]
        start = block * BLOCK_BYTES
        raw = self._read(tokens, start, min(BLOCK_BYTES, entry.tokens * self._dtype.itemsize - start))
        checksum = int.from_bytes(self._read(index, 8 * (entry.documents + block), 8), "little")
        if xxhash.xxh3_64_intdigest(raw) != checksum:
            raise _damage(tokens, f"is altered: the checksum of block {block} does not match")
        self._checked[number][block] = 1

    def check(self, tokenizer: Tokenizer, holdout: float) -> None:
        """Refuse ids of another tokenizer, and shards that do not know which documents are held out.

        Raises:
            UserError: they are such.
        """
        if not tokenizer.is_known_as(self._manifest.tokenizer):
            made = f"{self.name} was made with another tokenizer ({self._manifest.tokenizer_path}) than"
            raise UserError(f"{made} {tokenizer.path}. Set tokenizer.path to that one, or run titanlite prepare again.")
        self._with_hashes = holdout > 0
        if self._with_hashes and self._manifest.format == 1:
            made = f"{self.name} was prepared by an older titanlite, which did not keep what validation.holdout needs"
            raise UserError(f"{made}. Prepare it again, or give [validation] a source of its own.")
        if self._with_hashes:
            sums = (entry.hash_checksum for entry in self._manifest.shards)
            with ThreadPoolExecutor() as pool:
                list(pool.map(_check_whole, (hashes for *_, hashes in self._shards), sums))

    def describe(self) -> str:
        return f"{super().describe()}, {self.num_tokens:,} tokens"


def _check_whole(file: File, checksum: str | None) -> None:
    with file.open() as stream:
        if xxhash.xxh3_64_hexdigest(stream.read()) != checksum:
            raise _damage(file, "is altered: its checksum does not match manifest.json")


def _damage(file: File, fault: str) -> UserError:
    return UserError(f"{file.path} {fault}. {_REMEDY}")
