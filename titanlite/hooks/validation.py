"""The loss on data that is never trained on.

Invariant: every validation scores the same rows, whatever the layout is. All ranks do the same number of forward
passes.
"""

from __future__ import annotations

from dataclasses import asdict

import torch.distributed as dist

from titanlite.data.validation import ValidationSet
from titanlite.hooks.hook import Hook, Request, Training
from titanlite.runtime.logging import Event
from titanlite.score import Score, make_score


class Validation(Hook):
    """Asks for a validation every validation.freq steps, and does those that are asked for."""

    def built(self, training: Training) -> None:
        self._training, run = training, training.run
        self._rows = ValidationSet(run, training.tokenizer, training.mesh.data_rank, training.device)
        self._freq = run.job.validation.freq
        training.log(f"Validation on {self._rows.describe()}")

    def wants(self, step: int) -> Request:
        return Request(validate=step % self._freq == 0)

    def act(self, step: int, asked: Request) -> None:
        if asked.validate:
            self.validate(step)

    def validate(self, step: int) -> Score:
        """Score the weights after `step`, log it and tell all hooks. It waits for the device."""
        mesh = self._training.mesh
        loss = self._training.forward_backward.evaluate(list(self._rows.batches()))
        dist.all_reduce(loss, group=mesh.loss_group)
        score = make_score(loss.item(), self._rows.num_tokens, self._rows.num_bytes)
        self._training.tell(Hook.validated, step, asdict(score))
        self._training.log(Event(f"validation after step {step}: {score}", "validation", step))
        return score
