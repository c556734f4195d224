"""Which source each sequence of a run comes from.

Invariant: the choice depends on the weights and the step alone. After any number of sequences of a stage, each source
has had its share of them, less than one sequence more or less.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset


class Mixture:
    """The sources of the sequences, batch by batch.

    Tijdeman's rule ("The chairman assignment problem", 1980): consider the sources that lag far enough behind their
    share; take the one that would be the first to lag by a whole sequence. All numbers are whole: nothing is rounded.

    Attributes:
        step: batches so far.
        rows: sequences of each source so far.
    """

    def __init__(self, dataset: Dataset, global_batch_size: int) -> None:
        self._stages = stage_weights(dataset)
        self._global_batch_size = global_batch_size
        self.step = 0
        self.rows = [0] * max(1, len(dataset.sources))
        self._weights: list[int] = []
        self._stage_rows = list(self.rows)

    def next_batch(self) -> list[tuple[int, int]]:
        """(source, number of the row within it) of each sequence of the next global batch."""
        weights = next(weights for start, weights in reversed(self._stages) if start <= self.step)
        if weights != self._weights:
            self._weights, self._stage_rows = weights, [0] * len(self.rows)
        self._total, self._scale = sum(weights), math.lcm(*filter(None, weights))
        batch = [self._next() for _ in range(self._global_batch_size)]
        self.step += 1
        return batch

    def _next(self) -> tuple[int, int]:
        source = 0
        if len(self.rows) > 1:
            length, parts = sum(self._stage_rows) + 1, 2 * len(self.rows) - 2
            best: int | None = None
            for i, weight in enumerate(self._weights):
                # parts * total times the sequences by which source i lags behind its share
                lag = parts * (weight * length - self._stage_rows[i] * self._total)
                if weight and lag >= self._total:
                    # Time until source i lags by one: (1 - 1/parts - lag) / weight, multiplied by whole numbers that
                    # are the same for all sources.
                    time_left = ((parts - 1) * self._total - lag) * (self._scale // weight)
                    if best is None or time_left < best:
                        best, source = time_left, i
            assert best is not None
        row = self.rows[source]
        self.rows[source] += 1
        self._stage_rows[source] += 1
        return source, row

    def state_dict(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "step": self.step,
            "rows": list(self.rows),
            "weights": list(self._weights),
            "stage_rows": list(self._stage_rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`. If the weights have changed since, the sequences of the stage are counted from 0."""
        self.step, self.rows = state["step"], list(state["rows"])
        self._weights, self._stage_rows = list(state["weights"]), list(state["stage_rows"])


def stage_weights(dataset: Dataset) -> list[tuple[int, list[int]]]:
    """First step of each stage and its weights as whole numbers, in the order of the steps. The first stage starts at
    step 0.

    Raises:
        UserError: the number of weights is wrong, or all of them are 0.
    """
    first = [source.weight for source in dataset.sources] or [1.0]
    stages = [(0, first), *((stage.start_step, list(stage.weights)) for stage in dataset.stages)]
    for start, weights in stages:
        if len(weights) != len(first) or not any(weights):
            need = "one weight for each of [[dataset.sources]] is needed, and one above 0"
            raise UserError(f"dataset.stages: from step {start} on the weights are {weights}; {need}")
    return [(start, _whole(weights)) for start, weights in sorted(stages, key=lambda stage: stage[0])]


def _whole(weights: list[float]) -> list[int]:
    """The same proportions in whole numbers without a common divisor. 0.1 counts as one tenth: the float is another
    number."""
    exact = [Fraction(str(weight)) for weight in weights]
    scaled = [int(weight * math.lcm(*(w.denominator for w in exact))) for weight in exact]
    return [weight // math.gcd(*scaled) for weight in scaled]
