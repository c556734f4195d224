"""Inputs and labels of one forward pass, which the data loader creates and the trainer consumes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that does not count toward the loss, such as padding."""


@dataclass(frozen=True)
class Microbatch:
    """The sequences of one forward pass on one rank: token ids, labels and document ids.

    All tensors are on one device.
    """

    input_ids: Tensor
    """Token ids, (B, T) int64."""
    labels: Tensor
    """The token that follows each input, or IGNORE_INDEX, (B, T) int64."""
    document_ids: Tensor | None = None
    """Document of each token, numbered from 0 in each sequence, (B, T) int32. A token attends only
    to tokens with the same id. None without dataset.document_mask."""
    positions: Tensor | None = None
    """Position of each token in its document, counted from 0, (B, T) int64. None without
    dataset.document_mask."""
    cu_seqlens: Tensor | None = None
    """For variable-length attention with dataset.document_mask: index of the first token of each of
    the N documents of all sequences, followed by B * T, (N + 1,) int32. Otherwise None."""
