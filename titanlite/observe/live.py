"""How a run goes, at a glance: the view of `titanlite watch` and of training on a terminal.

Invariant: a view shows a `RunStatus` and never reads a tensor or a file. All text in it is printable. The view is drawn
at most once a second, because a step must not wait for it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from titanlite.config.errors import one_line
from titanlite.observe.logged_step import TIME_PARTS, LoggedStep, StepLine
from titanlite.runtime.logging import LOGGER_NAME, Event, is_live_terminal, terminal_console

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

State = Literal["running", "finished", "stopped", "crashed", "stale"]
COLORS: dict[State, str] = {
    "running": "green", "finished": "green", "stopped": "yellow", "crashed": "red", "stale": "yellow"
}  # fmt: skip
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.,-=+*#"
_PERIOD = 1.0  # seconds between two drawings


class Losses:
    """The course of the loss in at most 512 points, each the mean of equally many logged steps."""

    _MOST = 512

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []  # step, loss
        self._stride = 1
        self._open: list[tuple[float, float]] = []  # less than a stride

    def add(self, step: float, loss: float) -> None:
        """Values that are not finite, or beyond any loss, are left out, and so are steps that go back."""
        if not abs(loss) < 1e30 or ((self._open or self.points) and step <= (self._open or self.points)[-1][0]):
            return
        self._open.append((step, loss))
        if len(self._open) == self._stride:
            self.points.append(_mean(self._open))
            self._open = []
        if len(self.points) == self._MOST:
            self.points = [_mean(self.points[i : i + 2]) for i in range(0, self._MOST, 2)]
            self._stride *= 2


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(loss for _, loss in points) / len(points)


@dataclass
class RunStatus:
    """What is known of a run. Numbers are those of its last logged step, by their names in metrics.jsonl.

    Attributes:
        total_steps: None if it is not known.
        reason: Why it ended, or why its state is not known for sure.
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
    losses: Losses = field(default_factory=Losses)
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=4))
    problems: list[str] = field(default_factory=list)
    last_word: float | None = None

    def logged(self, numbers: Mapping[str, float | None]) -> None:
        """Take the numbers of a logged step."""
        self.numbers = {name: value for name, value in numbers.items() if value is not None}
        self.step = int(self.numbers.get("step", self.step))
        if "loss" in self.numbers:
            self.losses.add(self.step, self.numbers["loss"])
        if math.isfinite(seconds := self.numbers.get("step_time", math.nan)):
            self.step_times.append(seconds)

    def time_left(self) -> timedelta | None:
        """At the median pace of the last logged steps."""
        if self.total_steps is None or not self.step_times:
            return None
        seconds = median(self.step_times) * max(0, self.total_steps - self.step)
        return timedelta(seconds=round(seconds)) if seconds < 1e9 else None


def items(status: RunStatus) -> list[str]:
    """The numbers as short texts, the most important ones first."""
    formats = {
        "tps": "{:,.0f} tokens/s", "mfu": "mfu {:.1%}", "memory": "{:.2f} GiB", "step_time": "{:.3g} s a step",
        "grad_norm": "grad_norm {:.3f}", "lr": "lr {:.2e}",
    }  # fmt: skip
    shown = [text.format(status.numbers[name]) for name, text in formats.items() if name in status.numbers]
    return shown + time_by_part(status.numbers)


def time_by_part(numbers: Mapping[str, float]) -> list[str]:
    """The parts of a step that take 1% of its time or more, the longest first, such as "optimizer 12%"."""
    whole = sum(numbers.get(name, 0.0) for name in TIME_PARTS)
    shares = {name: numbers.get(name, 0.0) / whole for name in TIME_PARTS} if 0 < whole < math.inf else {}
    longest = sorted(shares.items(), key=lambda part: -part[1])
    return [f"{name.removesuffix('_time').replace('_', ' ')} {share:.0%}" for name, share in longest if share >= 0.01]


def plain_line(status: RunStatus) -> str:
    """One line for output that is no terminal."""
    done = f"step {status.step}" if status.total_steps is None else f"step {status.step}/{status.total_steps}"
    loss = [f"loss {status.numbers['loss']:.4f}"] if "loss" in status.numbers else []
    left = status.time_left() if status.state == "running" else None
    words = [status.state, done, *loss, *items(status)[:3], *([f"{left} left"] if left is not None else [])]
    reason = f"  ({one_line(status.reason)})" if status.reason else ""
    return "  ".join(words) + reason


def sparkline(points: Sequence[tuple[float, float]], width: int, ascii_only: bool = False) -> str:
    """Losses from the first to the last step, in at most `width` characters, from the lowest to the highest one."""
    if not points or width < 1:
        return ""
    first, last = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(min(width, len(points)))]
    for step, loss in points:
        place = (step - first) / (last - first) if last > first else 0.0
        columns[min(len(columns) - 1, int(place * len(columns)))].append(loss)
    means = [sum(column) / len(column) if column else None for column in columns]
    known = [mean for mean in means if mean is not None]
    low, span = min(known), max(known) - min(known)
    blocks, text = _ASCII_BLOCKS if ascii_only else _BLOCKS, ""
    for mean in means:  # a column without a point repeats the one before
        text += text[-1] if mean is None else blocks[round((mean - low) / span * 7) if span else 3]
    return text


def lines(status: RunStatus, width: int, ascii_only: bool = False) -> Iterator[Text]:
    """The view, as lines of at most `width` columns."""
    from rich.text import Text

    def line(*parts: str | tuple[str, str]) -> Text:
        text = Text.assemble(*parts, no_wrap=True)
        text.truncate(width, overflow="crop" if ascii_only else "ellipsis")
        return text

    ago = ""
    if status.state != "finished" and status.last_word is not None and (age := time.time() - status.last_word) > 60:
        ago = f", last word {timedelta(seconds=round(age))} ago"
    yield line((status.state, f"bold {COLORS[status.state]}"), f"{ago}  ", (one_line(status.title), "bold"))
    left = status.time_left() if status.state == "running" else None
    total = status.total_steps
    counted = f"step {status.step:,}" if total is None else f"step {status.step:,}/{total:,}"
    after = "" if total is None else f"{min(1.0, status.step / max(1, total)):.0%}"
    after += "" if left is None else f"  {left} left"
    room = min(40, width - len(counted) - len(after) - 4)
    if total is not None and room >= 4:
        full = round(room * min(1.0, status.step / max(1, total)))
        marks = ("#", "-") if ascii_only else ("━", "━")
        yield line(counted, "  ", (marks[0] * full, "green"), (marks[1] * (room - full), "bright_black"), "  ", after)
    else:
        yield line(f"{counted}  {after}")
    if "loss" in status.numbers:
        text = f"loss {status.numbers['loss']:.4f}"
        curve = sparkline(status.losses.points, min(60, width - len(text) - 2), ascii_only)
        yield line((text, "bold"), "  ", (curve, "cyan"))
    row = ""
    for item in items(status):
        if row and len(row) + len(item) + 2 > width:
            yield line(row)
            row = ""
        row += ("  " if row else "") + item
    if row:
        yield line(row)
    if status.reason and not any(text.startswith(status.reason) for _, text in list(status.events)):
        yield line((one_line(status.reason), COLORS[status.state]))
    for at, text in list(status.events):  # a copy, because a save in the background may add one
        clock = time.strftime("%H:%M:%S" if time.time() - at < 43_200 else "%m-%d %H:%M", time.localtime(at))
        yield line((f"{clock} ", "bright_black"), one_line(text.partition("\n")[0]))
    for problem in status.problems:
        yield line((one_line(problem), "red"))


@dataclass(frozen=True)
class View:
    """A status as something that rich prints, as wide as the terminal is."""

    status: RunStatus

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from lines(self.status, options.max_width, options.ascii_only)


class LiveView:
    """The view of this process's own run below its log lines; a context manager.

    It shows the numbers of logged steps itself, so their lines go to train.log only. It does nothing unless standard
    output is a terminal that can move its cursor, and `rank` is 0.

    Args:
        read: Called once, if there is a view, for what the run's earlier starts have measured.

    Attributes:
        finished: Whether the run has come to its end, for the last view.
    """

    def __init__(self, read: Callable[[], RunStatus], rank: int) -> None:
        self._live, self.finished = None, False
        if rank == 0 and is_live_terminal():
            from rich.live import Live

            self._status = read()
            self._status.state, self._status.reason, self._status.last_word = "running", "", None
            self._drawn = 0.0
            self._live = Live(View(self._status), console=terminal_console(), auto_refresh=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._handlers = [h for h in logging.getLogger(LOGGER_NAME).handlers if _writes_to_terminal(h)]
            for handler in self._handlers:
                handler.addFilter(self._takes)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._status.state = "crashed" if error is not None else "finished" if self.finished else "stopped"
            self._live.refresh()
            self._live.stop()
            for handler in self._handlers:
                handler.removeFilter(self._takes)

    def update(self, step: int, entry: LoggedStep | None = None) -> None:
        """Move to `step`, with what was measured if it is logged."""
        if self._live is None:
            return
        self._status.step = step
        if entry is not None:
            self._status.logged(asdict(entry))
        if (now := time.monotonic()) - self._drawn >= _PERIOD:
            self._drawn = now
            self._live.refresh()

    def _takes(self, record: logging.LogRecord) -> bool:
        """Whether the terminal gets a log line."""
        if isinstance(record.msg, Event):
            self._status.events.append((record.created, record.msg))
        return not isinstance(record.msg, StepLine)


def _writes_to_terminal(handler: logging.Handler) -> bool:
    from rich.logging import RichHandler

    return isinstance(handler, RichHandler)
