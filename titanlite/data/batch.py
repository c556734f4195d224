"""Rows as the tensors that a training step reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlite.data.stream import Row
from titanlite.parallel.forward_backward import Microbatch

IGNORED = -100
"""The label of a position where nothing is to be predicted."""


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


def blank_microbatch(rows: int, seq_len: int, document_mask: bool, device: torch.device) -> Microbatch:
    """Rows of token 0 that predict token 0, for a step that is done for its memory and its time only.

    With `document_mask` a row is one document. The mask has its full size in any case.
    """

    def blank(dtype: torch.dtype) -> Tensor:
        return torch.zeros((rows, seq_len), dtype=dtype, device=device)

    ids, positions = (blank(torch.int32), blank(torch.int64)) if document_mask else (None, None)
    return Microbatch(blank(torch.int64), blank(torch.int64), ids, positions)
