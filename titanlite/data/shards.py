"""Token shards that `titanlite prepare` made, memory-mapped.

Invariant: what is read is what was written. Names, sizes, the tokenizer and the index are checked when shards are
opened; each block of 64 KiB is checked against its checksum when it is first touched, so that terabytes need no reading
in advance. May import titanlite.config and data.sources.

A folder holds manifest.json and, for each shard, NAME.bin: the token ids of its documents, bos and eos included, as
uint16 or uint32, little-endian; NAME.idx: uint64 end of each document in tokens, then one checksum for each block.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.config.errors import UserError
from titanlite.data.sources import RandomAccess, open_file
from titanlite.data.tokenizer import Tokenizer

FORMAT = 1
BLOCK_BYTES = 1 << 16


def block_checksums(raw: memoryview | bytes) -> np.ndarray:
    """xxh3 of each block of a shard, uint64."""
    view = memoryview(raw)
    sums = [xxhash.xxh3_64_intdigest(view[i : i + BLOCK_BYTES]) for i in range(0, len(view), BLOCK_BYTES)]
    return np.array(sums, dtype="<u8")


class Shards(RandomAccess):
    """Documents as token arrays."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        raw = (folder / "manifest.json").read_bytes()
        try:
            self.manifest: dict[str, Any] = json.loads(raw)
            shards, version = self.manifest["shards"], self.manifest["format"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{folder / 'manifest.json'} is damaged: run titanlite prepare again") from None
        if version != FORMAT:
            raise UserError(f"{folder}: shards of format {version}; this titanlite reads format {FORMAT}")
        self._shards = [_Shard(folder, shard, self.manifest) for shard in shards]
        self._first = list(accumulate((shard["documents"] for shard in shards), initial=0))
        self.num_documents, self.num_tokens = self._first[-1], sum(shard["tokens"] for shard in shards)
        self.size = self.num_tokens * np.dtype(self.manifest["dtype"]).itemsize
        self.fingerprint = xxhash.xxh3_128_hexdigest(raw)

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.name, self._folder)  # a background process maps the files itself

    def __getitem__(self, index: int) -> np.ndarray:
        number = bisect_right(self._first, index) - 1
        return self._shards[number].document(index - self._first[number])

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse ids of another tokenizer.

        Raises:
            UserError: they are.
        """
        if self.manifest["tokenizer"] != tokenizer.fingerprint:
            raise UserError(
                f"{self._folder} was made with another tokenizer ({self.manifest['tokenizer_path']}) than "
                f"{tokenizer.path}. Set tokenizer.path to that one, or run titanlite prepare again."
            )

    def describe(self) -> str:
        return f"{self.name}: {self.num_documents:,} documents, {self.num_tokens:,} tokens"


class _Shard:
    def __init__(self, folder: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> None:
        self._path, self._dtype = folder / f"{entry['name']}.bin", np.dtype(manifest["dtype"]).newbyteorder("<")
        self._vocab_size, self._bytes = manifest["vocab_size"], entry["tokens"] * self._dtype.itemsize
        blocks = -(-self._bytes // BLOCK_BYTES)
        index = folder / f"{entry['name']}.idx"
        for path, expected in ((self._path, self._bytes), (index, 8 * (entry["documents"] + blocks))):
            if not path.is_file():
                raise UserError(f"{path} is missing: run titanlite prepare again")
            if path.stat().st_size != expected:
                found = path.stat().st_size
                raise UserError(f"{path} is truncated or altered: {found:,} bytes, not {expected:,}. {_REMEDY}")
        raw = _map(index)
        if xxhash.xxh3_64_hexdigest(raw) != entry["index_checksum"]:
            raise UserError(f"{index} is altered: its checksum does not match manifest.json. {_REMEDY}")
        numbers = np.frombuffer(raw, dtype="<u8")
        self._ends, self._sums = numbers[: entry["documents"]], numbers[entry["documents"] :]
        self._checked = bytearray(blocks)
        self._tokens: np.ndarray | None = None

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

    def _check(self, block: int) -> None:
        raw = memoryview(self._raw)[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if xxhash.xxh3_64_intdigest(raw) != int(self._sums[block]):
            raise UserError(f"{self._path} is altered: the checksum of block {block} does not match. {_REMEDY}")
        if int(np.frombuffer(raw, dtype=self._dtype).max()) >= self._vocab_size:
            raise UserError(f"{self._path} holds token ids beyond its vocabulary of {self._vocab_size:,}. {_REMEDY}")
        self._checked[block] = 1


_REMEDY = "Copy it again, or remove the folder and run titanlite prepare again."


def _map(path: Path) -> mmap.mmap | bytes:
    with open_file(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
