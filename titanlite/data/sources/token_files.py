"""Reading Megatron, OLMo and datatrove token files in place.

Invariant: A run trains on the ids in the files, or it stops. Ids outside of the vocabulary, files
that do not match their index, and files that change while a run reads them are errors.

The suffix of a file selects its format. All numbers are little-endian.

- Megatron (MMapIndexedDataset): NAME.bin contains the ids. NAME.idx begins with a magic number, the
  version 1 (uint64), a code for the data type of the ids (uint8), and the numbers of sequences and
  of document bounds (uint64). Three arrays follow: the length of each sequence in tokens (int32),
  its first byte in NAME.bin (int64), and the document bounds (int64). The bounds are the index of
  the first sequence of each document, and then the number of sequences.
- OLMo and Dolma: NAME.npy contains the ids, with or without a NumPy header. Documents end at EOS.
- datatrove and nanotron: NAME.ds contains the ids, with two or four bytes each. NAME.ds.index
  contains the end of each document in tokens (uint64).

To add a format, add a function to `_READERS`.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from titanlite.config.errors import UserError
from titanlite.config.schema import TextSource
from titanlite.data.sources.base import DocumentIndex, File, TokenSource, make_file
from titanlite.data.sources.records import Prepared, hash_bytes
from titanlite.data.tokenizer import Tokenizer

_SCAN_BYTES = 1 << 23  # a multiple of the size of every data type
_MEGATRON_START = b"MMIDIDX\0\0" + struct.pack("<Q", 1)
_MEGATRON_HEADER_BYTES = 34
# Megatron codes of integer types. Other codes are for types that cannot contain token ids.
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_REMEDY = "Set tokenizer.path to the tokenizer of the file, or correct dataset.token_dtype."


@dataclass
class TokenFile:
    """A file of token ids, and the documents in it.

    Attributes:
        file: File that contains the ids.
        dtype: Data type of the ids.
        offset: Number of bytes before the first id.
        index: File that lists where the documents end. None if documents end at EOS.
        ends: Index of the token after each document, shape (n,). None if documents end at EOS.
        num_tokens: Number of ids in the file.
    """

    file: File
    dtype: np.dtype
    offset: int = 0
    index: File | None = None
    ends: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Compute `num_tokens`, and check that the documents in an index, if any, cover all ids.

        Raises:
            ValueError: If the size of the file does not match its data type or its index.
        """
        size, _ = self.file.check()
        self.num_tokens, remainder = divmod(size - self.offset, self.dtype.itemsize)
        if remainder:
            raise ValueError(f"{size:,} bytes do not divide into ids of type {self.dtype}")
        if self.index is None:
            return

        assert self.ends is not None
        # Each document begins where the previous one ends, and the first one at token 0. Comparing
        # the bounds, unlike subtracting them, cannot overflow for a damaged index.
        bounds = np.append(0, self.ends)
        is_ascending = (bounds[:-1] <= bounds[1:]).all()
        covers_all_tokens = bounds[-1] == self.num_tokens
        if not is_ascending or not covers_all_tokens:
            raise ValueError(f"its {self.num_tokens:,} tokens do not match {self.index.path}")

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the token ids from index `start` to `end` (exclusive).

        Raises:
            UserError: If the file or its index has changed.
        """
        if self.index is not None:
            self.index.check()
        width = self.dtype.itemsize
        raw = self.file.read(self.offset + start * width, (end - start) * width)
        return np.frombuffer(raw, self.dtype)

    def find_ends(self, tokenizer: Tokenizer) -> np.ndarray:
        """Return where each document ends in this file.

        Without an index file, read all tokens to find EOS. Each document then ends at EOS or at the
        end of the file.

        Returns:
            For each document, the index of the token after it, shape (n,).

        Raises:
            UserError: If a file without an index file contains tokens, but no EOS.
        """
        if self.ends is not None:
            return self.ends
        if self.num_tokens == 0:
            return np.array([], dtype=np.int64)

        ends = self._find_token(tokenizer.eos_id) + 1
        if len(ends) == 0:
            raise UserError(
                f"{self.file.path} does not contain the id {tokenizer.eos_id}, "
                f"with which {tokenizer.path} ends documents. {_REMEDY}"
            )
        if ends[-1] < self.num_tokens:  # the last document has no EOS
            ends = np.append(ends, self.num_tokens)
        return ends

    def _find_token(self, token: int) -> np.ndarray:
        """Read the whole file in blocks, and return the indices at which `token` occurs."""
        indices = []
        num_read = 0
        with self.file.open(_SCAN_BYTES) as stream:
            stream.seek(self.offset)
            while block := stream.read(_SCAN_BYTES):
                ids = np.frombuffer(block, self.dtype)
                indices.append(num_read + np.flatnonzero(ids == token))
                num_read += len(ids)
        return np.concatenate(indices)


class TokenFiles(TokenSource):
    """Source that reads documents from the token files of other frameworks."""

    def __init__(self, spec: TextSource, files: list[Path]) -> None:
        """Open the files, and read their indexes and headers.

        Args:
            spec: Table of the job file that describes the source.
            files: The files with token ids.

        Raises:
            UserError: If a file has an unknown format or data type, or does not match its index.
        """
        super().__init__(spec, files)
        self._token_files = [_open_token_file(file, spec.token_dtype) for file in self.files]
        self.files += [tokens.index for tokens in self._token_files if tokens.index is not None]
        self.num_tokens = sum(tokens.num_tokens for tokens in self._token_files)
        self.num_units = self.num_tokens  # an upper bound, until the documents are found

    def attach_tokenizer(self, tokenizer: Tokenizer, holdout: float) -> None:
        """Find where documents end, compute the fingerprint, and check a sample of documents.

        This requires the tokenizer, because documents in files without an index end at its EOS id.

        Args:
            tokenizer: Tokenizer of the run.
            holdout: Fraction of documents held out for validation (validation.holdout). If it is
                positive, `record` also returns the hashes that select these documents.

        Raises:
            UserError: If a file without an index contains no EOS, or if a document of the sample
                contains an id outside of the vocabulary.
        """
        self._tokenizer = tokenizer
        self._has_holdout = holdout > 0
        ends_by_file = [tokens.find_ends(tokenizer) for tokens in self._token_files]
        self._index = DocumentIndex(self._token_files, ends_by_file)
        self.num_documents = self._index.num_documents
        self.num_units = self.num_documents  # documents are shuffled one by one
        self.fingerprint = self._compute_fingerprint(ends_by_file)
        self._check_sample()

    def _compute_fingerprint(self, ends_by_file: list[np.ndarray]) -> str:
        """Compute a fingerprint of the files without hashing all of their tokens.

        Hash where documents end, and the name, size, beginning and end of each file.
        """
        digest = xxhash.xxh3_128(self.hash_samples().encode())
        for tokens, ends in zip(self._token_files, ends_by_file, strict=True):
            digest.update(tokens.dtype.str.encode() + ends.tobytes())
        return digest.hexdigest()

    def _check_sample(self) -> None:
        """Read a sample of documents, and log a warning if none of them ends with EOS.

        Raises:
            UserError: If a document contains an id outside of the vocabulary.
        """
        last_ids = [self.record(index).tokens[-1:] for index in self.sample()]
        eos_id = self._tokenizer.eos_id
        if eos_id not in np.concatenate(last_ids):
            logging.getLogger("titanlite").warning(
                f"No document in a sample of {self.name} ends with the id {eos_id} (EOS). Check "
                f"that {self._tokenizer.path} is the tokenizer of these files."
            )

    def where(self, part: int, number: int) -> str:
        """Describe the location of document `number` for messages. `part` is not used.

        For example, "document 7: a.npy, tokens 90 to 149".
        """
        token_file, start, end = self._index.locate(number)
        return f"document {number}: {token_file.file.path}, tokens {start} to {end - 1}"

    def record(self, index: int) -> Prepared:
        """Read the token ids of document `index`, and check that they are in the vocabulary.

        With validation.holdout, the result also has a hash of the ids, which determines whether the
        document is held out.

        Raises:
            UserError: If the file has changed, or contains an id outside of the vocabulary.
        """
        token_file, start, end = self._index.locate(index)
        ids = token_file.read(start, end)
        vocab_size = self._tokenizer.vocab_size
        is_outside = (ids < 0) | (ids >= vocab_size)
        if is_outside.any():
            first = int(is_outside.argmax())
            raise UserError(
                f"{token_file.file.path}: token {start + first} is the id {ids[first]}, but "
                f"{self._tokenizer.path} has the ids 0 to {vocab_size - 1}. {_REMEDY}"
            )

        ids = ids.astype(np.int32)
        text_hash = hash_bytes(ids.tobytes()) if self._has_holdout else None
        return Prepared(ids, text_hash)


def _open_token_file(file: File, dtype: str | None) -> TokenFile:
    """Open a token file with the reader for its suffix.

    Args:
        file: Token file, whose suffix selects the reader.
        dtype: Data type of the ids (dataset.token_dtype), or None to read it from the file.

    Raises:
        UserError: If the suffix is unknown, the file or its index cannot be read, or the file has
            a data type other than `dtype`.
    """
    reader = _READERS.get(file.path.suffix)
    if reader is None:
        raise UserError(f"{file.path}: token files must end with {', '.join(_READERS)}")
    try:
        tokens = reader(file, dtype)
    except ValueError as error:
        raise UserError(f"cannot read {file.path}: {error}") from None
    if dtype is not None and tokens.dtype != np.dtype(dtype):
        raise UserError(
            f"{file.path} contains ids of type {tokens.dtype}. "
            f"Remove dataset.token_dtype, which is {dtype}."
        )
    return tokens


def _open_megatron(file: File, dtype: str | None) -> TokenFile:
    """Open a Megatron .bin file. Its .idx file contains the document bounds and the data type.

    Args:
        file: The .bin file.
        dtype: Not used, because the .idx file contains the data type.

    Raises:
        ValueError: If the .idx file has a different format, or does not match the .bin file.
    """
    index = make_file(file.path.with_suffix(".idx"))
    stored_dtype, lengths, bounds = _read_megatron_index(index)
    # Join the sequences of each document, such as its sentences. For example, with sequences of 3,
    # 4 and 5 tokens and the bounds 0, 2 and 3, the documents end after 7 and 12 tokens.
    sequence_ends = np.cumsum(np.append(0, lengths), dtype=np.int64)
    ends = sequence_ends[bounds[1:].clip(0, len(lengths))]
    return TokenFile(file, stored_dtype, index=index, ends=ends)


def _read_megatron_index(file: File) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Read a Megatron .idx file, which divides the tokens into sequences and documents.

    It contains a header, the length of each sequence in tokens (int32), the position of each
    sequence in the .bin file (int64), and the document bounds (int64).

    Returns:
        The data type of the ids, the lengths of the sequences, and the document bounds: the number
        of sequences before each document, followed by the total number of sequences.

    Raises:
        ValueError: If the file has a different format or is truncated.
    """
    raw = file.read()
    if not raw.startswith(_MEGATRON_START) or len(raw) < _MEGATRON_HEADER_BYTES:
        raise ValueError(f"{file.path} is not an index of Megatron's MMapIndexedDataset")

    code, num_sequences, num_bounds = struct.unpack_from("<BQQ", raw, len(_MEGATRON_START))
    if code not in _MEGATRON_DTYPES:
        raise ValueError(f"{file.path} has the data type code {code}, which is not for token ids")
    dtype = np.dtype(_MEGATRON_DTYPES[code])

    # The header is followed by three arrays: the lengths, the positions and the bounds.
    lengths_start = _MEGATRON_HEADER_BYTES
    positions_start = lengths_start + 4 * num_sequences
    bounds_start = positions_start + 8 * num_sequences
    bounds_end = bounds_start + 8 * num_bounds
    if len(raw) < bounds_end:
        raise ValueError(f"{file.path} is truncated")

    # Read the lengths and the bounds. The positions are not needed.
    lengths = np.frombuffer(raw, "<i4", num_sequences, lengths_start)
    bounds = np.frombuffer(raw, "<i8", num_bounds, bounds_start)
    return dtype, lengths, bounds


def _open_npy(file: File, dtype: str | None) -> TokenFile:
    """Open a .npy file, which contains only ids (OLMo) or begins with a header (NumPy).

    Raises:
        ValueError: If there is no header and `dtype` is None, or the header is not for token ids.
    """
    with file.open() as stream:
        if stream.read(6) == b"\x93NUMPY":
            stream.seek(0)
            return _open_numpy_array(file, stream)

    if dtype is None:
        raise ValueError(
            "it does not contain the data type of its ids. Set dataset.token_dtype, "
            'for example to "uint16" or "uint32"'
        )
    return TokenFile(file, np.dtype(dtype))


def _open_numpy_array(file: File, stream: BinaryIO) -> TokenFile:
    """Open a .npy file with a header, which is at the current position of `stream`.

    Raises:
        ValueError: If the file does not contain a list of integers, or is truncated.
    """
    try:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:  # NumPy parses the header as Python code, which raises many types
        raise ValueError("its NumPy header is damaged") from None

    if dtype.kind not in "iu" or len(shape) != 1:
        array = f"{dtype} of shape {shape}"
        raise ValueError(f"its header describes {array}, which is not a list of ids")
    tokens = TokenFile(file, dtype, stream.tell())
    if tokens.num_tokens != shape[0]:
        count = f"{tokens.num_tokens:,}"
        raise ValueError(f"its header describes {shape[0]:,} ids, but the file contains {count}")
    return tokens


def _open_datatrove(file: File, dtype: str | None) -> TokenFile:
    """Open a datatrove .ds file. Its .ds.index file contains the end of each document.

    `dtype` is not used, because the size of the .ds file shows whether ids have two or four bytes.

    Raises:
        ValueError: If there is a .ds.loss file (loss mask), or the index does not match the file.
    """
    if os.path.exists(f"{file.path}.loss"):
        raise ValueError("its loss mask (.loss) is not supported")

    # Read the index file. It contains the number of tokens up to the end of each document.
    index = make_file(file.path.with_name(f"{file.path.name}.index"))
    raw = index.read()
    if len(raw) % 8:
        raise ValueError(f"the size of {index.path} is not a multiple of 8 bytes")
    ends = np.frombuffer(raw, "<i8")

    # The last document ends at the end of the .ds file. Without documents, the file is empty.
    size, _ = file.check()
    num_tokens = ends[-1] if len(ends) > 0 else 0
    id_type = "<u4" if size == 4 * num_tokens else "<u2"
    return TokenFile(file, np.dtype(id_type), index=index, ends=ends)


_READERS: dict[str, Callable[[File, str | None], TokenFile]] = {
    ".bin": _open_megatron,
    ".npy": _open_npy,
    ".ds": _open_datatrove,
}
