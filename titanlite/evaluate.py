"""The loss on data that is never trained on.

Invariant: every validation scores the same rows, whatever the layout; all ranks do the same number of forward passes.
May import data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.data.batch import Microbatch
from titanlite.data.validation import ValidationSet


@dataclass(frozen=True)
class Score:
    """Over all valid tokens of the validation's rows."""

    loss: float
    """Mean cross entropy, nats a token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """Cross entropy over bytes of text instead of tokens: comparable between tokenizers."""

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  perplexity {self.perplexity:,.2f}  bits/byte {self.bits_per_byte:.4f}"


@torch.no_grad()
def evaluate(
    rows: ValidationSet, loss_sum: Callable[[Microbatch], Tensor], group: dist.ProcessGroup, device: torch.device
) -> Score:
    """Score the model behind `loss_sum`, which sums a microbatch's cross entropy. All ranks of `group`, which hold
    different rows, call it together; it waits for the device."""
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for microbatch in rows.batches():
        loss += loss_sum(microbatch)
    totals = torch.stack([loss, loss.new_tensor(rows.num_tokens), loss.new_tensor(rows.num_bytes)])
    dist.all_reduce(totals, group=group)
    total, tokens, num_bytes = totals.tolist()
    mean = total / tokens
    perplexity = math.exp(mean) if mean < 700 else math.inf  # beyond, a float overflows
    return Score(mean, perplexity, total / num_bytes / math.log(2))
