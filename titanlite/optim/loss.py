"""The training loss.

Invariant: it is a sum over valid tokens, never a mean, so that any split of a batch into ranks and microbatches
adds up to the same number. May import torch only.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100  # label of a position that has no loss


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of (B, T, V) logits against (B, T) labels, summed over the valid labels, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
