"""Make the HTML page for `titanlite report`: one file with scripts, styles and data of all runs.

Invariant: The page loads nothing over the network and runs only the embedded script, whose hash is
in the Content-Security-Policy. Data from the runs is embedded as JSON without "<", and the script
inserts it as text.
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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titanlite import __version__
from titanlite.config.errors import printable
from titanlite.config.schema import JobConfig
from titanlite.observe.logged_step import TAGS, VALIDATION_CURVES, LoggedStep
from titanlite.report.run_files import (
    JsonObject,
    get_number,
    get_numbers,
    read_config,
    read_json_lines,
    read_metrics,
    read_status,
    read_table,
)
from titanlite.runtime.logging import ENDS, EVENTS_FILE

Columns = dict[str, NDArray[np.float64]]
"""Values of each metric at the log steps of a run, by metric. All arrays have the same length."""

# All runs on a page share these limits, which keep it below 5 MB.
MAX_NUMBERS = 300_000  # In all curves, at 6 to 9 bytes each.
MAX_POINTS = 2_000  # Per curve: more than a screen has pixel columns.
MIN_POINTS = 50
MAX_EVENTS = 1_000
MAX_SAMPLES = 40
MAX_STRING_LENGTH = 1_000  # Characters per string.
MAX_TEXT_LENGTH = 20_000  # With n runs, a string has at most MAX_TEXT_LENGTH / n characters.
MAX_KEYS = 1_000  # Per object.
MAX_PROBLEMS = 100

NOT_DRAWN = {"step", "time", "tokens", "elapsed"}
"""Fields of metrics.jsonl that are axes instead of curves."""
SCRIPTS = ("uPlot.iife.min.js", "data.js", "charts.js", "tables.js", "page.js")
"""Files that make up the script of the page. A file may use names from the files before it."""


def make_page(folders: Sequence[Path]) -> str:
    """Return an HTML page with the curves, events and samples of several runs.

    Args:
        folders: Output folders of the runs.

    Raises:
        UserError: If a folder is not the output folder of a run.
    """
    script = "".join(map(_read_static, SCRIPTS))
    digest = hashlib.sha256(script.encode()).digest()
    script_hash = base64.b64encode(digest).decode()
    data = json.dumps(page_data(folders), separators=(",", ":"), allow_nan=False)
    contents = {
        # The Content-Security-Policy of the page allows only this hash, so no other script runs.
        "hash": f"'sha256-{script_hash}'",
        "style": _read_static("uPlot.min.css") + _read_static("page.css"),
        # Escape "<", so that "</script>" in a text from a run does not end the script element.
        "data": data.replace("<", "\\u003c"),
        "script": script,
    }

    # Replace @hash@, @style@, @data@ and @script@ in the template.
    template = _read_static("page.html")
    return re.sub("@([a-z]+)@", lambda match: contents[match[1]], template)


def page_data(folders: Sequence[Path]) -> JsonObject:
    """Read several runs and return the data for the page, which is safe to encode as JSON.

    Args:
        folders: Output folders of the runs.

    Returns:
        A dictionary with these keys:

        - "runs": data of each run, see `_read_runs`
        - "tags" and "validation_tags": TensorBoard tag and description of each metric
        - "defaults": default options of a job, by section
        - "version": version of titanlite
        - "written": current Unix time
    """
    runs = _read_runs(folders)
    metrics = LoggedStep.model_fields
    data = {
        "version": __version__,
        "written": time.time(),
        "runs": runs,
        "tags": {name: [tag, metrics[name].description] for name, tag in TAGS.items()},
        "validation_tags": VALIDATION_CURVES,
        "defaults": JobConfig().model_dump(mode="json"),
    }
    max_length = min(MAX_STRING_LENGTH, MAX_TEXT_LENGTH // len(folders))
    return _make_safe(data, max_length)


def _read_runs(folders: Sequence[Path]) -> list[JsonObject]:
    """Read several runs, name each one, and downsample its curves.

    Args:
        folders: Output folders of the runs.

    Returns:
        Data of each run: the result of `_read_run` with downsampled curves, and the key "name",
        which contains the path relative to the common parent folder of all runs.
    """
    runs = [_read_run(folder, num_runs=len(folders)) for folder in folders]
    num_points = _choose_num_points(runs)  # limits the size of the page
    # Name each run by its path relative to the common folder: out/a and out/b become a and b.
    common_folder = os.path.commonpath([run["folder"].parent for run in runs])
    for run in runs:
        run["name"] = os.path.relpath(run["folder"], common_folder)
        run["curves"] = downsample(run["curves"], num_points)
        run["validations"] = downsample(run["validations"], num_points)
    return runs


def _choose_num_points(runs: Sequence[JsonObject]) -> int:
    """Return the number of points per curve such that the curves of all runs fit on the page.

    Args:
        runs: Data of each run from `_read_run`.
    """
    num_curves = sum(len(run["curves"]) + len(run["validations"]) for run in runs)
    numbers_per_curve = MAX_NUMBERS // max(1, num_curves)
    num_points = numbers_per_curve // 3  # Each point has mean, min and max.
    return max(MIN_POINTS, min(MAX_POINTS, num_points))


def _read_static(name: str) -> str:
    """Return the content of a file in the package folder `static`, such as "page.js"."""
    return files("titanlite.report").joinpath("static", name).read_text(encoding="utf-8")


def _make_safe(value: Any, max_length: int) -> Any:
    """Return a copy of `value` that is safe to embed in the page as JSON.

    Escape control characters in strings, truncate long strings and large dictionaries, and replace
    non-finite numbers with None.

    Args:
        value: Value with nested dictionaries and lists.
        max_length: Maximum length of a string, in characters.
    """
    if isinstance(value, dict):
        items = list(value.items())[:MAX_KEYS]
        return {_make_safe(str(k), max_length): _make_safe(v, max_length) for k, v in items}
    if isinstance(value, list | tuple):
        return [_make_safe(item, max_length) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has neither NaN nor infinity.
    if isinstance(value, int | float | None):
        return value
    return printable(str(value)[:max_length])


def _read_run(folder: Path, num_runs: int) -> JsonObject:
    """Read the status, metrics, events, samples and config of a run as JSON data for the page.

    Args:
        folder: Output folder of the run.
        num_runs: Number of runs on the page, which share the limits on events and samples.

    Returns:
        Among others, "numbers": the metrics of the last log step, "curves": the metrics of all log
        steps, and "validations": the results of all validations.
    """
    # Resolve the folder after this call, so that errors show it as the user wrote it.
    status = read_status(folder)
    folder = folder.resolve()

    # The functions that read a file append a description of any damage to `problems`.
    problems: list[str] = []
    metrics = make_columns(read_metrics(folder, problems))
    _remove_equal_curves(metrics)  # such as the maximum loss over all ranks in a run on one rank
    validations = make_columns(read_json_lines(folder / "validation.jsonl", problems))
    event_lines = read_json_lines(folder / EVENTS_FILE, problems)
    events = _read_events(event_lines, metrics)
    samples = list(read_json_lines(folder / "samples.jsonl", problems))
    config = read_config(folder, problems)
    environment = read_table(folder / "environment.json", json.loads, problems)
    distinct_problems = list(dict.fromkeys(problems))

    # Divide the limits equally among the runs, but show at least a few items of each run.
    max_events = max(20, MAX_EVENTS // num_runs)
    max_samples = max(4, MAX_SAMPLES // num_runs)
    return {
        "folder": folder,
        "state": status.state,
        "exit_reason": status.exit_reason,
        "last_update": status.last_update,
        "step": status.step,
        "total_steps": status.total_steps,
        "numbers": status.numbers,
        "tokens": _count_tokens(status.step, metrics),
        "curves": metrics,
        "validations": validations,
        "events": events[-max_events:],
        "older_events": max(0, len(events) - max_events),
        "samples": samples[-max_samples:],
        "config": config,
        "environment": environment,
        "problems": distinct_problems[:MAX_PROBLEMS],
    }


def _remove_equal_curves(metrics: Columns) -> None:
    """Remove per-rank metrics that always equal the overall metrics, as in a run on one rank.

    For example, remove "loss_max_rank" if it always equals "loss".
    """
    for name, total in (("loss_max_rank", "loss"), ("tps_per_device", "tps")):
        has_both = name in metrics and total in metrics
        if has_both and np.allclose(metrics[name], metrics[total], equal_nan=True):
            del metrics[name]


def make_columns(entries: Iterable[JsonObject]) -> Columns:
    """Convert the lines of a JSON Lines file to one array per key, with NaN for missing values.

    For example, the lines {"step": 1, "loss": 9.0} and {"step": 2, "loss": 8.0, "mfu": 0.4} become
    {"step": [1, 2], "loss": [9, 8], "mfu": [NaN, 0.4]}.

    Skip lines without a valid step and lines whose step is not higher than all earlier steps.
    Numbers in nested objects have the key "OBJECT/KEY", such as "grad_norms/attention.wq".
    """
    columns: dict[str, array[float]] = defaultdict(lambda: array("d"))
    last_step = -1.0
    for entry in entries:
        step = get_number(entry, "step")
        if step is None or step <= last_step:
            continue
        last_step = step

        num_rows = len(columns["step"])
        for name, number in _flatten_numbers(entry).items():
            _pad_with_nan(columns[name], num_rows)  # for earlier lines without this key
            columns[name].append(number)

    num_rows = len(columns["step"])
    for column in columns.values():
        _pad_with_nan(column, num_rows)  # for later lines without this key
    return {name: np.array(column) for name, column in columns.items()}


def _pad_with_nan(column: array[float], length: int) -> None:
    """Append NaN to a column until it has `length` values."""
    num_missing = length - len(column)
    if num_missing > 0:
        column.extend([math.nan] * num_missing)


def _flatten_numbers(entry: JsonObject) -> dict[str, float]:
    """Return all numbers in a line of a JSON Lines file, by name.

    Numbers in nested objects are named "OBJECT/KEY", such as "grad_norms/attention.wq".
    """
    numbers = get_numbers(entry)
    for name, value in entry.items():
        if isinstance(value, dict):
            for key, number in get_numbers(value).items():
                numbers[f"{name}/{key}"] = number
    return numbers


def downsample(columns: Columns, max_points: int) -> JsonObject:
    """Reduce each curve to at most `max_points` points, where each point covers several log steps.

    For example, if 10 log steps are reduced to 4 points, the points cover log steps 0 to 1, 2 to 4,
    5 to 6, and 7 to 9.

    Args:
        columns: Values of each metric at the log steps, from `make_columns`.
        max_points: Maximum number of points per curve.

    Returns:
        {"x": {axis: values}, "y": {metric: curve}}. The axes are "step" and, if known, "tokens" and
        "hours". `_downsample_curve` describes the curves. Curves that are always 0 are omitted.
    """
    num_rows = len(columns["step"])
    if num_rows == 0:
        return {"x": {}, "y": {}}

    # Point i covers the rows from edges[i] up to, but not including, edges[i + 1].
    num_points = min(max_points, num_rows)
    edges = np.linspace(0, num_rows, num_points + 1).astype(np.int64)
    axes = {}
    for name, values in _list_axes(columns).items():
        if np.isfinite(values).all():
            axes[name] = _downsample_axis(values, edges)

    curves = {}
    for name, values in columns.items():
        is_always_zero = not values[np.isfinite(values)].any()
        if name not in NOT_DRAWN and not is_always_zero:
            curves[name] = _downsample_curve(values, edges)
    return {"x": axes, "y": curves}


def _downsample_axis(values: NDArray[np.float64], edges: NDArray[np.int64]) -> list[float]:
    """Average the axis values that each point covers, to get its position on the axis.

    Args:
        values: Values of the axis at the log steps.
        edges: Point i covers the values from index edges[i] up to, but not including, edges[i + 1].
            The last edge is len(values).
    """
    sums = np.add.reduceat(values, edges[:-1])
    means = sums / np.diff(edges)
    # Charts need ascending positions, even if the token counts in a file decrease.
    return _round(np.maximum.accumulate(means), digits=12)


def _downsample_curve(
    values: NDArray[np.float64], edges: NDArray[np.int64]
) -> dict[str, list[float]]:
    """Return the mean, minimum and maximum of the known values that each point covers.

    Args:
        values: Values of a metric at the log steps. NaN means unknown.
        edges: Point i covers the values from index edges[i] up to, but not including, edges[i + 1].
            The last edge is len(values).

    Returns:
        Lists "mean", "min" and "max" with one number per point. A point that covers no known value
        has NaN in all of them, which leaves a gap in the curve. If each point covers one value,
        return only "mean".
    """
    # `reduceat` combines the values from each start up to, but not including, the next one. The
    # last point extends to the end of `values`.
    starts = edges[:-1]

    # Average the known values.
    is_known = ~np.isnan(values)
    num_known = np.add.reduceat(is_known, starts, dtype=float)
    sums = np.add.reduceat(np.nan_to_num(values), starts)  # NaN counts as 0
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN, as intended
        means = sums / num_known
    curve = {"mean": _round(means)}

    # If each point covers one value, its minimum and maximum equal its mean.
    covers_several_values = len(values) > len(starts)
    if covers_several_values:
        # `fmin` and `fmax` ignore NaN unless all values are NaN.
        curve["min"] = _round(np.fmin.reduceat(values, starts))
        curve["max"] = _round(np.fmax.reduceat(values, starts))
    return curve


def _list_axes(columns: Columns) -> Columns:
    """Return the values of the axes "step", "tokens" and "hours" at each log step.

    Omit an axis if its metrics were not logged.
    """
    axes = {name: columns[name] for name in ("step", "tokens") if name in columns}
    if "step_time" in columns:  # Hours of training exclude the time when the run was down.
        steps_per_row = np.diff(columns["step"], prepend=0.0)
        axes["hours"] = np.cumsum(columns["step_time"] * steps_per_row) / 3600
    return axes


def _round(values: NDArray[np.float64], digits: int = 6) -> list[float]:
    """Round numbers to `digits` significant digits to keep the page small."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]


def _read_events(entries: Iterable[JsonObject], metrics: Columns) -> list[JsonObject]:
    """Convert the lines of the events file, such as starts and saves, to events for the page.

    A killed process records no end, so add an event "killed" before the next start. If a run
    resumes from an earlier step, mark its events at later steps with "undone": True.

    Args:
        entries: Lines of the events file.
        metrics: Columns of metrics.jsonl, used to find the step at the time of an event.
    """
    events: list[JsonObject] = []
    is_running = False
    for event in _parse_events(entries, metrics):
        if event["kind"] == "start":
            if is_running:  # the previous process recorded no end
                events.append(_make_killed_event(events[-1], event, metrics))
            _mark_undone(events, event["step"])
            is_running = True
        elif event["kind"] in ENDS:
            is_running = False
        events.append(event)
    return events


def _make_killed_event(
    last_event: JsonObject, next_start: JsonObject, metrics: Columns
) -> JsonObject:
    """Return an event for the end of a process that was killed before the next start.

    The time of the end is unknown, so use the time of the next start. The step is the last one that
    the process is known to have trained, from its last event or from metrics.jsonl.
    """
    last_logged_step = _find_logged_step(metrics, next_start["time"])
    return {
        "time": next_start["time"],
        "step": max(last_event["step"], last_logged_step),
        "undone": False,
        "kind": "killed",
        "text": "The run was killed: no end was recorded before the next start.",
    }


def _mark_undone(events: Iterable[JsonObject], start_step: float) -> None:
    """Mark the events after `start_step` as undone, because the run resumed from this step."""
    for event in events:
        if event["step"] > start_step:
            event["undone"] = True


def _parse_events(entries: Iterable[JsonObject], metrics: Columns) -> Iterator[JsonObject]:
    """Yield each event in the format of the page.

    Events without a step, such as crashes, get the last step that was known at that time. For
    example, if a run starts at step 100, logs step 120 and crashes, the crash is at step 120.

    Args:
        entries: Lines of the events file.
        metrics: Columns of metrics.jsonl, with the step and time of each log step.
    """
    previous_step = 0.0
    for entry in entries:
        unix_time = get_number(entry, "time")
        if unix_time is None:
            continue

        step = get_number(entry, "step")
        if step is None:
            step = max(previous_step, _find_logged_step(metrics, unix_time))
        yield {
            "time": unix_time,
            "step": step,
            "undone": False,  # becomes True if the run resumes from an earlier step
            "kind": str(entry.get("event")),
            "text": str(entry.get("text", "")),
        }
        previous_step = step


def _find_logged_step(metrics: Columns, unix_time: float) -> float:
    """Return the last step that the run had logged by `unix_time`, or 0 if it had logged none.

    Metrics without times count as logged before all events.
    """
    steps = metrics["step"]
    if "time" in metrics:
        steps = steps[metrics["time"] <= unix_time]
    return float(np.max(steps, initial=0.0))


def _count_tokens(step: int, metrics: Columns) -> float | None:
    """Estimate the number of tokens trained on in the first `step` steps.

    For steps after the last log step, extrapolate from the preceding steps. Return None if the run
    logged no tokens.

    Args:
        step: Number of completed steps.
        metrics: Columns of metrics.jsonl.
    """
    if "tokens" not in metrics or metrics["step"][-1] == 0:
        return None
    # With a single log step, the previous one is step 0 with 0 tokens.
    previous_step, last_step = np.append(0.0, metrics["step"])[-2:]
    previous_tokens, last_tokens = np.append(0.0, metrics["tokens"])[-2:]
    tokens_per_step = (last_tokens - previous_tokens) / (last_step - previous_step)
    return float(last_tokens + (step - last_step) * tokens_per_step)
