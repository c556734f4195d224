"""The loss on data that is never trained on.

Invariant: every validation scores the same rows, whatever the layout is. All ranks do the same number of forward
passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from titanlite.data.batch import Microbatch
from titanlite.data.heldout import ValidationSet


@dataclass(frozen=True)
class Score:
    """The result of a validation, over all valid tokens of its rows."""

    loss: float
    """Mean cross entropy, in nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """Cross entropy in bits per byte of text, which is comparable between tokenizers."""

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  perplexity {self.perplexity:,.2f}  bits/byte {self.bits_per_byte:.4f}"


def evaluate(
    rows: ValidationSet,
    loss_sum: Callable[[Sequence[Microbatch]], Tensor],
    data_group: dist.ProcessGroup,
    loss_group: dist.ProcessGroup,
) -> Score:
    """Score a model on `rows`. All ranks call it together; it waits for the device.

    Args:
        loss_sum: This rank's share of the microbatches' summed cross entropy; shares add up over `loss_group`.
        data_group: The ranks that hold different rows.
    """
    loss = loss_sum(list(rows.batches())).double()
    counts = loss.new_tensor([rows.num_tokens, rows.num_bytes])
    dist.all_reduce(loss, group=loss_group)
    dist.all_reduce(counts, group=data_group)
    return make_score(loss.item(), *counts.tolist())


def make_score(total: float, tokens: float, num_bytes: float) -> Score:
    """The score of `total` nats over so many tokens, which stand for so many bytes."""
    mean = total / tokens
    perplexity = math.exp(mean) if mean < 700 else math.inf  # beyond, a float overflows
    return Score(mean, perplexity, total / num_bytes / math.log(2))
