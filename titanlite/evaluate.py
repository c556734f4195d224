"""The loss on data that is never trained on.

Invariant: the rows are the same at every validation, for any number of ranks and any local batch size; all ranks do
the same number of forward passes. May import data, optim, model and config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import JobConfig
from titanlite.data.loader import Loader, Microbatch
from titanlite.data.tokenizer import Tokenizer
from titanlite.optim.loss import IGNORE_INDEX


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


class Evaluator:
    """Holds this rank's rows, read once, and scores a model on them.

    Args:
        rank, degree, group: This rank's number among the ranks that read different rows, their number, their group.

    Raises:
        UserError: The data cannot be read, or holds fewer rows than `validation.sequences`.
    """

    def __init__(
        self,
        job: JobConfig,
        tokenizer: Tokenizer,
        rank: int,
        degree: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        validation, training = job.validation, job.training
        rows_at_once = training.local_batch_size * degree
        rows = -(-validation.sequences // rows_at_once) * rows_at_once  # the last microbatches may be partly unused
        loader = Loader(
            job.dataset if validation.holdout else validation,
            tokenizer,
            seed=training.seed,
            seq_len=training.seq_len,
            global_batch_size=rows,
            local_batch_size=training.local_batch_size,
            dp_rank=rank,
            dp_size=degree,
            dp_group=group,
            device=device,
            holdout=validation.holdout,
            held_out=validation.holdout > 0,
        )
        self.microbatches: Sequence[Microbatch] = loader.next_global_batch().microbatches
        loader.close()
        self._group = group
        row_numbers = torch.arange(rank, rows, degree, device=device).view(len(self.microbatches), -1)
        lengths = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
        bytes_of = torch.tensor(lengths, device=device)
        tokens = num_bytes = torch.zeros((), dtype=torch.int64, device=device)
        for numbers, microbatch in zip(row_numbers, self.microbatches, strict=True):
            microbatch.labels[numbers >= validation.sequences] = IGNORE_INDEX
            valid = microbatch.labels[microbatch.labels != IGNORE_INDEX]
            tokens, num_bytes = tokens + valid.numel(), num_bytes + bytes_of[valid].sum()
        self._tokens, self._bytes = self._total(tokens), self._total(num_bytes)

    @torch.no_grad()
    def score(self, loss_sum: Callable[[Microbatch], Tensor]) -> Score:
        """Score the model behind `loss_sum`, which sums a microbatch's cross entropy. A collective; waits for it."""
        total = torch.stack([loss_sum(microbatch).double() for microbatch in self.microbatches]).sum()
        total = self._total(total)
        loss = total / self._tokens
        perplexity = math.exp(loss) if loss < 700 else math.inf  # beyond, a float overflows
        return Score(loss, perplexity, total / self._bytes / math.log(2))

    def _total(self, value: Tensor) -> float:
        dist.all_reduce(value, group=self._group)
        return value.item()
