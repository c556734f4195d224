"""The curves of a run, with few enough points for a page.

Invariant: where points stand for many logged steps each, nothing is left out: a point has the mean, the smallest and
the largest of all values that it stands for.
"""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite.report.json_lines import Table

Floats = NDArray[np.float64]
_AXES = ("step", "tokens", "hours")
_NO_CURVES = {"step", "time", "tokens", "elapsed"}  # they are the axes, or say the same


def column(table: Table, key: str) -> Floats:
    """A column of a table; NaN where it has no number, or one so large that sums and squares would overflow."""
    values = np.array(table.columns.get(key, array("d", [math.nan]) * len(table.columns["step"])), dtype=np.float64)
    return np.where(np.abs(values) < 1e100, values, np.nan)


def hours(table: Table) -> Floats:
    """Hours of training up to each logged step: without the time between a stop and the next start."""
    elapsed, now = column(table, "elapsed"), column(table, "time")
    if not len(elapsed) or np.isnan(elapsed).all():
        return (now - now[:1]) / 3600
    elapsed = np.nan_to_num(elapsed)
    same_start = np.abs(np.diff(now - elapsed)) < 1.0  # both clocks go on together until the next start
    spent = np.where(same_start, np.diff(elapsed), elapsed[1:])
    return np.concatenate([elapsed[:1], elapsed[0] + np.cumsum(np.maximum(spent, 0.0))]) / 3600


def thin(table: Table, most: int) -> dict[str, Any]:
    """The curves of a table in at most `most` points each.

    Returns:
        A JSON value: {"logged": number of logged steps, "per_point": the most that a point stands for, "x": {axis:
        [..]}, "y": {key: {"mean": [..]} or {"mean", "min", "max"}}}. Null stands for no finite value. Curves that are
        zero everywhere, or never finite, are left out.
    """
    logged = len(table.columns["step"])
    if logged == 0:
        return {"logged": 0, "per_point": 1, "x": {}, "y": {}}
    edges = np.unique(np.linspace(0, logged, min(most, logged) + 1).astype(np.int64))[:-1]
    counts = np.diff(np.append(edges, logged))
    axes = {"step": column(table, "step"), "tokens": column(table, "tokens"), "hours": hours(table)}
    x = {name: _json(np.maximum.accumulate(np.add.reduceat(axes[name], edges) / counts), digits=12) for name in _AXES
         if np.isfinite(axes[name]).all()}  # fmt: skip
    y = {}
    for key in table.columns.keys() - _NO_CURVES:
        values = column(table, key)
        finite = np.isfinite(values)
        if not values[finite].any():
            continue
        known = np.add.reduceat(finite.astype(np.float64), edges)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.add.reduceat(np.where(finite, values, 0.0), edges) / known
        y[key] = {"mean": _json(mean)}
        if logged > len(edges):
            y[key]["min"] = _json(np.minimum.reduceat(np.where(finite, values, np.inf), edges))
            y[key]["max"] = _json(np.maximum.reduceat(np.where(finite, values, -np.inf), edges))
    return {"logged": logged, "per_point": int(counts.max()), "x": x, "y": y}


def places(table: Table, steps: Floats) -> dict[str, list[float | None]]:
    """Where steps lie on each axis."""
    known = column(table, "step")
    found = {"step": _json(steps, digits=12)}
    for name, values in (("tokens", column(table, "tokens")), ("hours", hours(table))):
        if len(known) and np.isfinite(values).all():
            # Before the first logged step the axis is followed down to nothing at step 0.
            found[name] = _json(np.interp(steps, np.append(0.0, known), np.append(0.0, values)), digits=12)
    return found


def spikes(table: Table) -> list[tuple[int, float, float]]:
    """Logged steps whose loss lies far above the 100 logged before them: by six standard deviations, and by 2%.

    Returns:
        Row, loss, and the mean of the 100 before, for each. Those among the 100 logged after one belong to it.
    """
    losses, window = column(table, "loss"), 100
    if len(losses) <= window or not np.isfinite(losses).any():
        return []
    middle = float(np.median(losses[np.isfinite(losses)]))
    centred = np.where(np.isfinite(losses), losses, middle) - middle  # small numbers, because of the squares
    sums, squares = (np.cumsum(np.append(0.0, values)) for values in (centred, centred**2))
    mean = (sums[window:-1] - sums[: -window - 1]) / window
    variance = np.maximum((squares[window:-1] - squares[: -window - 1]) / window - mean**2, 0.0)
    rise = centred[window:] - mean
    rows = np.flatnonzero((rise > 6 * np.sqrt(variance)) & (rise > 0.02 * np.abs(mean + middle))) + window
    found: list[int] = []
    for row in rows.tolist():
        if not found or row - found[-1] > window:
            found.append(row)
    return [(row, float(losses[row]), float(mean[row - window] + middle)) for row in found]


def _json(values: Floats, digits: int = 6) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values.tolist()]
