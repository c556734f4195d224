"""`titanlite runs`: the runs in a folder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from titanlite.commands.common import print_result
from titanlite.config.errors import one_line
from titanlite.config.mistakes import short
from titanlite.config.options import AsJson, Options, PositionalPath, parse
from titanlite.report.run_files import list_runs

_HEAD = ("run", "state", "step", "of", "loss", "tokens/s", "last word", "why")


class Runs(Options):
    """List the runs in a folder and the folders in it, the latest first: state, step, loss, speed, age."""

    dir: PositionalPath = Path("outputs")
    """Where to look, three folders deep."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: there is no such folder, or no run in it."""
    options = parse(Runs, argv, "runs")
    rows = list_runs(options.dir)
    table: list[tuple[str, ...]] = [_HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if sys.stdout.isatty() and sum(widths[:-1]) + 2 * len(widths) > shutil.get_terminal_size().columns:
        table, widths = [(*cells[:3], cells[-1]) for cells in table], [*widths[:3], 0]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
    problems = [f"{one_line(row['run'])}: {one_line(problem)}" for row in rows for problem in row["problems"]]
    print_result({"runs": rows}, "\n".join([*lines, *problems]), options.as_json)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(key: str, form: str) -> str:
        return "-" if row[key] is None else form.format(row[key])

    age = "-" if row["age"] is None else f"{timedelta(seconds=round(row['age']))} ago"
    numbers = shown("total_steps", "{:,}"), shown("loss", "{:.4f}"), shown("tps", "{:,.0f}")
    return one_line(row["run"]), row["state"], f"{row['step']:,}", *numbers, age, short(one_line(row["reason"]))
