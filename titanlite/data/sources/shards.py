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
from pydantic import BaseModel, Field, NonNegativeInt

from titanlite.config.errors import UserError
from titanlite.config.files import parse_json, read_file
from titanlite.config.schema import TextSource
from titanlite.data.sources.base import Files, Prepared, RandomAccess
from titanlite.data.tokenizer import Tokenizer

FORMAT = 2
"""Format 1 had no hashes of the texts."""
BLOCK_BYTES = 1 << 16
_NUMBERS = ("", "<Q", "<2Q")
_TOKENS, _INDEX, _HASHES = range(3)  # the files of a shard
_REMEDY = "Copy it again, or remove the folder and run titanlite prepare again."
_MOST_BYTES = 1 << 28  # of a manifest: a million shards


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
        raw = read_file(path, _MOST_BYTES)
        self._manifest = manifest = parse_json(path, raw, Manifest, "what titanlite prepare wrote; it is damaged")
        self._shards = [_Shard(path.with_name(entry.name), entry, manifest) for entry in manifest.shards]
        self._first = list(accumulate((entry.documents for entry in manifest.shards), initial=0))
        self.num_documents = self.num_units = self._first[-1]
        self.num_tokens = sum(entry.tokens for entry in manifest.shards)
        self.fingerprint = xxhash.xxh3_128_hexdigest(raw)
        self._with_hashes = False

    def record(self, index: int) -> Prepared:
        number = bisect_right(self._first, index) - 1
        return self._shards[number].document(index - self._first[number], self._with_hashes)

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

    def describe(self) -> str:
        return f"{super().describe()}, {self.num_tokens:,} tokens"


class _Shard:
    """One shard. Each of its files is opened once, when it is first read.

    Args:
        path: of its files, without a file.
    """

    def __init__(self, path: Path, entry: ShardEntry, manifest: Manifest) -> None:
        self._entry, self._dtype = entry, np.dtype(manifest.dtype).newbyteorder("<")
        size = entry.tokens * self._dtype.itemsize
        self._checked = bytearray(-(-size // BLOCK_BYTES))
        self._sizes = [size, 8 * (entry.documents + len(self._checked))]
        if manifest.format > 1:
            self._sizes.append(8 * entry.documents)
        self._files = Files([path.with_suffix(end) for end in (".bin", ".idx", ".hash")[: len(self._sizes)]])
        self._open: dict[int, BinaryIO] = {}
        for file, expected in enumerate(self._sizes):
            with self._files.open(file) as stream:
                if (found := stream.seek(0, os.SEEK_END)) != expected:
                    raise self._error(file, f"is truncated or altered: it has {found:,} of {expected:,} bytes")
        self._check_whole(_INDEX, entry.index_checksum)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a background process opens the files itself

    def document(self, index: int, with_hash: bool) -> Prepared:
        """Document `index`. `with_hash`: also the hash of its text."""
        start, end = self._numbers(_INDEX, index - 1, 2) if index else (0, *self._numbers(_INDEX, 0, 1))
        width, text_hash = self._dtype.itemsize, -1
        start, end = start * width, end * width
        raw = self._read(_TOKENS, start, end)
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if not self._checked[block]:
                self._check(block)
        if with_hash:
            if _HASHES not in self._open:
                self._check_whole(_HASHES, self._entry.hash_checksum)
            (text_hash,) = self._numbers(_HASHES, index, 1)
        return Prepared(np.frombuffer(raw, self._dtype), text_hash)

    def _read(self, file: int, start: int, end: int) -> bytes:
        if file not in self._open:
            self._open[file] = self._files.open(file)
        raw = os.pread(self._open[file].fileno(), end - start, start)
        if len(raw) < end - start:
            raise self._error(file, "has become shorter while it was read")
        return raw

    def _numbers(self, file: int, start: int, count: int) -> tuple[int, ...]:
        return struct.unpack(_NUMBERS[count], self._read(file, 8 * start, 8 * (start + count)))

    def _check(self, block: int) -> None:
        start = block * BLOCK_BYTES
        raw = self._read(_TOKENS, start, min(start + BLOCK_BYTES, self._sizes[_TOKENS]))
        (checksum,) = self._numbers(_INDEX, self._entry.documents + block, 1)
        if xxhash.xxh3_64_intdigest(raw) != checksum:
            raise self._error(_TOKENS, f"is altered: the checksum of block {block} does not match")
        self._checked[block] = 1

    def _check_whole(self, file: int, checksum: str | None) -> None:
        if xxhash.xxh3_64_hexdigest(self._read(file, 0, self._sizes[file])) != checksum:
            raise self._error(file, "is altered: its checksum does not match manifest.json")

    def _error(self, file: int, fault: str) -> UserError:
        return UserError(f"{self._files.paths[file]} {fault}. {_REMEDY}")
