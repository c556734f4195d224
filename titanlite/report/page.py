"""The page of `titanlite report`: one HTML file with its script, style and data, for one or several runs.

Invariant: the page loads nothing and runs no script but its own two, which its Content-Security-Policy names by their
hashes. All that comes from files is escaped: as text in the tables, and as JSON without "<" in the data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from titanlite import __version__
from titanlite.config.errors import printable
from titanlite.config.schema import JobConfig
from titanlite.observe.logged_step import CURVES, TIME_PARTS, VALIDATION_CURVES, curve_of
from titanlite.report.curves import column, hours, places, thin
from titanlite.report.recorded import Happened, Recorded, flat

# Budgets of a page, which its runs share, so that it stays below 5 MB.
_NUMBERS = 300_000  # of all curves, at 6 to 9 bytes each
_MOST_POINTS = 2_000  # of a curve: more than a screen has columns
_MOST_EVENTS, _MOST_ROWS, _MOST_SAMPLES = 3_000, 200, 40
_MOST_KEYS = 1_000  # of a configuration
_MOST_TEXT = 1_000  # characters of an event, a sample, or a value; fewer where there are more than 20 runs
_QUIET = ("save", "validation", "data")  # kinds of events of which a long run has many


def make_page(runs: Sequence[Recorded]) -> str:
    """The page as text. It is smaller than 5 MB, however long the runs are."""
    names = _names(runs)
    data = json.dumps(_data(runs, names), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = [_static("uPlot.iife.min.js"), _static("page.js")]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'"
    title = ", ".join(names)
    sections = (
        _overview(runs, names), _charts(runs), _events(runs, names), _starts(runs, names), _speed(runs, names),
        _profiles(runs, names),
        _checkpoints(runs, names), _coverage(runs, names), _samples(runs, names), _differences(runs, names),
        _environment(runs, names), _configurations(runs, names),
    )  # fmt: skip
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{_static("uPlot.min.css")}{_static("page.css")}</style>
</head>
<body>
<h1>{_text(title)}</h1>
<p class="muted">Written {time.strftime("%Y-%m-%d %H:%M")} by titanlite {__version__}, from the files of the runs.</p>
{"".join(sections)}
<script type="application/json" id="data">{data}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def _most_text(runs: Sequence[Recorded]) -> int:
    return min(_MOST_TEXT, 20_000 // len(runs))


def _static(name: str) -> str:
    return files("titanlite.report").joinpath("static", name).read_text(encoding="utf-8")


def _names(runs: Sequence[Recorded]) -> list[str]:
    """The last parts of the runs' paths, as many as tell them apart."""
    paths = [run.folder.resolve() for run in runs]
    for parts in range(1, 50):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]


# -------------------------------------------------------------------------------------------------------------- data


def _data(runs: Sequence[Recorded], names: Sequence[str]) -> dict[str, Any]:
    """What the page's script draws."""
    columns = sum(len(run.metrics.columns) + len(run.validations.columns) for run in runs)
    most = max(50, min(_MOST_POINTS, _NUMBERS // (3 * max(1, columns))))
    drawn = []
    for run, name in zip(runs, names, strict=True):
        validations = thin(run.validations, most)
        validations["x"] = places(run.metrics, column(run.validations, "step")) if validations["per_point"] == 1 else {}
        drawn.append({
            "name": printable(name),
            "curves": thin(run.metrics, most),
            "validations": validations,
            "events": _drawn_events(run, max(20, _MOST_EVENTS // len(runs))),
            "planned": {key: value for key, value in run.planned.items() if math.isfinite(value)},
        })  # fmt: skip
    return {"runs": drawn, "charts": _specs(drawn)}


def _drawn_events(run: Recorded, most: int) -> dict[str, list[Any]]:
    """The events as columns, by step. Of those of which there are many some are left out; the table counts them."""
    quiet = [event for event in run.events if event.kind in _QUIET]
    loud = [event for event in run.events if event.kind not in _QUIET][-most:]
    events = sorted([*quiet[:: 1 + len(quiet) // most], *loud], key=lambda event: event.step)
    steps = np.array([event.step for event in events], dtype=np.float64)
    return {
        **places(run.metrics, steps),
        "kind": [printable(event.kind) for event in events],
        "text": [printable(_first_line(event.text))[:200] for event in events],
        "undone": [event.undone for event in events],
    }


def _specs(drawn: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One chart for each curve that any run has, in TensorBoard's order: those of titanlite first, the loss widest."""
    logged = {key for run in drawn for key in run["curves"]["y"]}
    validated = {key for run in drawn for key in run["validations"]["y"]}
    specs = []
    for key in logged:
        curve = curve_of(key)
        tag, about = (curve.tag, curve.description) if curve else (f"9_more/{key}", "")
        specs.append((tag, {"key": key, "about": about, "wide": key == "loss"}))
        if key == "loss" and "loss" in validated:
            specs[-1][1].update(validation="loss", about=f"{about} Dashed: {VALIDATION_CURVES['loss'].description}")
    for key in validated - {"loss"}:
        curve = VALIDATION_CURVES.get(key)
        tag, about = (curve.tag, curve.description) if curve else (f"9_more/validation {key}", "")
        specs.append((tag, {"key": "", "validation": key, "about": about}))
    events = {"key": "", "about": "What happened, and when. Pale: trained again after a return to an earlier step."}
    specs.append(("1_loss/zz", {**events, "kind": "events", "wide": True, "title": "Events"}))
    found = []
    for number, (tag, spec) in enumerate(sorted(specs, key=lambda pair: pair[0])):
        group, _, name = (part.lstrip("0123456789_").replace("_", " ") for part in tag.partition("/"))
        title = name if name.startswith(group) or group == "more" else f"{group}: {name}"
        found.append({"id": number, "title": printable(title), **spec, "key": spec["key"]})
    return found


# ---------------------------------------------------------------------------------------------------------- sections


def _overview(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    head = ("run", "state", "step", "tokens", "hours", "loss", "lowest validation loss", "tokens/s", "ranks")
    rows = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        status, spent = run.status, hours(run.metrics)
        validated = column(run.validations, "loss")
        lowest = np.nanmin(validated) if np.isfinite(validated).any() else None
        of = "" if status.total_steps is None else f" of {status.total_steps:,}"
        age = "" if status.last_word is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(status.last_word))
        state = f'<span class="state {status.state}">{status.state}</span> <span class="muted">{age}</span>'
        state += f"<br>{_text(status.reason)}" if status.reason else ""
        dot = f'<span class="dot" style="background:var(--c{number % 10})"></span>'
        rows.append([
            f"{dot}{_text(name)}<br><span class='muted'>{_text(run.config.get('job.description') or '')}</span>",
            state,
            f"{status.step:,}{of}",
            _number(status.numbers.get("tokens"), "{:,.0f}"),
            _number(spent[-1] if len(spent) else None, "{:,.2f}"),
            _number(status.numbers.get("loss"), "{:.4f}"),
            _number(lowest, "{:.4f}"),
            _number(status.numbers.get("tps"), "{:,.0f}"),
            _text(run.environment.get("world_size", "-")),
        ])  # fmt: skip
    problems = [f"{name}: {problem}" for run, name in zip(runs, names, strict=True) for problem in run.problems]
    listed = "".join(f'<p class="problem">{_text(problem[:_MOST_TEXT])}</p>' for problem in problems[:_MOST_ROWS])
    return f'<div class="card scroll">{_table(head, rows, numeric=range(2, 9), safe=(0, 1))}{listed}</div>'


def _charts(runs: Sequence[Recorded]) -> str:
    longest = max(len(run.metrics.columns["step"]) for run in runs)
    drawn = ""
    if longest > 1:
        drawn = (
            "Of a run with more logged steps than points on the page, a point is the mean of as many steps as it "
            "stands for, and the band around the line goes from the smallest to the largest of their values. "
        )
    return f"""<h2>Curves</h2>
<p class="muted">{drawn}Drag to zoom all charts; a double click shows all again. Smoothing draws an exponential mean
of the points, like TensorBoard's. Hours are those of training, without the time between a stop and the next start.</p>
<noscript><p class="problem">The charts need JavaScript. The tables below do not.</p></noscript>
<div id="controls">
<label>over <select id="axis"></select></label>
<label>smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0"></label>
<label><input type="checkbox" id="log"> logarithmic</label>
<label><input type="checkbox" id="cut"> without outliers</label>
<label><input type="checkbox" id="events" checked> events</label>
<button id="whole">show all</button>
<div id="runs"></div>
</div>
<div id="charts"></div>
"""


def _events(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    parts, most = [], max(10, _MOST_ROWS // len(runs))
    for run, name in zip(runs, names, strict=True):
        counts: dict[str, int] = {}
        for event in run.events:
            counts[event.kind] = counts.get(event.kind, 0) + 1
        said = ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "none"
        loud = [event for event in run.events if event.kind not in _QUIET][-most:]
        quiet = [event for event in run.events if event.kind in ("save", "validation")][-most:]
        left_out = sum(counts.values()) - counts.get("data", 0) - len(loud) - len(quiet)
        more = f" The {left_out:,} oldest are not listed." if left_out else ""
        parts.append(
            f"<p>{_text(name)}: {_text(said)}.{more}</p>{_event_table(loud, _most_text(runs))}"
            f"<details><summary>Saves and validations</summary>{_event_table(quiet, _most_text(runs))}</details>"
        )
    return f'<h2>Events</h2><div class="card scroll">{"".join(parts)}</div>'


def _event_table(events: Iterable[Happened], most_text: int) -> str:
    rows = "".join(
        f'<tr{" class=undone" if event.undone else ""}><td class="number">'
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(event.time))}</td><td>{_text(event.kind)}</td>"
        f'<td class="number">{event.step:,.0f}</td><td class="text">{_text(event.text[:most_text])}</td></tr>'
        for event in reversed(list(events))
    )
    head = '<tr><th>time</th><th>event</th><th class="number">step</th><th>log</th></tr>'
    return f"<table>{head}{rows}</table>" if rows else ""


def _starts(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    """Each start, and what differs from the start before."""
    parts, most, most_text = [], max(5, _MOST_ROWS // len(runs)), _most_text(runs)
    for run, name in zip(runs, names, strict=True):
        rows = [
            [
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.time)),
                f"{start.step:,}",
                "-" if start.ranks is None else f"{start.ranks:,}",
                start.host[:most_text],
                start.code[:most_text],
                "-" if start.changed is None else "\n".join(start.changed)[:most_text] or "nothing",
            ]
            for start in reversed(run.starts[-most:])
        ]
        more = f", without the {len(run.starts) - most:,} oldest" if len(run.starts) > most else ""
        head = ("time", "after step", "ranks", "host", "code", "changed since the start before")
        if rows:
            parts.append(f"<p>{_text(name)}{more}</p>{_table(head, rows, numeric=(0, 1, 2), kind='text')}")
    return f'<h2>Starts</h2><div class="card scroll">{"".join(parts)}</div>' if parts else ""


def _speed(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    """Medians and extremes of what a step took, with the plan of a run beside them."""
    rows, any_plan = [], any(run.planned for run in runs)
    speed = ("tps", "tps_per_device", "mfu", "tflops", "step_time", *TIME_PARTS)
    for key in (*speed, "memory", "memory_peak", "memory_active", "utilization"):
        about = CURVES[key].description
        for run, name in zip(runs, names, strict=True):
            values = column(run.metrics, key)
            values = values[np.isfinite(values)]
            if len(values):
                plan = [run.planned.get(key, math.nan)] if any_plan else []
                shown = (
                    "-" if math.isnan(v) else f"{v:,.0f}" if v >= 1000 else f"{v:.4g}"
                    for v in (*plan, np.median(values), min(values), max(values))
                )  # fmt: skip
                rows.append([key, name, *shown, about])
                about = ""
    plan = ("planned",) if any_plan else ()
    head = ("number", "run", *plan, "median", "smallest", "largest", "")
    return f"""<h2>Throughput and memory</h2><div class="card scroll">
{_table(head, rows, numeric=range(2, 5 + any_plan))}</div>"""


def _profiles(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    """The parts of a step in all profiles, and the dearest operators of the newest one."""
    parts, most = [], max(2, 20 // len(runs))
    for run, name in zip(runs, names, strict=True):
        listed = run.profiles[-most:]
        if not listed:
            continue
        found = list(dict.fromkeys(part for profile in listed for part in profile.parts))[:20]
        rows = [
            [f"{profile.last_step:,}", f"{profile.rank}", f"{1e3 * profile.seconds:,.2f}",
             *(f"{profile.parts[part] / profile.seconds:.1%}" if part in profile.parts else "-" for part in found),
             profile.trace[:120]]
            for profile in listed
        ]  # fmt: skip
        head = ("step", "rank", "ms a step", *(part[:40] for part in found), "trace")
        parts.append(f"<p>{_text(name)}: shares of the parts of a step.</p>")
        parts.append(_table(head, rows, numeric=range(len(head) - 1)))
        newest = listed[-1]
        rows = [
            [operator.name[:120], f"{1e3 * operator.seconds:,.3f}", f"{operator.seconds / newest.seconds:.1%}",
             f"{operator.calls:,.0f}"]
            for operator in newest.operators[:30]
        ]  # fmt: skip
        parts.append(f"<p>The dearest operators of {newest.steps()} on rank {newest.rank}.</p>")
        parts.append(_table(("operator", "ms a step", "share", "calls"), rows, numeric=(1, 2, 3)))
    return f'<h2>Profiles</h2><div class="card scroll">{"".join(parts)}</div>' if parts else ""


def _checkpoints(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    rows, most = [], max(5, _MOST_ROWS // len(runs))
    for run, name in zip(runs, names, strict=True):
        listed = run.checkpoints[-most:]
        for found in listed:
            size = "damaged" if found.bytes is None else f"{found.bytes / 1e9:.3f} GB"
            what = "weights only" if found.weights_only else ""
            rows.append([name, f"{found.step:,}", size, what, str(found.path)])
        if len(listed) < len(run.checkpoints):
            rows.append([name, f"and {len(run.checkpoints) - len(listed):,} older ones", "", "", ""])
    table = _table(("run", "step", "size", "", "folder"), rows, numeric=(1, 2)) if rows else "<p>There are none.</p>"
    return f'<h2>Checkpoints</h2><div class="card scroll">{table}</div>'


def _coverage(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    parts, most = [], max(10, _MOST_ROWS // len(runs))
    for run, name in zip(runs, names, strict=True):
        rows_in_all, seq_len = sum(run.sources.values()), run.config.get("training.seq_len")
        rows = [
            [source, f"{count:,}", f"{count * seq_len:,}" if type(seq_len) is int else "-",
             f"{count / max(1, rows_in_all):.1%}"]
            for source, count in run.sources.items()
        ][:most]  # fmt: skip
        if rows:
            newest = max(found.step for found in run.checkpoints)
            parts.append(f"<p>{_text(name)}, trained on up to the checkpoint of step {newest:,}:</p>")
            parts.append(_table(("source", "rows", "tokens", "share"), rows, numeric=(1, 2, 3)))
        planned = next((event.text for event in reversed(run.events) if event.kind == "data"), "")
        if planned:
            parts.append(f"<p>{_text(name)}, the whole run, as its last start saw it:</p>")
            parts.append(f"<pre>{_text(planned[: _most_text(runs)])}</pre>")
    return f'<h2>Data</h2><div class="card scroll">{"".join(parts) or "<p>Nothing is known of it.</p>"}</div>'


def _samples(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    parts, most = [], max(4, _MOST_SAMPLES // len(runs))
    for run, name in zip(runs, names, strict=True):
        rows = [
            [str(sample.get(key, "-"))[: _most_text(runs)] for key in ("step", "prompt", "completion")]
            for sample in reversed(run.samples[-most:])
        ]
        if rows:
            left_out = len(run.samples) - len(rows)
            more = f", without {left_out:,} older ones" if left_out else ""
            table = _table(("step", "prompt", "completion"), rows, numeric=(0,), kind="text")
            parts.append(f"<p>{_text(name)}{more}</p>{table}")
    return f'<h2>Samples</h2><div class="card scroll">{"".join(parts)}</div>' if parts else ""


def _differences(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    """What runs set differently; of one run, what is not the default."""
    if len(runs) == 1:
        defaults = flat(JobConfig().model_dump(mode="json"))
        config = runs[0].config
        rows = [[key, _value(config[key]), _value(defaults.get(key, "unknown key"))]
                for key in sorted(config) if config[key] != defaults.get(key)]  # fmt: skip
        return f"""<h2>What this run sets</h2><div class="card scroll">
{_table(("key", "value", "default"), rows, kind="value") if rows else "<p>Nothing: all keys have their defaults.</p>"}
</div>"""
    return f"""<h2>Differences of the configurations</h2><div class="card scroll">
{_compared([run.config for run in runs], names, only_differing=True)}</div>"""


def _environment(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    return f"""<h2>Environment and layout</h2><div class="card scroll">
{_compared([run.environment for run in runs], names, only_differing=False)}</div>"""


def _configurations(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    table = _compared([run.config for run in runs], names, only_differing=False)
    return f'<h2>Configuration</h2><div class="card scroll"><details><summary>All keys</summary>{table}</details></div>'


def _compared(values: Sequence[Mapping[str, Any]], names: Sequence[str], only_differing: bool) -> str:
    rows = []
    for key in sorted(set().union(*values))[:_MOST_KEYS]:
        row = [_value(value[key]) if key in value else "-" for value in values]
        if not only_differing or len(set(row)) > 1:
            rows.append([key, *row])
    return _table(("key", *names), rows, kind="value") if rows else "<p>None.</p>"


# -------------------------------------------------------------------------------------------------------------- HTML


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Iterable[int] = (),
    safe: Iterable[int] = (),
    kind: str = "",
) -> str:
    """A table. Cells are escaped, but for those of the columns `safe`, which are HTML."""
    numeric, safe = set(numeric), set(safe)
    css = ["number" if i in numeric else "key" if kind == "value" and i == 0 else kind for i in range(len(head))]
    top = "".join(f'<th class="{css[i] if i in numeric else ""}">{_text(cell)}</th>' for i, cell in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{css[i]}">{cell if i in safe else _text(cell)}</td>' for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _text(value: Any) -> str:
    """Text as HTML: nothing in it is markup, and no character changes the order or the look of others."""
    return html.escape(printable(str(value)))


def _value(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:_MOST_TEXT]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else form.format(value)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
