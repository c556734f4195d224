"""The files in the output folder of a run, what state they show it to be in, and the view of it on a terminal.

Invariant: a damaged line costs that line only, and is counted. A last line without its end is not damaged: its writer
has not finished it yet. A state says no more than the files do: a run whose end nobody wrote down is "crashed" only on
the machine where it ran, whose processes tell; from elsewhere it is "stale" after a time without a word. All text of a
view is printable.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from glob import glob
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import tomli

from titanlite.config.errors import UserError, one_line
from titanlite.config.files import check_regular, read_file
from titanlite.config.load import MOST_BYTES
from titanlite.runtime.logging import ENDS, EVENTS_FILE

if TYPE_CHECKING:
    from rich.text import Text

State = Literal["running", "finished", "stopped", "refused", "failed", "crashed", "stale"]

_LAST = 1 << 19  # bytes at the end of a file that a status reads: about 450 lines of metrics.jsonl
_LONGEST = 1 << 22  # bytes of a line
_SIGNS = ("metrics.jsonl", "config.toml", EVENTS_FILE)  # files by which a folder is known as a run's
_PATIENCE = 300.0  # seconds without a word after which a run may have ended
# What a calendar knows, what a run can have, and what a person waits for.
_LIMITS = {"time": (0, 2**37), "step": (0, 2**53), "time_left": (0, 1e9)}
_NUMBERS = {
    "tps": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "memory": "{:.2f} GiB",
    "step_time": "{:.3g} s a step",
    "grad_norm": "grad_norm {:.3f}",
    "lr": "lr {:.2e}",
}
_COLORS = {"stopped": "yellow", "stale": "yellow", **dict.fromkeys(("refused", "failed", "crashed"), "red")}


@dataclass
class RunStatus:
    """What is known of a run. Numbers are those of its last logged step, by their names in metrics.jsonl.

    Attributes:
        total_steps: None if it is not known.
        reason: Why it ended, or why its state is not known for sure.
        losses: Of the last logged steps.
        events: Time and text of the last ones.
        problems: What could not be read.
        last_word: Unix time of the last line that the run wrote.
    """

    title: str
    total_steps: int | None = None
    state: State = "running"
    reason: str = ""
    step: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    last_word: float | None = None

    def lines(self) -> list[str]:
        """The view: state, progress, course of the loss, speed, the last events, and what could not be read."""
        of = "" if self.total_steps is None else f"/{self.total_steps:,}"
        left = self.numbers.get("time_left") if self.state == "running" else None
        ends = "" if left is None else f"  {timedelta(seconds=round(left))} left"
        lines = [f"{self.state}  {self.title}", f"step {self.step:,}{of}{ends}"]
        if "loss" in self.numbers:
            lines.append(f"loss {self.numbers['loss']:.4f}  {sparkline(self.losses, 60)}")
        lines.append("  ".join(form.format(self.numbers[key]) for key, form in _NUMBERS.items() if key in self.numbers))
        events = [f"{time.strftime('%m-%d %H:%M:%S', time.localtime(at))} {text}" for at, text in self.events]
        return [one_line(line) for line in (*lines, self.reason, *events, *self.problems) if line]

    def text(self) -> Text:
        """The view for a terminal: no line is wider than it."""
        from rich.text import Text

        text = Text("\n".join(self.lines()), no_wrap=True, overflow="ellipsis")
        text.stylize(f"bold {_COLORS.get(self.state, 'green')}", 0, len(self.state))
        return text


def sparkline(values: Sequence[float], width: int) -> str:
    """The values in at most `width` characters, each for the mean of its share of them."""
    if not values:
        return ""
    columns = min(width, len(values))
    ends = [column * len(values) // columns for column in range(columns + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(ends)]
    low, span = min(means), max(means) - min(means)
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) / span * 7) if span else 3] for mean in means)


def json_lines(path: Path, problems: list[str], last: int = 1 << 62) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines, or in about so many bytes at its end. What cannot be read is added to
    `problems`. A file that is not there is empty."""
    damaged = 0
    if not os.path.lexists(path):
        return
    try:
        check_regular(path)
        with path.open("rb") as file:
            if (start := file.seek(0, os.SEEK_END) - last) > 0:  # go to the next whole line
                file.seek(start - 1)
                file.readline()
            else:
                file.seek(0)
            while (line := file.readline(_LONGEST)).endswith(b"\n") or len(line) == _LONGEST:
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    entry = None
                if isinstance(entry, dict):
                    yield entry
                else:
                    damaged += 1
    except (OSError, UserError) as error:
        problems.append(str(error))
    if damaged:
        problems.append(f"{path.name}: {damaged} line{'s' * (damaged > 1)} cannot be read")


def read_table(path: Path, parse: Callable[[str], Any], problems: list[str]) -> dict[str, Any]:
    """The content of a small file, of any version, so nothing in it is checked. What cannot be read is added to
    `problems`."""
    try:
        value = parse(read_file(path, MOST_BYTES).decode()) if path.exists() else {}
        return value if isinstance(value, dict) else {}
    except (UserError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}


def number(entry: dict[str, Any], key: str) -> float | None:
    """A finite number of a line that a sum can bear, or a time or step that there can be; None if it is none."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    least, most = _LIMITS.get(key, (-1e100, 1e100))
    return float(value) if least <= value < most else None


def read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    """The config.toml of a run, without what is no section."""
    config = read_table(folder / "config.toml", tomli.loads, problems)
    return {name: section for name, section in config.items() if isinstance(section, dict)}


def read_status(folder: Path) -> RunStatus:
    """How a run goes, from the last lines of its files.

    Raises:
        UserError: no run has written to the folder.
    """
    folder = Path(os.path.expanduser(folder))
    if not _is_run(folder):
        problem = "no run has written to this folder" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder}: {problem}. Name the output folder of a run; `titanlite runs FOLDER` lists them.")
    problems: list[str] = []
    config = read_config(folder, problems)
    name, description = folder.resolve().name, config.get("job", {}).get("description")
    status = RunStatus(f"{name}: {description}" if description else name, problems=problems)
    steps = config.get("training", {}).get("steps")
    status.total_steps = steps if type(steps) is int and 0 <= steps < 2**53 else None
    lines = [line for line in json_lines(folder / "metrics.jsonl", problems, _LAST) if number(line, "step") is not None]
    events = [event for event in json_lines(folder / EVENTS_FILE, problems, _LAST)
              if number(event, "time") is not None and isinstance(event.get("text"), str)]  # fmt: skip
    if lines:
        status.numbers = {key: value for key in lines[-1] if (value := number(lines[-1], key)) is not None}
    status.losses = [loss for line in lines if (loss := number(line, "loss")) is not None]
    told = [(event["time"], event["text"].partition("\n")[0]) for event in events if event.get("event") != "data"]
    status.events = told[-4:]
    starts = [place for place, event in enumerate(events) if event.get("event") == "start"]
    reached = [number(event, "step") or 0.0 for event in events[starts[-1] if starts else 0 :]]
    status.step = int(max(*reached, status.numbers.get("step", 0.0), 0.0))
    words = [number(entry, "time") for entry in (*lines[-1:], *events[-1:])]
    status.last_word = max((word for word in words if word is not None), default=None)
    status.state, status.reason = _state(status, events)
    return status


def _state(status: RunStatus, events: Sequence[dict[str, Any]]) -> tuple[State, str]:
    """The state and its reason, by the last event and the last start."""
    last: dict[str, Any] = events[-1] if events else {}
    kind, silent = last.get("event"), time.time() - (status.last_word or 0.0)
    # A start first says what data it has, and when all is built, where it runs.
    begun = [event for event in events if event.get("event") in ("start", "data", *ENDS)]
    if kind in ENDS:
        text = last["text"].strip()
        # The reason of a traceback is its last line.
        lines = text.split("\n")
        head = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
        reason = lines[-1] if text.startswith("Traceback") else head
        before = [event.get("event") for event in begun if event.get("event") not in ("data", "refusal")][-1:]
        if kind == "refusal" and before == ["finish"]:
            return "finished", f"a later start was refused: {reason}"
        answered: State = "failed" if begun[-2:-1] and begun[-2].get("event") == "start" else "refused"
        states: dict[Any, State] = {"finish": "finished", "stop": "stopped", "guard": "stopped", "refusal": answered}
        return states.get(kind, "crashed"), reason * (kind != "finish")
    if kind == "restart" and silent < _PATIENCE:
        return "running", "its launcher starts it again"
    start = begun[-1] if begun else {}
    if start.get("host") == socket.gethostname():
        if _is_alive(start.get("process"), start["time"]):
            return "running", ""
        return "crashed", "its process is gone, and has not written why: it was killed, or the machine went down"
    if silent < max(_PATIENCE, 10 * status.numbers.get("step_time", 0.0)):
        return "running", ""
    return "stale", f"nothing says that it ended, and nothing new came for {timedelta(seconds=round(silent))}"


def _is_alive(process: Any, since: float) -> bool:
    """Whether the process of this machine that had this number at a Unix time still runs."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (PermissionError, FileNotFoundError):  # another user's; no Linux
        return True
    except (OSError, TypeError, OverflowError):
        return False
    born = time.time() - uptime + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return stat[0] != "Z" and born < since + 1  # a later process can have got the number


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs in a folder and in the folders in it, three deep, the one that wrote last first.

    Returns:
        A JSON value for each: {"run": path, "state", "reason", "step", "total_steps", "loss", "tps", "last_word": Unix
        time, "age": seconds, "problems": [lines]}. What is not known is null.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    folder, rows, now = Path(os.path.expanduser(folder)), [], time.time()
    below = (name for depth in (1, 2, 3) for name in sorted(glob("*/" * depth, root_dir=folder)))
    paths = [path for path in (folder, *map(folder.joinpath, below)) if not path.name.startswith("superseded-")]
    runs = {path.resolve(): path for path in reversed(paths) if _is_run(path)}  # each once, by its shortest name
    if not runs:
        raise UserError(f"{folder}: there is no run in this folder. Name one with the output folders of runs.")
    for path in runs.values():
        status = read_status(path)
        names = ("state", "reason", "step", "total_steps", "last_word", "problems")
        found = {"run": str(path), **{name: getattr(status, name) for name in names}}
        found |= {name: status.numbers.get(name) for name in ("loss", "tps")}
        rows.append(found | {"age": None if status.last_word is None else max(0.0, now - status.last_word)})
    return sorted(rows, key=lambda row: -(row["last_word"] or 0.0))


def _is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in _SIGNS)
