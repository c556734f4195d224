"""All that a run has written, as one value.

Invariant: reading changes nothing and needs neither torch nor the machine where the run is. What cannot be read is
named in `problems`, and the rest is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from titanlite.checkpoint.find import checkpoints_at
from titanlite.checkpoint.manifest import read_manifest
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import read_file
from titanlite.config.load import MOST_BYTES
from titanlite.observe.live import RunStatus
from titanlite.observe.outputs import PROFILES
from titanlite.observe.step_profile import SUMMARY, StepProfile
from titanlite.report.curves import spikes
from titanlite.report.json_lines import Table, is_moment, moment, number, read_objects, read_table, step_of
from titanlite.report.run_files import RunFiles, read_config, read_json
from titanlite.runtime.events import ENDS, EVENTS_FILE

_MOST_PROFILES = 20
_PROFILE = TypeAdapter(StepProfile)


@dataclass(frozen=True)
class Happened:
    """An event.

    Attributes:
        step: Steps done by then: as the event says, or those that were logged by its time.
        undone: Whether a later start went back to an earlier step, so that what came after it was trained again.
    """

    time: float
    kind: str
    step: float
    text: str
    undone: bool


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is there.

    Attributes:
        bytes: Size of its files by its manifest; None if that is damaged.
        weights_only: Whether it is for use only, without what a resume needs.
    """

    path: Path
    step: int
    bytes: int | None
    weights_only: bool


@dataclass(frozen=True)
class Started:
    """A start of a run.

    Attributes:
        host: Name of the first machine.
        ranks: None if it is not known, as in version 0.1.
        code: The commit, and "changed" if the code differed from it; or a hash of the files.
        changed: What differs from the start before; None if that is not known.
    """

    time: float
    step: int
    host: str
    ranks: int | None
    code: str
    changed: tuple[str, ...] | None


@dataclass(frozen=True)
class Recorded:
    """A run. Tables have a row for each logged step, or validation.

    Attributes:
        sources: Name of each source of data -> rows trained on, by the newest checkpoint.
        config: config.toml, as "section.key" -> value.
        planned: What the last start was planned to take, by the names of metrics.jsonl; empty without a plan.
    """

    folder: Path
    status: RunStatus
    metrics: Table
    validations: Table
    events: tuple[Happened, ...]
    starts: tuple[Started, ...]
    planned: Mapping[str, float]
    samples: tuple[dict[str, Any], ...]
    profiles: tuple[StepProfile, ...]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    checkpoints: tuple[Checkpoint, ...]
    sources: Mapping[str, int]
    problems: tuple[str, ...]


def read_run(folder: Path) -> Recorded:
    """Read the output folder of a run. It can still be going on. Raises UserError: no run has written to it."""
    files, problems = RunFiles(folder), []
    folder, status = files.folder, files.read()
    metrics, validations = (read_table(folder / name) for name in ("metrics.jsonl", "validation.jsonl"))
    events = read_objects(folder / EVENTS_FILE, problems)
    samples = read_objects(folder / "samples.jsonl", problems)
    tables = read_config(folder, problems)
    environment = read_json(folder / "environment.json", problems)
    checkpoints, sources = _checkpoints(folder, problems)
    return Recorded(
        folder=folder,
        status=status,
        metrics=metrics,
        validations=validations,
        events=_events(events, metrics),
        starts=tuple(_starts(events)),
        planned=_planned(events),
        samples=tuple(samples),
        profiles=tuple(_profiles(folder / PROFILES, problems)),
        config=flat(tables),
        environment=flat(environment),
        checkpoints=tuple(checkpoints),
        sources=sources,
        problems=(*metrics.problems, *validations.problems, *problems),
    )


def _profiles(folder: Path, problems: list[str]) -> list[StepProfile]:
    """The newest profiles, the newest last."""
    found = []
    for path in sorted(folder.glob(f"*{SUMMARY}"))[-_MOST_PROFILES:]:
        try:
            profile = _PROFILE.validate_json(read_file(path, MOST_BYTES))
        except (UserError, ValueError) as error:
            problems.append(f"{path.name} cannot be read: {str(error).partition(chr(10))[0]}")
            continue
        if profile.seconds > 0:  # by which shares are computed
            found.append(profile)
    return found


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables in tables as one, with keys such as "section.key"."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return found


def _events(entries: list[dict[str, Any]], metrics: Table) -> tuple[Happened, ...]:
    """The events by time.

    Three kinds are found here: "skip", where a logged step counts more skipped records than the one before, "spike" of
    the loss, and "killed", where a start follows another without an end.
    """
    times, steps = metrics.columns.get("time", []), metrics.columns["step"]
    found: list[tuple[float, str, float, str]] = []
    done, ended = 0, True
    for entry in sorted(entries, key=lambda entry: moment(entry) or 0.0):
        at, step, kind = moment(entry), step_of(entry), str(entry.get("event"))
        if at is None:
            continue
        while done < len(times) and times[done] <= at:
            done += 1
        known = step if step is not None else steps[done - 1] if done else 0.0
        if kind == "start" and not ended:
            last = max(found[-1][0], times[done - 1] if done else 0.0)
            found.append((last, "killed", known, "The next start found no word of an end: the run was killed."))
        ended = kind in ENDS or (ended and kind != "start")
        found.append((at, kind, known, str(entry.get("text", ""))))
    before = 0.0
    for row, count in enumerate(metrics.columns.get("skipped_records", [])):
        if count > before and row < len(times):
            found.append((times[row], "skip", steps[row], f"{count - before:.0f} records skipped"))
        before = count
    for row, loss, mean in spikes(metrics) if times else ():
        found.append(
            (times[row], "spike", steps[row], f"loss {loss:.4f}, where the mean of the 100 before is {mean:.4f}")
        )
    happened, back_to = [], math.inf
    found = [event for event in found if is_moment(event[0])]  # metrics.jsonl can have others
    for at, kind, step, text in reversed(sorted(found, key=lambda event: event[0])):
        happened.append(Happened(at, kind, step, text, undone=step > back_to))
        if kind == "start":
            back_to = min(back_to, step)
    return tuple(reversed(happened))


def _starts(entries: list[dict[str, Any]]) -> Iterator[Started]:
    for entry in entries:
        if entry.get("event") != "start" or (at := moment(entry)) is None:
            continue
        record = flat(found) if isinstance(found := entry.get("record"), dict) else {}
        ranks, changed = record.get("machine.ranks"), entry.get("changed")
        code = [str(record[key]) for key in ("code.commit", "code.state") if key in record]
        yield Started(
            time=at,
            step=step_of(entry) or 0,
            host=str(entry.get("host", "-")),
            ranks=ranks if type(ranks) is int else None,
            code=" ".join(code or [str(record.get("code.files", "-"))]),
            changed=tuple(map(str, changed)) if isinstance(changed, list) else None,
        )


def _planned(entries: list[dict[str, Any]]) -> dict[str, float]:
    """Of the last start, if that had a plan, which is said before the start itself."""
    found: dict[str, float] = {}
    coming: dict[str, float] = {}
    for entry in entries:
        if entry.get("event") == "start":
            found, coming = coming, {}
        elif entry.get("event") in ENDS:  # of a start that did not come to train
            coming = {}
        elif isinstance(planned := entry.get("planned"), dict):
            coming = {key: value for key in planned if (value := number(planned, key)) is not None}
    return found


def _checkpoints(folder: Path, problems: list[str]) -> tuple[list[Checkpoint], dict[str, int]]:
    found: list[Checkpoint] = []
    sources: dict[str, int] = {}
    try:
        paths = checkpoints_at(folder)
    except CheckpointError:
        return found, sources  # it has saved none, or its folder was copied without them
    except UserError as error:
        problems.append(str(error))
        return found, sources
    for path in paths:
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            problems.append(f"{path.name}: {error}")
            found.append(Checkpoint(path, int(path.name.removeprefix("step-")), None, False))
            continue
        info = manifest["info"]
        size = sum(file["size"] for file in manifest["files"].values())
        found.append(Checkpoint(path, manifest["step"], size, info.get("weights_only", False)))
        data = info["train_state"].get("data", {})
        if data.get("version") == 2:
            names = [source["name"] for source in data["sources"]]
            sources = dict(zip(names, data["schedule"]["rows"], strict=True))
    return found, sources
