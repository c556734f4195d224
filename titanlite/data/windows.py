"""The windows in which a text is scored, and the rows that they fill.

Invariant: each token of a document is scored exactly once, however rows are spread over batches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from titanlite.config.errors import UserError
from titanlite.data.batch import IGNORED, Microbatch
from titanlite.data.sources import open_source, source_of_file
from titanlite.data.sources.base import BadRecord, Prepared, Source
from titanlite.data.tokenizer import Tokenizer

_BATCHES = 16  # so many batches are cut from windows that were sorted by length, because that saves padding
_LENGTH_UNIT = 64  # rows are padded to a multiple of this, so that there are few shapes


@dataclass(frozen=True)
class Window:
    """Tokens that the model sees at once. It is scored on the last `scored` of them."""

    tokens: np.ndarray
    """(n,) of any integer type, n >= 2."""
    scored: int
    """At least 1 and less than n, because a token that follows nothing is not predicted."""


def sliding_windows(tokens: np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """The windows of a document. Each begins `stride` tokens after the one before, and is scored on the tokens that no
    earlier one has reached. So a token has at least `length - stride` tokens before it, or all that the document has.

    These are the windows of transformers' guide on the perplexity of models with a fixed length.

    Args:
        tokens: (N,). The first one is never scored.
        stride: less than `length`.
    """
    reached = 1
    for begin in range(0, len(tokens), stride):
        end = min(begin + length, len(tokens))
        if end > reached:
            yield Window(tokens[begin:end], end - reached)
        reached = end
        if end == len(tokens):
            return


@dataclass
class TextWindows:
    """The windows of all documents of some files.

    Attributes:
        documents, tokens, num_bytes: what was read so far: documents, tokens that are scored, and the UTF-8 bytes that
            they stand for.
    """

    sources: list[Source]
    tokenizer: Tokenizer
    length: int
    stride: int
    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0

    def __iter__(self) -> Iterator[Window]:
        """Raises UserError if a record cannot be read.

        A document begins with the tokenizer's bos, or with its eos if it has no bos, because in training an eos stands
        before each document but the first. Its end is not scored, because it stands for no byte of the text.
        """
        begin = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        for source in self.sources:
            for text in source:
                assert not isinstance(text, Prepared)
                if isinstance(text, BadRecord):
                    raise _of_this_command(text)
                tokens = self.tokenizer.encode_array(text)
                self.documents += 1
                self.tokens += len(tokens)
                self.num_bytes += len(text.encode("utf-8", "surrogatepass"))
                yield from sliding_windows(np.append(begin, tokens), self.length, self.stride)


def open_files(files: Sequence[Path], column: str) -> list[Source]:
    """The sources that read `files`, as training reads them.

    Raises:
        UserError: a file is missing, is of no known kind, is empty, or cannot be read.
    """
    sources = []
    for file in files:
        spec = source_of_file(file, column)
        if not file.is_file():
            found = "is a folder; name files" if file.is_dir() else "there is no such file"
            raise UserError(f"--data {file}: {found}.")
        try:
            sources.append(open_source(spec))
        except UserError as error:
            raise _of_this_command(error) from None
    return sources


def _of_this_command(error: UserError) -> UserError:
    return UserError(str(error).replace("dataset.text_column", "--text-column"))


def window_batches(
    windows: Iterator[Window],
    rows: int,
    part: tuple[int, int],
    device: torch.device,
    *,
    unit: int = 1,
    fixed_length: int | None = None,
) -> Iterator[list[Microbatch]]:
    """The microbatches of one data-parallel rank, some at a time. All ranks get the same number of the same shapes.

    Every rank reads all windows, because a model takes much longer than a tokenizer and the ranks need not agree.

    Args:
        rows: Rows of a microbatch.
        part: Number of this rank, and how many ranks share the windows.
        unit: The length of a row is a multiple of it.
        fixed_length: Length of all rows. None: a microbatch is as long as its longest window.
    """
    rank, ranks = part
    unit = -(-_LENGTH_UNIT // unit) * unit
    while chunk := list(islice(windows, _BATCHES * rows * ranks)):
        chunk.sort(key=lambda window: -len(window.tokens))
        batches = []
        for start in range(0, len(chunk), rows * ranks):
            group = chunk[start : start + rows * ranks]
            length = fixed_length or -(-(len(group[0].tokens) - 1) // unit) * unit
            batches.append(_microbatch(group[rank::ranks], rows, length, device))
        yield batches


def _microbatch(windows: Sequence[Window], rows: int, length: int, device: torch.device) -> Microbatch:
    """The windows as rows. What lies behind the end of a window has no label, and no token that is scored sees it."""
    inputs, labels = np.zeros((rows, length), dtype=np.int64), np.full((rows, length), IGNORED, dtype=np.int64)
    for row, window in enumerate(windows):
        last = len(window.tokens) - 1
        inputs[row, :last] = window.tokens[:-1]
        labels[row, last - window.scored : last] = window.tokens[last + 1 - window.scored :]
    return Microbatch(torch.from_numpy(inputs).to(device), torch.from_numpy(labels).to(device))
