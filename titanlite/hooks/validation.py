"""Validation: compute the loss on data that is never trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from titanlite.data.validation import ValidationSet
from titanlite.score import Score, make_score

if TYPE_CHECKING:
    from titanlite.train.trainer import Trainer


class Validator:
    """Computes the validation loss. The sequences are the same for any number of ranks."""

    def __init__(self, trainer: Trainer) -> None:
        """Load this rank's share of the validation sequences and log a description of the data."""
        self._trainer = trainer
        self._data = ValidationSet(
            trainer.run, trainer.tokenizer, trainer.mesh.data_rank, trainer.device
        )
        trainer.log(f"Validation on {self._data.describe()}")

    def compute_score(self) -> Score:
        """Evaluate the current weights on the validation set.

        All ranks must call this together. Each data-parallel rank evaluates a part of the
        sequences.

        Returns:
            The score of the whole validation set, the same on all ranks.
        """
        loss = self._trainer.forward_backward.evaluate(list(self._data.batches()))
        dist.all_reduce(loss, group=self._trainer.mesh.loss_group)
        return make_score(loss.item(), self._data.num_tokens, self._data.num_bytes)
