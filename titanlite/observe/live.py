"""How a run goes, at a glance: the view of `titanlite watch` and of training on a terminal.

Invariant: a view shows a `RunStatus` and never reads a tensor or a file. All text in it is printable.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Literal

from titanlite.config.errors import one_line
from titanlite.observe.logged_step import TIME_PARTS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

State = Literal["running", "finished", "stopped", "crashed", "stale"]
COLORS: dict[State, str] = {
    "running": "green",
    "finished": "green",
    "stopped": "yellow",
    "crashed": "red",
    "stale": "yellow",
}
_MOST_LOSSES = 512


@dataclass
class RunStatus:
    """What is known of a run. Numbers are those of its last logged step, by their names in metrics.jsonl.

    Attributes:
        total_steps: None if it is not known.
        reason: Why it ended, or why its state is not known for sure.
        losses: Steps and losses, evenly thinned out in a long run.
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
    losses: list[tuple[float, float]] = field(default_factory=list)
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=4))
    problems: list[str] = field(default_factory=list)
    last_word: float | None = None
    _seen: int = 0
    _stride: int = 1

    def logged(self, numbers: Mapping[str, float | None]) -> None:
        """Take the numbers of a logged step. A loss that is none, or of a step that goes back, is left out."""
        self.numbers = {name: value for name, value in numbers.items() if value is not None}
        self.step = int(self.numbers.get("step", self.step))
        loss = self.numbers.get("loss", math.nan)
        if abs(loss) < 1e30 and (not self.losses or self.step > self.losses[-1][0]):
            if self._seen % self._stride == 0:
                self.losses.append((self.step, loss))
            self._seen += 1
            if len(self.losses) == _MOST_LOSSES:
                del self.losses[1::2]
                self._stride *= 2
        if math.isfinite(seconds := self.numbers.get("step_time", math.nan)):
            self.step_times.append(seconds)

    def time_left(self) -> timedelta | None:
        """At the median pace of the last logged steps."""
        if self.state != "running" or self.total_steps is None or not self.step_times:
            return None
        seconds = median(self.step_times) * max(0, self.total_steps - self.step)
        return timedelta(seconds=round(seconds)) if seconds < 1e9 else None

    def progress(self) -> str:
        """The step, and of how many."""
        return f"step {self.step:,}" + ("" if self.total_steps is None else f"/{self.total_steps:,}")

    def items(self) -> list[str]:
        """The numbers as short texts, the most important ones first. Of the parts of a step, those with 1% or more."""
        formats = {
            "tps": "{:,.0f} tokens/s",
            "mfu": "mfu {:.1%}",
            "memory": "{:.2f} GiB",
            "step_time": "{:.3g} s a step",
            "grad_norm": "grad_norm {:.3f}",
            "lr": "lr {:.2e}",
        }
        shown = [text.format(self.numbers[name]) for name, text in formats.items() if name in self.numbers]
        parts = {name: self.numbers.get(name, 0.0) for name in TIME_PARTS}
        whole = sum(parts.values())
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
            if 0 < whole < math.inf and seconds >= whole / 100:
                shown.append(f"{name.removesuffix('_time').replace('_', ' ')} {seconds / whole:.0%}")
        return shown


def plain_line(status: RunStatus) -> str:
    """One line for output that is no terminal."""
    loss = [f"loss {status.numbers['loss']:.4f}"] if "loss" in status.numbers else []
    left = [] if (left := status.time_left()) is None else [f"{left} left"]
    reason = f"  ({one_line(status.reason)})" if status.reason else ""
    return "  ".join([status.state, status.progress(), *loss, *status.items()[:3], *left]) + reason


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
    blocks, text = "_.,-=+*#" if ascii_only else "▁▂▃▄▅▆▇█", ""
    for mean in means:  # a column without a point repeats the one before
        text += text[-1] if mean is None else blocks[round((mean - low) / span * 7) if span else 3]
    return text


@dataclass(frozen=True)
class View:
    """A status as something that rich prints, in lines that are as wide as the terminal at the most."""

    status: RunStatus

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status, total = self.status, self.status.total_steps

        def line(*parts: str | tuple[str, str]) -> Text:
            return Text.assemble(*parts, no_wrap=True, overflow="crop" if options.ascii_only else "ellipsis")

        silent = 0.0 if status.last_word is None or status.state == "finished" else time.time() - status.last_word
        ago = f", last word {timedelta(seconds=round(silent))} ago" if silent > 60 else ""
        yield line((status.state, f"bold {COLORS[status.state]}"), f"{ago}  ", (one_line(status.title), "bold"))
        row: list[RenderableType] = [line(status.progress())]
        if total is not None:
            done = min(1.0, status.step / max(1, total))
            left = "" if (left := status.time_left()) is None else f"  {left} left"
            if options.max_width >= 60:
                row.append(ProgressBar(total=1, completed=done, width=min(40, options.max_width - 50)))
            row.append(line(f"{done:.0%}{left}"))
        table = Table.grid(padding=(0, 2))
        table.add_row(*row)
        yield table
        if "loss" in status.numbers:
            text = f"loss {status.numbers['loss']:.4f}"
            curve = sparkline(status.losses, min(60, options.max_width - len(text) - 2), options.ascii_only)
            yield line((text, "bold"), "  ", (curve, "cyan"))
        yield Text("  ".join(status.items()))
        events = list(status.events)  # a copy, because a save in the background may add one
        if status.reason and not any(text.startswith(status.reason) for _, text in events):
            yield line((one_line(status.reason), COLORS[status.state]))
        for at, text in events:
            clock = time.strftime("%H:%M:%S" if time.time() - at < 43_200 else "%m-%d %H:%M", time.localtime(at))
            yield line((f"{clock} ", "bright_black"), one_line(text.partition("\n")[0]))
        for problem in status.problems:
            yield line((one_line(problem), "red"))
