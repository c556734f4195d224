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
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite import __version__
from titanlite.config.errors import printable
from titanlite.config.schema import JobConfig
from titanlite.observe.logged_step import TAGS, VALIDATION_CURVES, LoggedStep
from titanlite.report.run_files import json_lines, number, read_config, read_status, read_table
from titanlite.runtime.logging import ENDS, EVENTS_FILE

Columns = dict[str, NDArray[np.float64]]

# Budgets of a page, which its runs share, so that it stays below 5 MB.
_NUMBERS = 300_000  # of all curves, at 6 to 9 bytes each
_POINTS = 2_000  # of a curve: more than a screen has columns
_EVENTS, _SAMPLES, _TEXT = 1_000, 40, 20_000
_KEYS = 1_000  # of an object


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
    data = {
        "version": __version__,
        "written": time.time(),
        "runs": runs,
        "tags": {key: [tag, LoggedStep.model_fields[key].description] for key, tag in TAGS.items()},
        "validation_tags": VALIDATION_CURVES,
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
    for key, whole in ("loss_max", "loss"), ("tps_per_device", "tps"):  # with one rank they are the same
        if key in metrics and whole in metrics and np.allclose(metrics[key], metrics[whole], equal_nan=True):
            del metrics[key]
    validations = read_columns(json_lines(folder / "validation.jsonl", problems))
    events = _events(json_lines(folder / EVENTS_FILE, problems), metrics)
    most = max(20, _EVENTS // shares)
    return {
        "folder": folder,
        **{name: getattr(status, name) for name in ("state", "reason", "last_word", "step", "total_steps", "numbers")},
        "curves": metrics,
        "validations": validations,
        "events": events[-most:],
        "older_events": max(0, len(events) - most),
        "samples": [*json_lines(folder / "samples.jsonl", problems)][-max(4, _SAMPLES // shares) :],
        "config": read_config(folder, problems),
        "environment": read_table(folder / "environment.json", json.loads, problems),
        "problems": list(dict.fromkeys(problems))[:100],
    }


def read_columns(entries: Iterable[dict[str, Any]]) -> Columns:
    """All numbers of lines whose step is above those before, by key; NaN where there is none. Those of an object in a
    line have keys such as "OBJECT/KEY"."""
    columns: dict[str, array[float]] = {"step": array("d")}
    rows, last = 0, -1.0
    for entry in entries:
        if (step := number(entry, "step")) is None or step <= last:
            continue
        last = step
        parts = [(f"{key}/", value) for key, value in entry.items() if isinstance(value, dict)]
        found = {f"{above}{key}": number(table, key) for above, table in [("", entry), *parts] for key in table}
        for key, value in found.items():
            if value is not None:
                column = columns.setdefault(key, array("d"))
                column.extend([math.nan] * (rows - len(column)))
                column.append(value)
        rows += 1
    return {key: np.append(column, np.full(rows - len(column), np.nan)) for key, column in columns.items()}


def thin(columns: Columns, most: int) -> dict[str, Any]:
    """Curves of at most `most` points each. A point stands for equally many logged steps: for their mean, the smallest
    and the largest of their values, so nothing is left out.

    Returns:
        {"x": {"step", "tokens" and "hours", as far as they are known: [..]}, "y": {key: {"mean": [..]} or {"mean",
        "min", "max"}}}. Null stands for no finite value. Curves that are zero everywhere are left out.
    """
    logged = len(columns["step"])
    if logged == 0:
        return {"x": {}, "y": {}}
    edges = np.unique(np.linspace(0, logged, min(most, logged) + 1).astype(np.int64))[:-1]
    axes = {name: columns[name] for name in ("step", "tokens") if name in columns}
    if "step_time" in columns:  # hours of training, without the time between a stop and the next start
        axes["hours"] = np.cumsum(columns["step_time"] * np.diff(columns["step"], prepend=0.0)) / 3600
    counts = np.diff(np.append(edges, logged))
    x = {name: _rounded(np.maximum.accumulate(np.add.reduceat(values, edges) / counts), digits=12)
         for name, values in axes.items() if np.isfinite(values).all()}  # fmt: skip
    y = {}
    for key in columns.keys() - {"step", "time", "tokens", "elapsed"}:
        values, finite = columns[key], np.isfinite(columns[key])
        if not values[finite].any():
            continue
        with np.errstate(invalid="ignore"):
            mean = np.add.reduceat(np.where(finite, values, 0), edges) / np.add.reduceat(finite.astype(float), edges)
        y[key] = {"mean": _rounded(mean)}
        if logged > len(edges):
            y[key]["min"] = _rounded(np.fmin.reduceat(values, edges))
            y[key]["max"] = _rounded(np.fmax.reduceat(values, edges))
    return {"x": x, "y": y}


def _rounded(values: NDArray[np.float64], digits: int = 6) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]


def _events(entries: Iterable[dict[str, Any]], metrics: Columns) -> list[dict[str, Any]]:
    """The events. "step" is the number of steps done by then. "undone" says that a later start went back to an earlier
    step. A kind is found here: "killed", where a start follows another one without an end."""
    times, steps = metrics.get("time", metrics["step"]), metrics["step"]
    found: list[dict[str, Any]] = []
    ended = True
    for entry in entries:
        at, step, kind = number(entry, "time"), number(entry, "step"), str(entry.get("event"))
        if at is None:
            continue
        reached = float(np.max(steps[times <= at], initial=0.0)) if step is None or kind == "start" else step
        event = {"time": at, "step": reached if step is None else step, "undone": False}
        if kind == "start":
            if not ended:
                text = "The next start found no word of an end: the run was killed."
                found.append(event | {"kind": "killed", "step": reached, "text": text})
            for earlier in found:
                earlier["undone"] |= earlier["step"] > event["step"]
        ended = kind in ENDS or (ended and kind != "start")
        found.append(event | {"kind": kind, "text": str(entry.get("text", ""))})
    return found
