"""Which source each sequence of a run comes from.

Invariant: the choice depends on the weights and the step alone. After any number of sequences of a stage, each source
has had its share of them, less than one sequence more or less.
"""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset

_STATE = ("step", "rows", "weights", "stage_rows")


class Mixture:
    """The sources of the sequences, batch by batch.

    Tijdeman's rule ("The chairman assignment problem", 1980): consider the sources that lag far enough behind their
    share; take the one that would be the first to lag by a whole sequence. All numbers are whole: nothing is rounded.

    Attributes:
        step: batches so far.
        rows: sequences of each source so far.
        weights: those of the stage.
        stage_rows: sequences of each source since the stage began.
    """

    def __init__(self, dataset: Dataset, global_batch_size: int) -> None:
        self._stages, self._dataset, self._global_batch_size = stage_weights(dataset), dataset, global_batch_size
        self.step = 0
        self.rows, self.weights = [0] * max(1, len(dataset.sources)), list[int]()
        self.stage_rows = list(self.rows)

    def next_batch(self) -> list[tuple[int, int]]:
        """(source, number of the row within it) of each sequence of the next global batch."""
        weights = _weights(self._stages, self.step)
        if weights != self.weights:
            self.weights, self.stage_rows = weights, [0] * len(self.rows)
        total, scale = sum(weights), math.lcm(*filter(None, weights))
        batch, default = [], self._global_batch_size
        for _ in range(self._dataset.staged(lambda stage: stage.global_batch_size, self.step, default)):
            source = self._next_source(total, scale) if len(self.rows) > 1 else 0
            batch.append((source, self.rows[source]))
            self.rows[source] += 1
            self.stage_rows[source] += 1
        self.step += 1
        return batch

    def _next_source(self, total: int, scale: int) -> int:
        length, parts = sum(self.stage_rows) + 1, 2 * len(self.rows) - 2
        waiting = []
        for i, weight in enumerate(self.weights):
            # parts * total times the sequences by which source i lags behind its share
            lag = parts * (weight * length - self.stage_rows[i] * total)
            if weight and lag >= total:
                # Time until source i lags by one: (1 - 1/parts - lag) / weight, multiplied by whole numbers that are
                # the same for all sources.
                waiting.append((((parts - 1) * total - lag) * (scale // weight), i))
        return min(waiting)[1]

    def state_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {key: copy.copy(getattr(self, key)) for key in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`. If the weights have changed since, the sequences of the stage are counted from 0."""
        for key in _STATE:
            setattr(self, key, copy.copy(state[key]))


def source_shares(dataset: Dataset, done: int) -> np.ndarray:
    """Share of each source in the rows of the step after `done` steps. Raises UserError as `stage_weights`."""
    weights = _weights(stage_weights(dataset), done)
    return np.divide(weights, sum(weights))


def stage_weights(dataset: Dataset) -> list[tuple[int, list[int]]]:
    """First step of each stage and its weights as whole numbers, in the order of the steps. The first stage starts at
    step 0.

    Raises:
        UserError: the number of weights is wrong, or all of them are 0.
    """
    first = [source.weight for source in dataset.sources] or [1.0]
    stages = [(0, first)]
    stages += [(stage.start_step, list(stage.weights)) for stage in dataset.stages if stage.weights is not None]
    for start, weights in stages:  # not every caller has the rules of `load_run`
        if len(weights) != len(first) or not any(weights):
            need = "one weight for each of [[dataset.sources]] is needed, and one above 0"
            raise UserError(f"dataset.stages: from step {start} on the weights are {weights}; {need}")
    return [(start, _whole(weights)) for start, weights in sorted(stages, key=lambda stage: stage[0])]


def _weights(stages: list[tuple[int, list[int]]], done: int) -> list[int]:
    return next(weights for start, weights in reversed(stages) if start <= done)


def _whole(weights: list[float]) -> list[int]:
    """The same proportions in whole numbers without a common divisor. 0.1 counts as one tenth: the float is another
    number."""
    exact = [Fraction(str(weight)) for weight in weights]
    scaled = [int(weight * math.lcm(*(w.denominator for w in exact))) for weight in exact]
    return [weight // math.gcd(*scaled) for weight in scaled]
