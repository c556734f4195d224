"""Spikes: steps whose loss or gradient norm is far above those of the steps before them.

Invariant: the host waits for nothing. To skip, the device compares by itself, with sums that all ranks have, so all
decide the same. To warn, the host compares when it reads the numbers anyway, which costs a step nothing. The history is
in the checkpoint, so a resumed run decides as one that was not interrupted.

The limit is the median plus so many deviations, which are 1.4826 times the median distance from the median: of numbers
from a normal distribution that is the standard deviation, and a few spikes hardly move it (Hampel, 1974).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titanlite.hooks.hook import Hook, Training
from titanlite.optim.adamw import local_shard
from titanlite.optim.clip import StepSums
from titanlite.runtime.logging import Event

LEAST = 0.01  # of the median: what a deviation is at least, because a loss that hardly moves makes every step a spike


class SpikeGuard(Hook):
    """Names and counts spikes, and skips them if the job says so."""

    def built(self, training: Training) -> None:
        self._training, self._config = training, training.run.job.guards
        self._skips = self._config.on_spike == "skip"
        device = local_shard(next(training.model.parameters())).device if self._skips else "cpu"
        # Loss and norm of the last steps, each at its number modulo the size. NaN until they are known.
        size = self._config.spike_history
        self._history = torch.full((2, size), torch.nan, dtype=torch.float64, device=device)
        self._unread: list[tuple[int, Tensor]] = []
        self._spikes = 0

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        numbers = torch.stack([sums.loss, sums.grad_norm.double(), skip.double()])
        if self._skips:
            numbers = self._judge(step, numbers)
            skip.copy_(numbers[3, 0])
        self._unread.append((step, numbers))

    def _judge(self, step: int, numbers: Tensor) -> Tensor:
        """Compare loss and norm with the history, and add them to it.

        Args:
            numbers: (3): loss, norm, and whether the step is skipped in any case.

        Returns: (4, 2): of loss and norm, whether it is a spike, its value, its limit, and whether the step is skipped.
        """
        history, place, values, skip = self._history, step % self._config.spike_history, numbers[:2], numbers[2]
        middle = _median(history)
        deviation = 1.4826 * _median((history - middle[:, None]).abs())
        limit = middle + self._config.spike_deviations * torch.maximum(deviation, LEAST * middle.abs())
        spikes = (values > limit) & (skip == 0)  # no number is above NaN, and what is not finite is skipped anyway
        if self._skips:
            skip = torch.maximum(skip, spikes.any().double())
        history[:, place] = torch.where(skip > 0, history[:, place], values)
        return torch.stack([spikes.double(), values, limit, skip.expand(2)])

    def numbers(self, step: int) -> Mapping[str, Any]:
        self._read()
        return {"spikes": self._spikes}

    def saving(self, step: int) -> None:
        self._read()  # the history is complete then

    def state_dict(self) -> dict[str, Any]:
        return {"spikes": self._spikes} if self._spikes else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spikes = state["spikes"]

    def tensors(self) -> dict[str, Tensor]:
        return {"history": self._history}

    def _read(self) -> None:
        """Log the spikes since the last call. Waits for the device."""
        unread, self._unread = self._unread, []
        found = torch.stack([each for _, each in unread]).cpu() if unread else ()
        for (step, _), numbers in zip(unread, found, strict=True):
            rows = (numbers if self._skips else self._judge(step, numbers)).tolist()
            parts = zip(("loss", "gradient norm"), *rows[:3], strict=True)
            if said := [f"{name} {value:.4g} is above {limit:.4g}" for name, spike, value, limit in parts if spike]:
                self._spikes += 1
                line = f"Step {step} is a spike: {', '.join(said)} (guards.spike_deviations)."
                self._training.log(Event(line, "spike", step))


def _median(rows: Tensor) -> Tensor:
    """Of each row; NaN if it has one. `torch.median` is not deterministic on a GPU."""
    ordered = rows.sort(dim=1).values  # NaN comes last
    return ordered[:, rows.shape[1] // 2] + 0 * ordered[:, -1]
