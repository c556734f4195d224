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
    """(B, T) int64: the token after each input, or IGNORE_INDEX."""
    document_ids: Tensor | None = None
    """(B, T) int32 with dataset.document_mask: 0, 1, 2, ... in each sequence. A token attends only
    to tokens with the same id."""
    positions: Tensor | None = None
    """(B, T) int64 with dataset.document_mask: counts from 0 in each document of a sequence."""
    cu_seqlens: Tensor | None = None
    """(N + 1,) int32 with dataset.document_mask, for variable-length attention: the first token of
    each of the N documents of all sequences, and then B * T."""
