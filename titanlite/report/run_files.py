"""Read the files in the output folder of a run and determine its state.

Invariant: Damage is reported, and undamaged content is still shown. Damaged lines are skipped and
counted, and an unfinished last line is ignored. A run without a recorded end is "crashed" only if
its process no longer exists on this node. A run on another node becomes "stale" after some time
without an update.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import tomli

from titanlite.config.errors import UserError, format_count, one_line
from titanlite.config.files import check_regular, read_file
from titanlite.config.load import MAX_JOB_FILE_BYTES
from titanlite.observe.logged_step import rename_old_fields
from titanlite.runtime.logging import ENDS, EVENTS_FILE

if TYPE_CHECKING:
    from rich.text import Text

State = Literal["running", "finished", "stopped", "rejected", "failed", "crashed", "stale"]
"""State of a run. "stopped": a signal or a guard ended training. "rejected": an error that the user
can fix ended the run before it trained. "failed": such an error ended training. "crashed": the
process died, hung or raised an unexpected exception. "stale": there are no recent updates.
"""
StateAndReason = tuple[State, str]
"""State of a run and the reason for it, which is empty if the run is training or has finished
normally."""
JsonObject = dict[str, Any]
"""A JSON object, such as a line of a JSON Lines file, or a TOML table."""

TAIL_BYTES = 1 << 19  # About 450 lines of metrics.jsonl.
MAX_LINE_BYTES = 1 << 22
RUN_FILES = ("metrics.jsonl", "config.toml", EVENTS_FILE)
MAX_SHOWN_EVENTS = 4
STARTS = ("data", "start")
"""Event kinds logged by each start: "data" when it opens the data, "start" when it trains."""
USER_ERRORS = ("user error", "refusal")
"""Event kinds of errors that the user can fix. titanlite 0.3 logged "refusal"."""
ARCHIVES = ("archived-", "superseded-")  # titanlite 0.2 used the second prefix.
STALE_SECONDS = 300.0
MAX_STEP = 2**53
VALID_RANGES = {"time": (0, 2**37), "step": (0, MAX_STEP), "eta": (0, 1e9)}
METRIC_FORMATS = {
    "tps": "{:,.0f} tokens/s",
    "mfu": "mfu (causal) {:.1%}",
    "memory": "{:.2f} GiB",
    "step_time": "{:.3g} s/step",
    "grad_norm": "grad_norm {:.3f}",
    "lr": "lr {:.2e}",
}
STATE_COLORS = {"running": "green", "finished": "green", "stopped": "yellow", "stale": "yellow"}
"""Color of each state that is not an error. Errors are red."""


@dataclass
class RunStatus:
    """Status of a run, as shown by `titanlite watch` and `titanlite runs`.

    Attributes:
        title: Name of the output folder and, if available, the description of the job.
        total_steps: Number of steps in the job, or None if unknown.
        state: State of the run, such as "running".
        exit_reason: Why the run ended or why its state is uncertain. Empty if the run is training
            or has finished normally.
        step: Number of completed optimizer steps.
        numbers: Metrics of the last log step, by `LoggedStep` field.
        losses: Losses of the last log steps, oldest first.
        events: Unix time and text of the last events, oldest first.
        problems: Descriptions of damaged files.
        last_update: Unix time of the last line that the run wrote, or None if unknown.
    """

    title: str
    total_steps: int | None
    state: State
    exit_reason: str
    step: int
    numbers: dict[str, float]
    losses: list[float]
    events: list[tuple[float, str]]
    problems: list[str]
    last_update: float | None

    def to_lines(self) -> list[str]:
        """Format the status as lines of text, without control characters."""
        numbers = self.numbers
        lines = [f"{self.state}  {self.title}", self._format_progress()]
        if "loss" in numbers:
            curve = sparkline(self.losses, width=60)
            lines.append(f"loss {numbers['loss']:.4f}  {curve}")

        metrics = []
        for name, template in METRIC_FORMATS.items():
            if name in numbers:
                metrics.append(template.format(numbers[name]))
        lines.append("  ".join(metrics))
        lines.append(self.exit_reason)

        for unix_time, text in self.events:
            clock = time.strftime("%m-%d %H:%M:%S", time.localtime(unix_time))
            lines.append(f"{clock} {text}")
        lines += self.problems
        # Skip empty lines, such as the exit reason while the run is training.
        return [one_line(line) for line in lines if line]

    def _format_progress(self) -> str:
        """Format the progress of the run, for example as "step 300/1,000  0:10:00 left"."""
        progress = f"step {self.step:,}"
        if self.total_steps is not None:
            progress += f"/{self.total_steps:,}"
        if self.state == "running" and "eta" in self.numbers:
            progress += f"  {timedelta(seconds=round(self.numbers['eta']))} left"
        return progress

    def to_text(self) -> Text:
        """Format the status as colored text for a terminal.

        Long lines are truncated instead of wrapped.
        """
        from rich.text import Text

        text = Text("\n".join(self.to_lines()), no_wrap=True, overflow="ellipsis")
        text.stylize(f"bold {STATE_COLORS.get(self.state, 'red')}", 0, len(self.state))
        return text


@dataclass(frozen=True)
class _RunLog:
    """The last lines that a run wrote to metrics.jsonl and events.jsonl, oldest first.

    Attributes:
        metrics: Metrics of each log step, by `LoggedStep` field.
        events: Events, each with a valid time and text.
    """

    metrics: list[dict[str, float]]
    events: list[JsonObject]

    @property
    def numbers(self) -> dict[str, float]:
        """Metrics of the last log step, or {} before the first log step."""
        return self.metrics[-1] if self.metrics else {}

    @property
    def starts_and_ends(self) -> list[JsonObject]:
        """Events that record a start or an end of the run."""
        return [event for event in self.events if event.get("event") in (*STARTS, *ENDS)]

    @property
    def last_update(self) -> float | None:
        """Unix time of the last log step or event, or None if there is neither."""
        times = [line.get("time", 0.0) for line in (self.numbers, *self.events[-1:])]
        return float(max(times)) or None


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as a line of block characters.

    For example, [0, 1, 2, 3] is drawn as "▁▃▆█", or as "▁█" if `width` is 2.

    Args:
        values: Values from left to right.
        width: Maximum number of characters. If there are more values, neighbors are averaged.
    """
    if not values:
        return ""

    means = _average_neighbors(values, min(width, len(values)))
    low = min(means)
    span = max(means) - low
    if span == 0:
        return "▄" * len(means)
    blocks = "▁▂▃▄▅▆▇█"  # the lowest value is drawn as block 0, and the highest as block 7
    heights = [round((mean - low) / span * 7) for mean in means]
    return "".join(blocks[height] for height in heights)


def _average_neighbors(values: Sequence[float], num_means: int) -> list[float]:
    """Divide values into `num_means` groups of adjacent values and return the mean of each group.

    The groups have about the same size.
    """
    ends = [i * len(values) // num_means for i in range(num_means + 1)]
    return [fmean(values[start:end]) for start, end in pairwise(ends)]


def read_json_lines(
    path: Path, problems: list[str], tail: int | None = None
) -> Iterator[JsonObject]:
    """Yield the objects in a JSON Lines file. A missing file yields nothing.

    Ignore an unfinished last line, because the run may still be writing it. Skip and count damaged
    lines.

    Args:
        path: Path of the file.
        problems: List to which a description of any damage is appended after the last line.
        tail: If given, read only about the last `tail` bytes.
    """
    if not os.path.lexists(path):
        return
    num_damaged = 0
    try:
        for line in _read_finished_lines(path, tail):
            entry = _parse_object(line)
            if entry is None:
                num_damaged += 1
            else:
                yield entry
    except (OSError, UserError) as error:
        problems.append(str(error))
    if num_damaged:
        problems.append(f"{path.name}: {format_count(num_damaged, 'damaged line')} skipped")


def _read_finished_lines(path: Path, tail: int | None) -> Iterator[bytes]:
    """Yield the lines of a file, except for a last line that does not end with a newline yet.

    To limit memory, yield lines longer than 4 MiB in parts, even if they are unfinished.

    Args:
        path: Path of the file.
        tail: If given, yield only lines that start in the last `tail` bytes.

    Raises:
        OSError: If the file cannot be read.
        UserError: If the path is not a regular file.
    """
    check_regular(path)  # Reading from a pipe could block forever.
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if tail is not None and size > tail:
            # Skip to the next start of a line. If a line starts exactly at the tail, keep it.
            file.seek(size - tail - 1)
            file.readline()

        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                return  # The run may still be writing this line.
            yield line


def _parse_object(line: bytes) -> JsonObject | None:
    """Parse a line that contains a JSON object. Return None if the line is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_metrics(
    folder: Path, problems: list[str], tail: int | None = None
) -> Iterator[JsonObject]:
    """Yield the log steps in metrics.jsonl, using the current field names for older files.

    Args:
        folder: Output folder of the run.
        problems: List to which a description of any damage is appended.
        tail: If given, read only about the last `tail` bytes.
    """
    for entry in read_json_lines(folder / "metrics.jsonl", problems, tail):
        if get_number(entry, "step") is not None:
            yield rename_old_fields(entry)


def read_table(path: Path, parse: Callable[[str], Any], problems: list[str]) -> JsonObject:
    """Parse a small file, such as config.toml or environment.json, into a dictionary.

    Args:
        path: Path of the file.
        parse: Parses the text of the file.
        problems: List to which a description of any damage is appended.

    Returns:
        The content, or an empty dictionary if the file is missing or damaged.
    """
    if not path.exists():
        return {}
    try:
        content = parse(read_file(path, MAX_JOB_FILE_BYTES).decode())
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except (UserError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    return content


def read_config(folder: Path, problems: list[str]) -> dict[str, JsonObject]:
    """Read the sections in the config.toml of a run without validating them.

    Args:
        folder: Output folder of the run.
        problems: List to which a description of any damage is appended.
    """
    config = read_table(folder / "config.toml", tomli.loads, problems)
    return {name: section for name, section in config.items() if isinstance(section, dict)}


def get_number(entry: JsonObject, key: str) -> float | None:
    """Return the number `entry[key]`, or None if it is missing, not a number, or out of range."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low, high = VALID_RANGES.get(key, (-1e100, 1e100))
    return float(value) if low <= value < high else None


def get_numbers(entry: JsonObject) -> dict[str, float]:
    """Return only the entries of a JSON object whose values are numbers in a valid range."""
    numbers = {key: get_number(entry, key) for key in entry}
    return {key: number for key, number in numbers.items() if number is not None}


def read_status(folder: Path) -> RunStatus:
    """Read the status of a run from the last lines of the files in its output folder.

    Raises:
        UserError: If the folder is not the output folder of a run.
    """
    if not _is_run(folder):
        problem = "is not the output folder of a run" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder} {problem}. List the runs with `titanlite runs FOLDER`.")

    problems: list[str] = []
    config = read_config(folder, problems)
    metrics = [get_numbers(entry) for entry in read_metrics(folder, problems, TAIL_BYTES)]
    log = _RunLog(metrics, _read_last_events(folder, problems))

    state, exit_reason = _find_state(log)
    return RunStatus(
        title=_make_title(folder, config),
        total_steps=_get_total_steps(config),
        state=state,
        exit_reason=exit_reason,
        step=_find_step(log),
        numbers=_drop_outdated_eta(log),
        losses=[entry["loss"] for entry in metrics if "loss" in entry],
        events=_list_shown_events(log.events),
        problems=problems,
        last_update=log.last_update,
    )


def _drop_outdated_eta(log: _RunLog) -> dict[str, float]:
    """Return the metrics of the last log step, except an ETA that is out of date.

    The ETA is out of date if the run started or ended after this log step.
    """
    numbers = log.numbers
    starts_and_ends = log.starts_and_ends
    if starts_and_ends and starts_and_ends[-1]["time"] > numbers.get("time", 0.0):
        return {name: number for name, number in numbers.items() if name != "eta"}
    return numbers


def _make_title(folder: Path, config: dict[str, JsonObject]) -> str:
    """Return the name of the output folder and, if available, the description of the job."""
    description = config.get("job", {}).get("description")
    name = folder.resolve().name
    return f"{name}: {description}" if description else name


def _get_total_steps(config: dict[str, JsonObject]) -> int | None:
    """Return the number of steps in the job, or None if it is missing or invalid."""
    total_steps = config.get("training", {}).get("steps")
    if type(total_steps) is int and 0 <= total_steps < MAX_STEP:
        return total_steps
    return None


def _list_shown_events(events: Sequence[JsonObject]) -> list[tuple[float, str]]:
    """Return the Unix time and the first line of the last few events, oldest first."""
    # Skip events that list the data sources, which each start logs.
    shown = [event for event in events if event.get("event") != "data"]
    return [
        (event["time"], event["text"].partition("\n")[0]) for event in shown[-MAX_SHOWN_EVENTS:]
    ]


def _read_last_events(folder: Path, problems: list[str]) -> list[JsonObject]:
    """Read the last events of a run, skipping events without a valid time and text.

    Args:
        folder: Output folder of the run.
        problems: List to which a description of any damage is appended.
    """
    return [
        event
        for event in read_json_lines(folder / EVENTS_FILE, problems, TAIL_BYTES)
        if get_number(event, "time") is not None and isinstance(event.get("text"), str)
    ]


def _find_step(log: _RunLog) -> int:
    """Return the number of optimizer steps that a run has completed, according to its logs.

    This is the highest step since the last start, in metrics or events. Events are included because
    an event, such as a save, can be newer than the last log step.
    """
    step = 0.0
    for event in log.events:
        event_step = get_number(event, "step") or 0.0
        if event.get("event") == "start":
            step = event_step
        step = max(step, event_step)
    return int(max(step, log.numbers.get("step", 0.0)))


def _find_state(log: _RunLog) -> StateAndReason:
    """Return the state of a run, such as "running" or "failed", and the reason for it."""
    last_kind = log.events[-1].get("event") if log.events else None
    if last_kind in ENDS:
        return _describe_end(log.starts_and_ends)

    last_update = log.last_update
    age = None if last_update is None else time.time() - last_update  # seconds
    if last_kind == "restart" and age is not None and age < STALE_SECONDS:
        # New processes are starting, so do not check the old one.
        return "running", "its launcher is restarting it"

    # The run has not ended, so the last of these events, if any, is a start.
    last_start = log.starts_and_ends[-1] if log.starts_and_ends else {}
    if last_start.get("host") == socket.gethostname():
        return _judge_by_process(last_start)
    return _judge_by_age(age, log.numbers.get("step_time", 0.0))


def _judge_by_process(start: JsonObject) -> StateAndReason:
    """Classify a run on this node as "running" if its process still exists, or else "crashed".

    Args:
        start: Event of the last start of the run, which contains the process ID.
    """
    if _is_alive(start.get("process"), since=start["time"]):
        return "running", ""
    return "crashed", "its process was killed, or the node went down"


def _judge_by_age(age: float | None, step_time: float) -> StateAndReason:
    """Classify a run as "running" or "stale" by the time since its last update, with a reason.

    Call this if the process of the run cannot be checked, for example because it is on another
    node. A run is stale after five minutes without an update, or after ten steps if they take
    longer.

    Args:
        age: Seconds since the last update, or None if unknown.
        step_time: Seconds per step, or 0 if unknown.
    """
    if age is None:
        return "stale", "no end was recorded, and the time of the last update is unknown"
    if age < max(STALE_SECONDS, 10 * step_time):
        return "running", ""
    rounded_age = timedelta(seconds=round(age))
    return "stale", f"no end was recorded, and the last update was {rounded_age} ago"


def _describe_end(starts_and_ends: Sequence[JsonObject]) -> StateAndReason:
    """Return the final state of a run, such as "finished" or "failed", and why it ended.

    Args:
        starts_and_ends: Events that record a start or an end of the run, oldest first. The last
            event must be an end.
    """
    *earlier_events, end = starts_and_ends
    reason = _summarize_text(end["text"])
    if end["event"] == "finish":
        # The text is "Finished after step 90", or "Finished after step 90: <reason>" if a hook
        # finished the run early.
        return "finished", reason.partition(": ")[2]
    if end["event"] in ("stop", "guard"):  # a signal, or the guards against bad steps
        return "stopped", reason
    if end["event"] in USER_ERRORS:
        return _describe_user_error(reason, earlier_events)
    return "crashed", reason


def _describe_user_error(reason: str, earlier_events: Sequence[JsonObject]) -> StateAndReason:
    """Return the state of a run that ended with an error that the user can fix, and the reason.

    The state is "failed" if the error ended training. Otherwise, the error rejected a new start of
    the run: the state is then "finished" if the run had finished before, or else "rejected".

    Args:
        reason: The error message.
        earlier_events: All start and end events before the error, oldest first.
    """
    earlier_kinds = [event["event"] for event in earlier_events]
    if earlier_kinds and earlier_kinds[-1] == "start":  # the run was training
        return "failed", reason

    # To find out whether the run had finished, skip the events that rejected starts log.
    skipped_kinds = ("data", *USER_ERRORS)
    kinds = [kind for kind in earlier_kinds if kind not in skipped_kinds]
    if kinds and kinds[-1] == "finish":
        return "finished", f"a later start was rejected: {reason}"
    return "rejected", reason


def _summarize_text(text: str) -> str:
    """Summarize the text of an event: the error after a traceback, or otherwise the first line.

    If the first line ends with a colon, include the second line.
    """
    lines = text.strip().split("\n")
    if lines[0].startswith("Traceback"):
        # Chained errors have several tracebacks. Notes, such as the command to resume, may follow.
        start = max(i for i, line in enumerate(lines) if line.startswith("Traceback"))
        after_frames = (line for line in lines[start + 1 :] if not line.startswith(" "))
        return next(after_frames, lines[-1])
    if lines[0].endswith(":"):
        return " ".join(line.strip() for line in lines[:2])
    return lines[0]


def _is_alive(pid: Any, since: float) -> bool:
    """Return whether the process that had ID `pid` at time `since` is still running on this node.

    On Linux, return False if a newer process has reused the ID. Elsewhere, this is not detected.

    Args:
        pid: Process ID from a log file. If the file is damaged, this can be any value.
        since: Unix time at which the process was running.
    """
    if not isinstance(pid, int) or pid <= 0:  # The file is damaged.
        return False
    try:
        process_state, start_time = _read_process(pid)
    except OSError:  # The process does not exist, or this is not Linux.
        return _exists(pid)

    is_zombie = process_state == "Z"  # It ended, but its parent has not read its exit code.
    # Allow a tolerance of one second, because the start time is not exact.
    return not is_zombie and start_time < since + 1


def _exists(pid: int) -> bool:
    """Return whether a process of any user exists on this node."""
    try:
        os.kill(pid, 0)  # Signal 0 only checks whether the process exists.
    except PermissionError:  # It belongs to another user.
        return True
    except (OSError, OverflowError):  # There is no such process, or `pid` is too large.
        return False
    return True


def _read_process(pid: int) -> tuple[str, float]:
    """Read the state of a process, such as "R" (running), and the Unix time when it started.

    Raises:
        OSError: If the process does not exist, or if this is not Linux.
    """
    # The fields follow the program name in parentheses; see proc(5). Linux may cut the name within
    # a character.
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    fields = stat.rpartition(")")[2].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])  # seconds since the boot
    boot_time = time.time() - uptime
    seconds_after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0], boot_time + seconds_after_boot


def list_runs(folder: Path) -> list[JsonObject]:
    """Return the status of all runs in a folder, most recently updated first.

    Search the folder and up to three levels of subfolders.

    Returns:
        For each run, a dictionary with the keys "run" (path), "state", "exit_reason", "step",
        "total_steps", "loss", "tps" (tokens per second), "last_update" (Unix time), "age" (seconds
        since the last update) and "problems". Unknown values are None.

    Raises:
        UserError: If there is no run in the folder.
    """
    paths = _find_runs(folder)
    if not paths:
        raise UserError(f"{folder} contains no runs. Pass a folder with output folders of runs.")

    now = time.time()
    rows = []
    for path in paths:
        status = read_status(path)
        last_update = status.last_update
        rows.append(
            {
                "run": str(path),
                "state": status.state,
                "exit_reason": status.exit_reason,
                "step": status.step,
                "total_steps": status.total_steps,
                "loss": status.numbers.get("loss"),
                "tps": status.numbers.get("tps"),
                "last_update": last_update,
                "age": None if last_update is None else max(0.0, now - last_update),
                "problems": status.problems,
            }
        )
    return sorted(rows, key=lambda row: row["last_update"] or 0.0, reverse=True)


def _find_runs(folder: Path) -> list[Path]:
    """Find the output folders of runs in `folder` and up to three levels below it.

    Return each folder only once, even if several links point to it. Skip archived runs.
    """
    candidates = [folder]
    for pattern in ("*", "*/*", "*/*/*"):
        candidates += sorted(folder.glob(pattern))
    paths: dict[Path, Path] = {}  # resolved path -> shortest path
    for path in candidates:
        if _is_run(path) and not path.name.startswith(ARCHIVES):
            paths.setdefault(path.resolve(), path)
    return list(paths.values())


def _is_run(folder: Path) -> bool:
    """Return whether a folder has a file that only runs write, such as metrics.jsonl."""
    return any(os.path.isfile(folder / name) for name in RUN_FILES)
