"""Bytes alive over a step, and their extension to more blocks than were run.

Invariant: the extension is exact, because blocks are alike: the bytes at each moment are a linear function of the
number of blocks, if moments are counted from the first block in one half of the model and from the last block in the
other half.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlite.observe.counter import Counter, Place
from titanlite.observe.kinds import COUNTED, HOST, KINDS
from titanlite.plan.microbatches import all_microbatches


@dataclass(frozen=True)
class Timeline:
    """One step of a model.

    Attributes:
        segments: (place, how often the step was there before) -> bytes of each kind after each allocation, (events,
            kinds), in the order of the step.
        work: (phase, operator, dtype, shape) -> kernels, FLOPs, bytes.
        traffic: (phase, operator, group) -> collectives, bytes.
    """

    segments: Mapping[tuple[Place, int], np.ndarray]
    work: Mapping[tuple[str, str, str, tuple[int, ...]], np.ndarray]
    traffic: Mapping[tuple[str, str, str], np.ndarray]

    def peak(self) -> tuple[Place, np.ndarray]:
        """Where the most bytes are alive on the device, and how many of each kind, in the order of `KINDS`."""
        device = {key: moments[:, : len(KINDS)] for key, moments in self.segments.items()}
        best = max(device, key=lambda key: device[key].sum(axis=1).max())
        return best[0], device[best][device[best].sum(axis=1).argmax()]

    def host_and_together(self) -> tuple[int, int]:
        """The most bytes in host memory, and the most in host and device together."""
        moments = np.concatenate(list(self.segments.values()))
        return int(moments[:, COUNTED.index(HOST)].max()), int(moments.sum(axis=1).max())


def timeline(counter: Counter, times: Callable[[Place, str], int], pipelined: int = 0) -> Timeline:
    """What a counter has counted.

    Args:
        times: How often an operator runs in the whole step, for each time that it ran in a place.
        pipelined: Number of microbatches, if a pipeline has run few of them.
    """
    numbers, changes, where = np.array(counter.events, dtype=np.int64).T
    places = counter.places
    if pipelined:
        places, numbers, changes, where = all_microbatches(places, numbers, changes, where, pipelined)
    alive = np.zeros((len(numbers), len(COUNTED)), dtype=np.int64)
    alive[np.arange(len(numbers)), np.array(counter.kinds)[numbers]] = changes
    alive = alive.cumsum(axis=0)
    visits: Tally[Place] = Tally()
    segments: dict[tuple[Place, int], np.ndarray] = {}
    for number, place in enumerate(places):
        segments[place, visits[place]] = alive[(where == number) & (changes > 0)]
        visits[place] += 1
    work: dict[Any, np.ndarray] = {}
    for (number, kernel), count in counter.work.items():
        place = counter.places[number]
        amount = count * times(place, kernel.op) * np.array([1, kernel.flops, kernel.bytes])
        _add(work, (place.phase, kernel.op, kernel.dtype, kernel.shape), amount)
    traffic: dict[Any, np.ndarray] = {}
    for (number, sent), count in counter.traffic.items():
        place = counter.places[number]
        _add(traffic, (place.phase, sent.op, sent.group), count * times(place, sent.op) * np.array([1, sent.bytes]))
    return Timeline({key: events for key, events in segments.items() if len(events)}, work, traffic)


def _add(totals: dict[Any, np.ndarray], key: Hashable, amount: np.ndarray) -> None:
    totals[key] = totals[key] + amount if key in totals else amount


def extended(short: Timeline, long: Timeline, steps: int, later: Callable[[Place], Place]) -> Timeline:
    """The step of a model that is longer than `short` by `steps` times as much as `long` is.

    Args:
        later: The place of the longer model that corresponds to a place of the shorter one.
    """
    segments = {
        (place, visit): _extended(events, long.segments[later(place), visit], steps)
        for (place, visit), events in short.segments.items()
    }
    return Timeline(segments, _all(short.work, long.work, steps), _all(short.traffic, long.traffic, steps))


def _extended(short: np.ndarray, long: np.ndarray, steps: int) -> np.ndarray:
    """Bytes after each allocation. If an update of all blocks has more of them in the longer model, those before the
    middle are counted from its begin, and those after it from its end."""
    half = len(short) // 2
    partner = np.concatenate([long[:half], long[len(long) - (len(short) - half) :]])
    return short + steps * (partner - short)


def _all(short: Mapping[Any, np.ndarray], long: Mapping[Any, np.ndarray], steps: int) -> dict[Any, np.ndarray]:
    return {key: value + steps * (long[key] - value) for key, value in short.items()}
