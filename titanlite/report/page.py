"""The page of `titanlite report`: one HTML file with its script, style and data, for one or several runs.

Invariant: the page loads nothing and runs no script but its own, which its Content-Security-Policy names by its hash.
What comes from files is in the data only, as JSON without "<", and static/page.js sets it as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite import __version__
from titanlite.config.errors import printable
from titanlite.config.schema import JobConfig
from titanlite.observe.logged_step import VALIDATION_CURVES, curve_of
from titanlite.report.run_files import json_lines, number, read_config, read_status, read_table
from titanlite.runtime.logging import ENDS, EVENTS_FILE

Columns = dict[str, NDArray[np.float64]]

# Budgets of a page, which its runs share, so that it stays below 5 MB.
_NUMBERS = 300_000  # of all curves, at 6 to 9 bytes each
_POINTS = 2_000  # of a curve: more than a screen has columns
_EVENTS, _SAMPLES, _TEXT = 1_000, 40, 20_000
_KEYS = 1_000  # of an object
_QUIET = ("save", "validation")  # kinds of events of which a long run has many


def make_page(folders: Sequence[Path]) -> str:
    """The page about the runs in these output folders, as text. They can still be going on.

    Raises:
        UserError: no run has written to a folder.
    """
    script = _static("uPlot.iife.min.js") + _static("page.js")
    parts = {
        "hash": f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'",
        "style": _static("uPlot.min.css") + _static("page.css"),
        "data": json.dumps(page_data(folders), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub("@([a-z]+)@", lambda found: parts[found[1]], _static("page.html"))


def page_data(folders: Sequence[Path]) -> dict[str, Any]:
    """What static/page.js draws, as a JSON value."""
    runs = [_run(folder, len(folders)) for folder in folders]
    numbers = sum(len(run[name]) for run in runs for name in ("curves", "validations"))
    points = max(50, min(_POINTS, _NUMBERS // (3 * max(1, numbers))))
    above = os.path.commonpath([run["folder"].parent for run in runs])
    for run in runs:
        run |= {name: thin(run[name], points) for name in ("curves", "validations")}
        run["name"] = os.path.relpath(run["folder"], above)
    keys = {key for run in runs for key in run["curves"]["y"]}
    data = {
        "version": __version__,
        "written": time.time(),
        "runs": runs,
        "tags": {key: [curve.tag, curve.description] for key in keys if (curve := curve_of(key))},
        "validation_tags": {key: [curve.tag, curve.description] for key, curve in VALIDATION_CURVES.items()},
        "defaults": JobConfig().model_dump(mode="json"),
    }
    return _safe(data, min(1_000, _TEXT // len(folders)))


def _static(name: str) -> str:
    return files("titanlite.report").joinpath("static", name).read_text(encoding="utf-8")


def _safe(value: Any, most: int) -> Any:
    """The JSON value with printable texts of at most `most` characters, and null for what is not finite."""
    if isinstance(value, dict):
        return {_safe(str(key), most): _safe(inner, most) for key, inner in [*value.items()][:_KEYS]}
    if isinstance(value, list | tuple):
        return [_safe(inner, most) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | None) else printable(str(value)[:most])


def _run(folder: Path, shares: int) -> dict[str, Any]:
    """All that a run has written, for a page of which it has one of `shares`."""
    status, folder = read_status(folder), Path(os.path.expanduser(folder)).resolve()
    problems: list[str] = []
    metrics = read_columns(json_lines(folder / "metrics.jsonl", problems))
    validations = read_columns(json_lines(folder / "validation.jsonl", problems))
    events = _events(json_lines(folder / EVENTS_FILE, problems), metrics)
    quiet = [event for event in events if event["kind"] in _QUIET]
    loud = [event for event in events if event["kind"] not in _QUIET]
    most = max(20, _EVENTS // shares)
    return {
        "folder": folder,
        **{name: getattr(status, name) for name in ("state", "reason", "last_word", "step", "total_steps", "numbers")},
        "curves": metrics,
        "validations": validations,
        "events": sorted([*loud[-most:], *quiet[-most:]], key=lambda event: event["time"]),
        "older_events": max(0, len(loud) - most) + max(0, len(quiet) - most),
        "samples": [*json_lines(folder / "samples.jsonl", problems)][-max(4, _SAMPLES // shares) :],
        "config": read_config(folder, problems),
        "environment": read_table(folder / "environment.json", json.loads, problems),
        "problems": list(dict.fromkeys(problems))[:100],
    }


def read_columns(entries: Iterable[dict[str, Any]]) -> Columns:
    """All numbers of lines that have a step, by key; NaN where there is none. Those of an object in a line have keys
    such as "OBJECT/KEY". The steps rise: what a later line goes behind is left out."""
    columns: dict[str, array[float]] = {"step": array("d")}
    for row, entry in enumerate(entry for entry in entries if number(entry, "step") is not None):
        for key, value in _numbers(entry):
            column = columns.setdefault(key, array("d"))
            column.extend([math.nan] * (row - len(column)))
            column.append(math.nan if value is None else value)
    rows = len(columns["step"])
    table = {key: np.append(column, np.full(rows - len(column), np.nan)) for key, column in columns.items()}
    later = np.append(np.minimum.accumulate(table["step"][::-1])[::-1][1:], np.inf)
    return {key: column[table["step"] < later] for key, column in table.items()}


def _numbers(entry: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    for key, value in entry.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{name}", number(value, name)) for name in value)
        else:
            yield key, number(entry, key)


def thin(columns: Columns, most: int) -> dict[str, Any]:
    """Curves of at most `most` points each. A point stands for equally many logged steps: for their mean, the smallest
    and the largest of their values, so nothing is left out.

    Returns:
        {"x": {"step", "tokens" and "hours", as far as they are known: [..]}, "y": {key: {"mean": [..]} or {"mean",
        "min", "max"}}}. Null stands for no finite value. Curves that are zero everywhere, or never finite, are left
        out.
    """
    logged = len(columns["step"])
    if logged == 0:
        return {"x": {}, "y": {}}
    edges = np.unique(np.linspace(0, logged, min(most, logged) + 1).astype(np.int64))[:-1]
    counts = np.diff(np.append(edges, logged))
    axes = {"step": columns["step"], "tokens": columns.get("tokens"), "hours": _hours(columns)}
    x = {name: _rounded(np.maximum.accumulate(np.add.reduceat(values, edges) / counts), digits=12)
         for name, values in axes.items() if values is not None and np.isfinite(values).all()}  # fmt: skip
    y = {}
    for key in columns.keys() - {"step", "time", "tokens", "elapsed"}:
        values, finite = columns[key], np.isfinite(columns[key])
        if values[finite].any():
            with np.errstate(invalid="ignore", divide="ignore"):
                mean = np.add.reduceat(np.where(finite, values, 0), edges) / np.add.reduceat(finite.astype(int), edges)
            y[key] = {"mean": _rounded(mean)}
            if logged > len(edges):
                y[key]["min"] = _rounded(np.fmin.reduceat(values, edges))
                y[key]["max"] = _rounded(np.fmax.reduceat(values, edges))
    return {"x": x, "y": y}


def _rounded(values: NDArray[np.float64], digits: int = 6) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]


def _hours(columns: Columns) -> NDArray[np.float64] | None:
    """Hours of training up to each logged step: without the time between a stop and the next start."""
    if not columns.keys() >= {"elapsed", "time"}:
        return None
    elapsed, now = columns["elapsed"], columns["time"]
    same_start = np.abs(np.diff(now - elapsed)) < 1.0  # both clocks go on together until the next start
    spent = np.where(same_start, np.diff(elapsed), elapsed[1:])
    return np.cumsum(np.maximum(np.append(elapsed[:1], spent), 0.0)) / 3600


def _events(entries: Iterable[dict[str, Any]], metrics: Columns) -> list[dict[str, Any]]:
    """The events. "step" is the number of steps done by then. "undone" says that a later start went back to an earlier
    step. A kind is found here: "killed", where a start follows another one without an end."""
    times = np.maximum.accumulate(np.nan_to_num(metrics.get("time", metrics["step"])))
    found: list[dict[str, Any]] = []
    ended = True
    for entry in entries:
        at, step, kind = number(entry, "time"), number(entry, "step"), str(entry.get("event"))
        if at is None:
            continue
        row = int(np.searchsorted(times, at, side="right"))
        reached = float(metrics["step"][row - 1]) if row else 0.0
        if kind == "start" and not ended:
            text = "The next start found no word of an end: the run was killed."
            found.append({"time": at, "kind": "killed", "step": reached, "text": text})
        ended = kind in ENDS or (ended and kind != "start")
        event = {"time": at, "kind": kind, "step": reached if step is None else step}
        found.append(event | {"text": str(entry.get("text", "")), "planned": entry.get("planned")})
    back_to = math.inf
    for event in reversed(found):
        event["undone"] = event["step"] > back_to
        if event["kind"] == "start":
            back_to = min(back_to, event["step"])
    return found
