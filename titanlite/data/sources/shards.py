"""Token shards written by `titanlite prepare`.

Invariant: A run trains on the tokens that `titanlite prepare` wrote, or it stops. Opening the
shards verifies their sizes, tokenizer and indexes. Each read verifies the blocks that contain the
data, so training starts without a pass over terabytes. Files are read rather than memory-mapped,
because reading a mapped file after it was truncated kills the process.

A folder contains manifest.json and three files per shard:

- NAME.bin: the token ids of its documents with BOS and EOS, as little-endian uint16 or uint32. A
  skipped record is a document without tokens.
- NAME.idx: the end of each document in tokens, then a checksum for each block of 64 KiB of
  NAME.bin, all as uint64.
- NAME.hash: `hash_text` of each document as uint64. Only runs with a holdout read it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import xxhash
from pydantic import BaseModel, Field, NonNegativeInt

from titanlite.config.errors import UserError
from titanlite.config.files import parse_json
from titanlite.config.schema import TextSource
from titanlite.data.sources.base import File, TokenSource, make_file
from titanlite.data.sources.records import Prepared
from titanlite.data.tokenizer import Tokenizer

FORMAT = 2  # format 1 had no .hash files
TOKEN_BLOCK_BYTES = 1 << 16
MAX_MANIFEST_BYTES = 1 << 28  # enough for a million shards
# Reading a document requires only two numbers of the index, so small blocks reduce the bytes to
# read. Larger blocks would save memory, because the checksum of each block is kept in memory.
_INDEX_BLOCK_BYTES = 1 << 12
# Part of the error message for a manifest that cannot be parsed.
DAMAGED_MANIFEST = "what titanlite prepare wrote; it is damaged"
_REMEDY = "Copy it again, or remove the folder and run titanlite prepare again."


class ShardEntry(BaseModel, strict=True, frozen=True):
    """The entry of a shard in manifest.json: its name, sizes and checksums."""

    name: Annotated[str, Field(pattern=r"^shard-\d{5,9}$")]
    """Name of the files of the shard, without suffix."""
    documents: NonNegativeInt
    tokens: NonNegativeInt
    index_checksum: str
    """xxh3 checksum of the .idx file."""
    hash_checksum: str | None = None
    """xxh3 checksum of the .hash file. None in format 1, which has no such file."""


class ShardManifest(BaseModel, strict=True, frozen=True):
    """The fields of manifest.json that are needed to read the shards."""

    format: Literal[1, 2]
    tokenizer: str
    """Fingerprint of the tokenizer."""
    tokenizer_path: str
    """Name of the tokenizer file, for messages."""
    dtype: Literal["uint16", "uint32"]
    """Data type of the token ids."""
    shards: Annotated[tuple[ShardEntry, ...], Field(strict=False)]


def block_checksums(raw: bytes, block_bytes: int = TOKEN_BLOCK_BYTES) -> np.ndarray:
    """Return the xxh3 checksum of each block of `block_bytes` bytes, as an array of uint64.

    The last block can be shorter.
    """
    view = memoryview(raw)
    starts = range(0, len(view), block_bytes)
    checksums = [xxhash.xxh3_64_intdigest(view[start : start + block_bytes]) for start in starts]
    return np.array(checksums, dtype="<u8")


class _IndexFile:
    """Reads the .idx or .hash file of a shard, and verifies the content on each read.

    The file contains uint64 numbers. The checksums of its blocks are kept in memory to detect
    changes after the file was opened.
    """

    def __init__(self, path: Path, checksum: str | None) -> None:
        """Read the file once, to verify it and to compute the checksums of its blocks.

        Args:
            path: Path of the file.
            checksum: Checksum of the whole file, from manifest.json.

        Raises:
            UserError: If the file does not have this checksum.
        """
        self._file = make_file(path, _REMEDY)
        with self._file.open() as stream:
            raw = stream.read()
        if xxhash.xxh3_64_hexdigest(raw) != checksum:
            raise _damaged(self._file, "is altered: its checksum does not match manifest.json")
        self._size = len(raw)
        self._checksums = block_checksums(raw, _INDEX_BLOCK_BYTES)

    def read(self, start: int, count: int) -> np.ndarray:
        """Read `count` numbers, beginning at index `start`, and verify their checksums.

        Returns:
            The numbers, shape (count,), uint64.

        Raises:
            UserError: If the file was changed after it was opened.
        """
        start_byte = 8 * start  # a uint64 takes 8 bytes
        end_byte = 8 * (start + count)

        # Checksums are for whole blocks, so read all blocks that contain a part of the range. The
        # last block of the file can be shorter.
        first_block = start_byte // _INDEX_BLOCK_BYTES
        end_block = math.ceil(end_byte / _INDEX_BLOCK_BYTES)
        blocks_start = first_block * _INDEX_BLOCK_BYTES
        blocks_end = min(end_block * _INDEX_BLOCK_BYTES, self._size)
        blocks = self._file.read(blocks_start, blocks_end - blocks_start)

        checksums = self._checksums[first_block:end_block]
        _verify(self._file, blocks, first_block, checksums, _INDEX_BLOCK_BYTES)
        return np.frombuffer(blocks, "<u8", count, offset=start_byte - blocks_start)


class Shards(TokenSource):
    """Source that reads documents tokenized in advance by `titanlite prepare`."""

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        """Open the shards of a folder and verify their sizes and indexes.

        Args:
            spec: Table of the job file that describes the source.
            files: The path of manifest.json, as the only item.

        Raises:
            UserError: If the folder is damaged or has a format that this version cannot read.
        """
        super().__init__(spec, files)
        (path,) = files
        raw = self.files[0].open().read(MAX_MANIFEST_BYTES)
        manifest = parse_json(path, raw, ShardManifest, DAMAGED_MANIFEST)

        self._folder = path.parent
        self._manifest = manifest
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        # Index of the first document of each shard, then the number of documents.
        self._first_documents = list(
            accumulate((entry.documents for entry in manifest.shards), initial=0)
        )
        self.num_documents = self._first_documents[-1]
        self.num_units = self.num_documents
        self.num_tokens = sum(entry.tokens for entry in manifest.shards)
        self.fingerprint = xxhash.xxh3_128_hexdigest(raw)

        checksums = [entry.index_checksum for entry in manifest.shards]
        # Remote storage takes a tenth of a second per request, so check all shards in parallel.
        with ThreadPoolExecutor() as pool:
            self._tokens = list(pool.map(self._open_tokens, manifest.shards))
        self._indexes = self._open_indexes("idx", checksums)
        self._hashes: list[_IndexFile] = []  # opened only for a holdout

    def attach_tokenizer(self, tokenizer: Tokenizer, holdout: float) -> None:
        """Check that the shards match the tokenizer, and open their .hash files if needed.

        Args:
            tokenizer: Tokenizer of the run.
            holdout: Fraction of documents held out for validation (validation.holdout). If it is
                positive, the hashes in the .hash files select these documents.

        Raises:
            UserError: If the shards were made with a different tokenizer, a holdout needs .hash
                files that do not exist, or a file is damaged.
        """
        if not tokenizer.is_known_as(self._manifest.tokenizer):
            raise UserError(
                f"{self.name} was made with another tokenizer ({self._manifest.tokenizer_path}) "
                f"than {tokenizer.path}. Set tokenizer.path to that tokenizer, or run titanlite "
                "prepare again."
            )
        if holdout == 0:
            return

        if self._manifest.format == 1:  # which has no .hash files
            raise UserError(
                f"{self.name} was prepared by an older titanlite without the hashes that "
                "validation.holdout needs. Prepare it again, or set a source in [validation]."
            )
        checksums = [entry.hash_checksum for entry in self._manifest.shards]
        self._hashes = self._open_indexes("hash", checksums)

    def record(self, index: int) -> Prepared:
        """Read the tokens of document `index`, and verify their checksums.

        With validation.holdout, the result also has the hash of the text, which determines whether
        the document is held out.

        Raises:
            UserError: If the checksum of a block that contains the document does not match.
        """
        shard = bisect_right(self._first_documents, index) - 1
        index_in_shard = index - self._first_documents[shard]
        start, end = self._read_bounds(shard, index_in_shard)
        width = self._dtype.itemsize
        content = self._read_token_bytes(shard, start * width, end * width)
        text_hash = None
        if self._hashes:
            text_hash = int(self._hashes[shard].read(index_in_shard, 1)[0])
        return Prepared(np.frombuffer(content, self._dtype), text_hash)

    def _read_bounds(self, shard: int, index_in_shard: int) -> list[int]:
        """Look up which tokens of a shard belong to a document.

        Returns:
            [start, end]: index of the first token, and of the token after the last one.
        """
        # The index contains the end of each document, where the next document begins.
        ends = self._indexes[shard]
        if index_in_shard == 0:
            return [0, int(ends.read(0, 1)[0])]
        return ends.read(index_in_shard - 1, 2).tolist()

    def _read_token_bytes(self, shard: int, start: int, end: int) -> bytes:
        """Read a range of bytes from a .bin file, and verify the blocks that contain it.

        Args:
            shard: Index of the shard.
            start: First byte.
            end: Byte after the last one.

        Raises:
            UserError: If the checksum of a block does not match.
        """
        if start == end:
            return b""

        # Checksums are for whole blocks, so find all blocks that contain a part of the range. For
        # example, bytes 70,000 to 140,000 are in the blocks 1 and 2.
        blocks = range(start // TOKEN_BLOCK_BYTES, math.ceil(end / TOKEN_BLOCK_BYTES))

        # Read these blocks. The last block of the file can be shorter.
        entry = self._manifest.shards[shard]
        file = self._tokens[shard]
        file_size = entry.tokens * self._dtype.itemsize
        blocks_start = blocks.start * TOKEN_BLOCK_BYTES
        blocks_end = min(blocks.stop * TOKEN_BLOCK_BYTES, file_size)
        raw = file.read(blocks_start, blocks_end - blocks_start)

        # Verify them. The index file has one number per document, and then one checksum per block.
        first_checksum = entry.documents + blocks.start
        checksums = self._indexes[shard].read(first_checksum, len(blocks))
        _verify(file, raw, blocks.start, checksums, TOKEN_BLOCK_BYTES)
        return raw[start - blocks_start : end - blocks_start]

    def _path(self, entry: ShardEntry, suffix: str) -> Path:
        """Return the path of a shard's file with the suffix "bin", "idx" or "hash"."""
        return self._folder / f"{entry.name}.{suffix}"

    def _open_tokens(self, entry: ShardEntry) -> File:
        """Open the .bin file of a shard, and check that it has the size that the manifest states.

        Raises:
            UserError: If the size differs.
        """
        file = make_file(self._path(entry, "bin"), _REMEDY)
        size = file.check()[0]
        expected = entry.tokens * self._dtype.itemsize
        if size != expected:
            raise _damaged(file, f"is truncated or altered: it has {size:,} of {expected:,} bytes")
        return file

    def _open_indexes(self, suffix: str, checksums: Sequence[str | None]) -> list[_IndexFile]:
        """Open the .idx or .hash files of all shards in parallel, and verify their checksums."""
        paths = [self._path(entry, suffix) for entry in self._manifest.shards]
        with ThreadPoolExecutor() as pool:
            return list(pool.map(_IndexFile, paths, checksums))


def _verify(file: File, raw: bytes, first: int, checksums: np.ndarray, block_bytes: int) -> None:
    """Check the checksums of consecutive blocks that were read from a file.

    Args:
        file: The file, for the error message.
        raw: Content of the blocks.
        first: Index of the first block in the file.
        checksums: Expected checksum of each block, uint64.
        block_bytes: Size of a block in bytes.

    Raises:
        UserError: If a checksum differs.
    """
    wrong = np.flatnonzero(block_checksums(raw, block_bytes) != checksums)
    if len(wrong):
        block = first + wrong[0]
        raise _damaged(file, f"is altered: the checksum of block {block} does not match")


def _damaged(file: File, problem: str) -> UserError:
    """Return the error for a damaged file, given a `problem` such as "is truncated"."""
    return UserError(f"{file.path} {problem}. {_REMEDY}")
