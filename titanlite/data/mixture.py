"""Choosing the source of each sequence of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset


class Mixture:
    """Chooses the source of each sequence of a run, in proportion to the weights of the sources.

    Invariant: The choice depends only on the weights and the step. A stage is a range of steps with
    constant weights. After any number of sequences of a stage, the number from each source differs
    from its exact share by less than one.

    The algorithm is by Tijdeman ("The chairman assignment problem", 1980): among the sources that
    lag behind their share by at least 1/m of a sequence, choose the one that would be the first to
    lag by 1 - 1/m, where m is 2n - 2 for n >= 2 sources. Weights are integers, and all comparisons
    are exact.

    Attributes:
        step: Number of batches so far.
        counts: Number of sequences from each source so far.
        weights: Weights of the current stage.
        stage_counts: Number of sequences from each source since the current stage began.
    """

    def __init__(self, dataset: Dataset, global_batch_size: int) -> None:
        # Report wrong weights now, rather than when their stage begins.
        for start_step in (0, *(stage.start_step for stage in dataset.stages)):
            find_weights(dataset, start_step)
        self._dataset = dataset
        self._global_batch_size = global_batch_size  # default, which a stage can override
        num_sources = max(1, len(dataset.sources))
        self._m = 2 * num_sources - 2  # see the class; not used for one source
        self.step = 0
        self.counts = [0] * num_sources
        self.weights: list[int] = []
        self.stage_counts = [0] * num_sources

    def next_batch(self) -> list[tuple[int, int]]:
        """Choose the sources of the next global batch, and advance by one step.

        Returns:
            One pair per sequence: the index of its source, and the number of sequences that the run
            has read from this source before. For example, [(0, 70), (1, 30), (0, 71)].
        """
        # Restart the counts of the stage when the weights change.
        weights = find_weights(self._dataset, self.step)
        if weights != self.weights:
            self.weights = weights
            self.stage_counts = [0] * len(self.counts)

        batch_size = self._dataset.get_stage_value(
            "global_batch_size", self.step, self._global_batch_size
        )
        batch = []
        for _ in range(batch_size):
            source = self._choose_source()
            batch.append((source, self.counts[source]))
            self.counts[source] += 1
            self.stage_counts[source] += 1
        self.step += 1
        return batch

    def _choose_source(self) -> int:
        """Return the index of the source for the next sequence, by Tijdeman's algorithm.

        The lag of a source is its exact share of the sequences, including the next one, minus its
        number of sequences so far. Among the sources that lag by at least 1/m, where m is 2n - 2
        for n sources, choose the one whose lag would be the first to reach 1 - 1/m. For example,
        weights of 3 and 1 give the sources 0, 0, 1, 0.
        """
        if len(self.weights) == 1:
            return 0
        candidates = self._find_lagging_sources()
        deadlines = self._compute_deadlines(candidates)
        return min(candidates, key=deadlines.__getitem__)

    def _find_lagging_sources(self) -> list[int]:
        """Return the sources that lag behind their share by at least 1/m, as indices.

        The lag of a source is num_sequences * weight / total_weight - count, where count is its
        number of sequences so far, and m is 2n - 2 for n sources. For example, with weights of 3
        and 1, the lags before the third sequence are 3 * 3/4 - 2 = 0.25 and 3 * 1/4 - 0 = 0.75. The
        lags add up to 1, so at least one source lags by 1/n >= 1/m.
        """
        total_weight = sum(self.weights)
        num_sequences = sum(self.stage_counts) + 1  # including the next one
        sources = []
        pairs = zip(self.weights, self.stage_counts, strict=True)
        for source, (weight, count) in enumerate(pairs):
            # Multiply both sides of lag >= 1/m by m * total_weight to compare integers, exactly.
            if self._m * (num_sequences * weight - count * total_weight) >= total_weight:
                sources.append(source)
        return sources

    def _compute_deadlines(self, candidates: list[int]) -> dict[int, int]:
        """Return when each candidate must be chosen at the latest, to compare the candidates.

        The deadline of a source is the total number of sequences at which its lag would reach
        1 - 1/m if it were not chosen before:

            (count + 1 - 1/m) * total_weight / weight

        Here, count is its number of sequences so far, and m is 2n - 2 for n sources. All deadlines
        are multiplied by the same factor to get integers.

        Args:
            candidates: Indices of the sources that can be chosen next.
        """
        # The factor is m * multiple / total_weight. Each weight divides `multiple`.
        multiple = math.lcm(*(self.weights[source] for source in candidates))
        deadlines = {}
        for source in candidates:
            weight = self.weights[source]
            count = self.stage_counts[source]
            scaled_count = self._m * (count + 1) - 1  # m * (count + 1 - 1/m)
            deadlines[source] = scaled_count * multiple // weight
        return deadlines

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the mixture as JSON values, to save in a checkpoint.

        The keys "rows" and "stage_rows" count sequences. Their names are part of the checkpoint
        format.
        """
        return {
            "step": self.step,
            "rows": self.counts.copy(),
            "weights": self.weights.copy(),
            "stage_rows": self.stage_counts.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the progress that `state_dict` returned.

        If the job now sets different weights, the next batch begins a new stage.
        """
        self.step = state["step"]
        self.counts = list(state["rows"])
        self.weights = list(state["weights"])
        self.stage_counts = list(state["stage_rows"])


def source_shares(dataset: Dataset, step: int) -> np.ndarray:
    """Return the share of each source in the batch at index `step`, counted from 0.

    For example, the weights 3 and 1 give [0.75, 0.25].
    """
    weights = find_weights(dataset, step)
    # If an integer exceeds 64 bits, `np.divide` returns an array of objects, so convert to float.
    return np.divide(weights, sum(weights)).astype(float)


def find_weights(dataset: Dataset, step: int) -> list[int]:
    """Return the weights of the sources in effect at a step, as integers in the same proportion.

    These are the weights in [[dataset.sources]], until a stage in [[dataset.stages]] sets others.
    Steps are counted from 0.

    Raises:
        UserError: If there is not one weight per source, or all weights are 0.
    """
    # Without [[dataset.sources]], [dataset] itself describes the only source.
    source_weights = [source.weight for source in dataset.sources] or [1.0]
    num_sources = len(source_weights)

    # A stage can replace these weights.
    stage_weights = dataset.get_stage_value("weights", step, default=None)
    if stage_weights is None:
        key = "dataset.sources"
        weights = source_weights
    else:
        key = "dataset.stages"
        weights = stage_weights

    # Job files were checked before, but not the configurations of programs that create a `Loader`.
    if len(weights) != num_sources or not any(weights):
        raise UserError(
            f"{key}: step {step} has weights = {list(weights)}; expected {num_sources} "
            "weights (one per source), at least one above 0."
        )
    return _to_integers(weights)


def _to_integers(weights: Sequence[float]) -> list[int]:
    """Scale weights to the smallest integers in the same proportion: [0.1, 0.25] becomes [2, 5].

    Weights are read as decimal fractions, so 0.1 is exactly one tenth.
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    scaled = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*scaled)
    return [weight // divisor for weight in scaled]
