"""Steps whose loss or gradient is not finite: they are skipped, named and counted, and too many in a row end the run.

Invariant: the device skips such a step by itself (`TrainStep`). The host learns of it where it waits anyway, for a line
of the log or for a save. All ranks skip the same steps and count them in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from titanlite.config.errors import GuardError
from titanlite.hooks.hook import Hook, StepResult, Training
from titanlite.runtime.logging import Event
from titanlite.runtime.world import gathered


class Skipped(NamedTuple):
    """What a rank knows of a step that was skipped."""

    step: int
    data_rank: int
    loss: float
    """Its share of the loss."""
    parameter: str | None
    """The first one of which it has a gradient that is not finite."""


class NonFiniteGuard(Hook):
    """Says which steps were skipped and why, and stops a run that skips more than guards.max_skipped in a row."""

    def built(self, training: Training) -> None:
        self._training, self._most = training, training.run.job.guards.max_skipped
        self._names = [name for name, _ in training.model.named_parameters()]
        self._unread: list[tuple[int, StepResult]] = []
        self._in_row = self._longest = self._skipped = 0
        self._lines: list[str] = []

    def after_step(self, step: int, result: StepResult) -> None:
        self._unread.append((step, result))

    def numbers(self, step: int) -> Mapping[str, Any]:
        self._read()
        return {"skipped_steps": self._skipped}

    def logged(self, entry: object) -> None:
        self._answer()

    def saving(self, step: int) -> None:
        self._read()
        self._answer()

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return {"skipped": self._skipped, "in_row": self._in_row} if self._skipped else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped, self._in_row = state["skipped"], state["in_row"]

    def _read(self) -> None:
        """Learn which steps were skipped since the last call. All ranks call it together. Waits for the device."""
        unread, self._unread = self._unread, []
        flags: list[float] = torch.stack([result.skipped for _, result in unread]).tolist() if unread else []
        own = []
        for (step, result), skipped in zip(unread, flags, strict=True):
            self._in_row = self._in_row + 1 if skipped else 0
            self._longest = max(self._longest, self._in_row)
            if skipped:
                bad = (~result.squares.isfinite()).nonzero().flatten().tolist()
                parameter = self._names[bad[0]] if bad else None
                own.append(Skipped(step, self._training.mesh.data_rank, result.loss.item(), parameter))
        self._skipped += len(own)
        if own:
            of_ranks = gathered(own, self._training.mesh.world_group)
            self._lines += map(self._describe, zip(*of_ranks, strict=True))

    def _describe(self, ranks: tuple[Skipped, ...]) -> str:
        step, found = ranks[0].step, []
        losses = [rank for rank, own in enumerate(ranks) if not math.isfinite(own.loss)]
        gradients = [rank for rank, own in enumerate(ranks) if own.parameter is not None]
        if losses:
            found.append(f"the loss of {self._of(losses, ranks)} is {ranks[losses[0]].loss}")
        if gradients:
            parameter = ranks[gradients[0]].parameter
            found.append(f"a gradient of {self._of(gradients, ranks)} is not finite, first that of {parameter}")
        why = "; ".join(found) or "loss or gradient is a spike"
        return f"Step {step} is skipped, and the weights stay: {why}. `titanlite data show --step {step}` has its rows."

    def _of(self, found: list[int], ranks: tuple[Skipped, ...]) -> str:
        """The first rank with its host and its rows, and how many more there are."""
        first, degree = ranks[found[0]].data_rank, self._training.mesh.data_degree
        numbers = list(map(str, range(first, self._training.run.batch_size(ranks[0].step - 1), degree)))
        rows = f"row {', '.join(numbers[:8])}{', ...' if numbers[8:] else ''}"
        more = f" and {len(found) - 1} more ranks" if found[1:] else ""
        return f"rank {found[0]} ({self._training.hosts[found[0]]}, {rows}){more}"

    def _answer(self) -> None:
        """Log what was read, and stop the run if that was too much.

        Raises:
            GuardError: names the step, what was not finite, and what to do.
        """
        lines, self._lines = self._lines, []
        if self._longest <= self._most:
            for line in lines:
                self._training.log(Event(line, "skip", self._training.steps_done))
            return
        step, count = self._training.steps_done, self._longest
        problem = f"Step {step}: {count} steps in a row were skipped, more than guards.max_skipped = {self._most}:"
        rate = "optimizer.lr or" if self._training.run.job.training.max_norm else "optimizer.lr, set"
        remedy = f"Before you start again, lower {rate} training.max_norm, or raise lr_scheduler.warmup_steps."
        rows = "If it happens at the same step whatever you set, look at the rows of that step."
        raise GuardError("\n".join([problem, *lines[-10:], remedy, rows]))
