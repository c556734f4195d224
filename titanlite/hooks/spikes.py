"""Spikes: steps whose loss or gradient norm is far above those of the steps before them.

Invariant: the host waits for nothing. To skip, the device compares by itself, with sums that all ranks have, so all
decide the same. To warn, the host compares when it reads the numbers anyway, which costs a step nothing. The history is
in the checkpoint, so a resumed run decides as one that was not interrupted.

To go back is to skip steps after the fact: weights, optimizer and what the hooks keep become those of the newest
checkpoint, and the steps since then stay counted. So the data and the learning rate of a step never depend on it. What
follows is saved at once, and each save waits until it is known that no spike came before it.

The limit is the median plus so many deviations, which are 1.4826 times the median distance from the median: of numbers
from a normal distribution that is the standard deviation, and a few spikes hardly move it (Hampel, 1974).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titanlite.config.errors import GuardError
from titanlite.hooks.checkpoints import Checkpoints
from titanlite.hooks.hook import Hook, Request, Training
from titanlite.optim.adamw import local_shard
from titanlite.optim.clip import StepSums
from titanlite.runtime.logging import Event

LEAST = 0.01  # of the median: what a deviation is at least, because a loss that hardly moves makes every step a spike


class SpikeGuard(Hook):
    """Names and counts spikes, and skips them or goes back before them if the job says so.

    Args:
        checkpoints: Where to go back to. None: spikes are only named.
    """

    def __init__(self, checkpoints: Checkpoints | None = None) -> None:
        self._checkpoints = checkpoints

    def built(self, training: Training) -> None:
        self._training, self._config = training, training.run.job.guards
        self._skips, self._rolls_back = (self._config.on_spike == policy for policy in ("skip", "roll_back"))
        device = local_shard(next(training.model.parameters())).device if self._skips else "cpu"
        # Loss and norm of the last steps, each at its number modulo the size. NaN until they are known.
        size = self._config.spike_history
        self._history = torch.full((2, size), torch.nan, dtype=torch.float64, device=device)
        self._unread: list[tuple[int, Tensor]] = []
        self._spikes = self._roll_backs = 0
        self._goes_back = False

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
        return {"spikes": self._spikes, "roll_backs": self._roll_backs}

    def saving(self, step: int) -> None:
        self._read()  # the history is complete then

    def act(self, step: int, asked: Request) -> None:
        if self._rolls_back and (asked.save or asked.validate):  # which come next
            self._read()
        if self._goes_back:
            self._roll_back(step)

    def state_dict(self) -> dict[str, Any]:
        return {"spikes": self._spikes, "roll_backs": self._roll_backs} if self._spikes else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spikes, self._roll_backs = state["spikes"], state.get("roll_backs", 0)

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
                self._goes_back = self._rolls_back
                line = f"Step {step} is a spike: {', '.join(said)} (guards.spike_deviations)."
                self._training.log(Event(line, "spike", step))

    def _roll_back(self, step: int) -> None:
        """Go on after `step` from the newest checkpoint.

        Raises:
            GuardError: that was done guards.max_roll_backs times before.
        """
        self._goes_back = False
        if self._roll_backs == (most := self._config.max_roll_backs):
            problem = f"Step {step}: a spike after going back {most} times (guards.max_roll_backs); it was not saved."
            raise GuardError(f"{problem} Before you start again, lower optimizer.lr or training.max_norm.")
        if self._checkpoints is None or (found := self._checkpoints.go_back(step)) is None:
            return self._training.log(f"Step {step}: there is no checkpoint to go back to, so the run goes on.")
        self._roll_backs += 1
        line = f"Step {step}: the weights are those of step {found} again. Time {self._roll_backs} of {most}. The data "
        self._training.log(Event(f"{line}since then is passed over, and its steps count as done.", "roll back", step))


def _median(rows: Tensor) -> Tensor:
    """Of each row; NaN if it has one. `torch.median` is not deterministic on a GPU."""
    ordered = rows.sort(dim=1).values  # NaN comes last
    return ordered[:, rows.shape[1] // 2] + 0 * ordered[:, -1]
