"""Rows as the tensors that a training step reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlite.config.run import Run, sequence_divisor
from titanlite.data.stream import Row
from titanlite.parallel.forward_backward import Microbatch

IGNORED = -100
"""The label of a position where nothing is to be predicted."""
_LENGTH_UNIT = 64  # rows of unequal texts are padded to a multiple of this, so that there are few shapes


class GlobalBatch(NamedTuple):
    """This rank's share of the rows of one optimizer step."""

    microbatches: list[Microbatch]
    num_valid_tokens: int
    """Labels in this rank's rows that are not -100."""


def make_microbatch(rows: list[Row], document_mask: bool, device: torch.device) -> tuple[Microbatch, np.ndarray]:
    """The rows on the device, and their labels in host memory, (B, T)."""
    tokens = np.stack([row.tokens for row in rows]).astype(np.int64)  # (B, T + 1)
    arrays, labels = {"input_ids": tokens[:, :-1]}, tokens[:, 1:].copy()
    used = [int(row.segments[:, 3].sum()) for row in rows]
    for label, size in zip(labels, used, strict=True):
        label[max(0, size - 1) :] = IGNORED  # padding
    if document_mask:
        ids, positions = np.empty_like(tokens, dtype=np.int32), np.empty_like(tokens)
        for i, (row, size) in enumerate(zip(rows, used, strict=True)):
            lengths = np.append(row.segments[:, 3], tokens.shape[1] - size)  # the padding is a document of its own
            ids[i] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            positions[i] = np.arange(tokens.shape[1]) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        labels[positions[:, 1:] == 0] = IGNORED  # no document predicts the next one
        arrays |= {"document_ids": ids[:, :-1], "positions": positions[:, :-1]}
    arrays["labels"] = labels
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    if device.type == "cuda":  # so that the copies overlap with the step that is running
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return Microbatch(**{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}), labels


class Window(NamedTuple):
    """Tokens that the model sees at once. It predicts the last `scored` of them."""

    tokens: np.ndarray
    """(n,) of any integer type, n >= 2."""
    scored: int
    """At least 1 and less than n, because a token that follows nothing is not predicted."""


def padded_length(run: Run, longest: int) -> int:
    """The length of rows that hold texts of at most `longest` tokens, which is at most training.seq_len. A pipeline and
    a compiled model have one length only, that of training."""
    job, unit = run.job, math.lcm(_LENGTH_UNIT, sequence_divisor(run.degrees))
    one_shape = run.degrees.pipeline > 1 or job.compile.enable or job.float8.enable
    return job.training.seq_len if one_shape else min(job.training.seq_len, -(-longest // unit) * unit)


def padded_microbatch(windows: Sequence[Window], rows: int, length: int, device: torch.device) -> Microbatch:
    """The windows as the first of so many rows. What lies behind the end of a window has no label, and no token that is
    scored sees it."""
    inputs, labels = np.zeros((rows, length), dtype=np.int64), np.full((rows, length), IGNORED, dtype=np.int64)
    for row, (tokens, scored) in enumerate(windows):
        last = len(tokens) - 1
        inputs[row, :last] = tokens[:-1]
        labels[row, last - scored : last] = tokens[last + 1 - scored :]
    return Microbatch(torch.from_numpy(inputs).to(device), torch.from_numpy(labels).to(device))


def blank_microbatch(rows: int, seq_len: int, document_mask: bool, device: torch.device) -> Microbatch:
    """Rows of token 0 that predict token 0, for a step that is done for its memory and its time only.

    With `document_mask` a row is one document. The mask has its full size in any case.
    """

    def blank(dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, seq_len), dtype=dtype, device=device)

    ids, positions = (blank(torch.int32), blank(torch.int64)) if document_mask else (None, None)
    return Microbatch(blank(torch.int64), blank(torch.int64), ids, positions)
