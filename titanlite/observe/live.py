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
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from titanlite.config.errors import one_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

State = Literal["running", "finished", "stopped", "crashed", "stale"]
_COLORS = {"stopped": "yellow", "stale": "yellow", "crashed": "red"}
_MOST_LOSSES = 512
_NUMBERS = {
    "tps": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "memory": "{:.2f} GiB",
    "step_time": "{:.3g} s a step",
    "grad_norm": "grad_norm {:.3f}",
    "lr": "lr {:.2e}",
}


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
    losses: list[tuple[int, float]] = field(default_factory=list)
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=4))
    problems: list[str] = field(default_factory=list)
    last_word: float | None = None

    def logged(self, numbers: Mapping[str, float | None]) -> None:
        """Take the numbers of a logged step. A loss that is none, or of a step that goes back, is left out."""
        self.numbers = {name: value for name, value in numbers.items() if value is not None}
        self.step = int(self.numbers.get("step", self.step))
        loss, last = self.numbers.get("loss", math.nan), self.losses[-1][0] if self.losses else -math.inf
        if abs(loss) < 1e30 and self.step > last and self.step - last >= (self.total_steps or 0) / _MOST_LOSSES:
            self.losses.append((self.step, loss))

    def progress(self) -> str:
        """The step, of how many, and the time left."""
        of = "" if self.total_steps is None else f"/{self.total_steps:,}"
        left = self.numbers.get("time_left", math.inf) if self.state == "running" else math.inf
        return f"step {self.step:,}{of}" + (f"  {timedelta(seconds=round(left))} left" if left < 1e9 else "")

    def items(self) -> list[str]:
        """The numbers as short texts, the most important ones first."""
        return [text.format(self.numbers[name]) for name, text in _NUMBERS.items() if name in self.numbers]


def plain_line(status: RunStatus) -> str:
    """One line for output that is no terminal."""
    loss = [f"loss {status.numbers['loss']:.4f}"] if "loss" in status.numbers else []
    reason = [f"({one_line(status.reason)})"] if status.reason else []
    return "  ".join([status.state, status.progress(), *loss, *status.items()[:3], *reason])


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """The values in at most `width` characters, each for the mean of its share of them."""
    if (columns := min(width, len(values))) < 1:
        return ""
    ends = [column * len(values) // columns for column in range(columns + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(ends)]
    low, span = min(means), max(means) - min(means)
    blocks = "_.,-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
    return "".join(blocks[round((mean - low) / span * 7) if span else 3] for mean in means)


@dataclass(frozen=True)
class View:
    """A status as something that rich prints, in lines that are as wide as the terminal at the most."""

    status: RunStatus

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.segment import Segment
        from rich.text import Text

        status, color = self.status, _COLORS.get(self.status.state, "green")

        def line(*parts: str | tuple[str, str]) -> Text:
            return Text.assemble(*parts, no_wrap=True, overflow="crop" if options.ascii_only else "ellipsis")

        silent = 0.0 if status.last_word is None or status.state == "finished" else time.time() - status.last_word
        ago = f", last word {timedelta(seconds=round(silent))} ago" if silent > 60 else ""
        yield line((status.state, f"bold {color}"), f"{ago}  ", (one_line(status.title), "bold"))
        yield line(status.progress())
        if status.total_steps is not None:
            yield ProgressBar(status.total_steps, status.step, width=min(60, options.max_width))
            yield Segment.line()
        if "loss" in status.numbers:
            text = f"loss {status.numbers['loss']:.4f}"
            losses, width = [loss for _, loss in status.losses], min(60, options.max_width - len(text) - 2)
            curve = sparkline(losses, width, options.ascii_only)
            yield line((text, "bold"), "  ", (curve, "cyan"))
        yield Text("  ".join(status.items()))
        events = list(status.events)  # a copy, because a save in the background may add one
        if status.reason and not any(text.startswith(status.reason) for _, text in events):
            yield line((one_line(status.reason), color))
        for at, text in events:
            clock = time.strftime("%m-%d %H:%M:%S", time.localtime(at))
            yield line((f"{clock} ", "bright_black"), one_line(text.partition("\n")[0]))
        for problem in status.problems:
            yield line((one_line(problem), "red"))
