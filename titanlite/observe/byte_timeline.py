"""The bytes of each kind over a step, as a `Counter` has counted them: their peak, and a trace for Perfetto.

Invariant: the axis of the trace counts allocations and frees, a microsecond each. It is no time, because counting each
operator slows them down unequally.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from titanlite.observe.counter import Counter, Place
from titanlite.observe.kinds import COUNTED

MIB = 2**20


def describe_peak(counter: Counter) -> str:
    """The most bytes that were alive at one time, where in the step, and what they were."""
    where, alive = _alive(counter)
    at = int(alive.sum(axis=1).argmax())
    sizes = sorted(zip(alive[at].tolist(), COUNTED, strict=True), reverse=True)
    kinds = ", ".join(f"{kind} {size / MIB:,.1f}" for size, kind in sizes if size)
    return f"at most {alive[at].sum() / MIB:,.1f} MiB ({_label(counter.places[where[at]])}): {kinds}"


def chrome_trace(counter: Counter) -> dict[str, Any]:
    """A trace with the places of the step, and a counter of MiB for each kind."""
    where, alive = _alive(counter)
    bounds = [0, *(np.flatnonzero(np.diff(where)) + 1).tolist(), len(where)]
    events: list[dict[str, Any]] = [
        {"ph": "X", "name": _label(counter.places[where[start]]), "pid": 0, "tid": 0, "ts": start, "dur": end - start}
        for start, end in pairwise(bounds)
    ]
    changed = np.diff(alive, axis=0, prepend=-1) != 0
    for column, kind in enumerate(COUNTED):
        for row in np.flatnonzero(changed[:, column]).tolist():
            size = alive[row, column] / MIB
            events.append({"ph": "C", "name": kind, "pid": 0, "ts": row, "args": {"MiB": float(size)}})
    names = {"process_name": "MiB by kind, over allocations and frees", "thread_name": "place in the step"}
    events += [{"ph": "M", "name": key, "pid": 0, "tid": 0, "args": {"name": name}} for key, name in names.items()]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _alive(counter: Counter) -> tuple[np.ndarray, np.ndarray]:
    """After each event: the number of the place, and the bytes of each kind. What was alive before the step is one
    event."""
    numbers, changes, where = np.array(counter.events, dtype=np.int64).T
    by_kind = np.zeros((len(numbers), len(COUNTED)), dtype=np.int64)
    by_kind[np.arange(len(numbers)), np.array(counter.kinds)[numbers]] = changes
    before = max(0, int((where < 0).sum()) - 1)
    return np.maximum(where[before:], 0), by_kind.cumsum(axis=0)[before:]


def _label(place: Place) -> str:
    block = f" {place.block}" if place.block >= 0 else ""
    stage = f", stage {place.stage}" if place.stage else ""
    return f"{place.phase}: {place.name}{block}{stage}" + (f", microbatch {place.microbatch}" if block else "")
