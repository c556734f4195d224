"""`titanlite runs`: list the runs in a folder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from titanlite.commands.common import format_table, print_result
from titanlite.config.errors import one_line
from titanlite.config.mistakes import shorten
from titanlite.config.options import AsJson, Options, PositionalPath, parse_options
from titanlite.report.run_files import list_runs

_COLUMNS = ("run", "state", "step", "of", "loss", "tokens/s", "last update", "exit reason")
_NARROW_COLUMNS = ("run", "state", "step", "exit reason")
_MIN_WIDTH = 100  # terminal width in characters that fits all columns


class Runs(Options):
    """List the runs in a folder, latest first: state, step, loss, speed and age."""

    dir: PositionalPath = Path("outputs")
    """Folder to search, three levels deep."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite runs`: print a table of the runs in a folder.

    Raises:
        UserError: If the folder does not exist or contains no run.
    """
    options = parse_options(Runs, argv, "runs")
    is_narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < _MIN_WIDTH
    columns = _NARROW_COLUMNS if is_narrow else _COLUMNS

    runs = list_runs(options.dir)
    rows = []
    problems = []
    for run in runs:
        cells = _format_cells(run)
        rows.append([cells[column] for column in columns])
        for problem in run["problems"]:
            problems.append(f"{one_line(run['run'])}: {one_line(problem)}")

    text = "\n".join([format_table(columns, rows), *problems])
    print_result({"runs": runs}, text, options.as_json)


def _format_cells(run: Mapping[str, Any]) -> dict[str, str]:
    """Format the status of a run as table cells.

    Args:
        run: Status of the run, from `list_runs`.

    Returns:
        Text of each cell, by column title. Unknown values become "-".
    """

    def format_number(key: str, template: str) -> str:
        value = run[key]
        return "-" if value is None else template.format(value)

    age = "-"
    if run["age"] is not None:
        age = f"{timedelta(seconds=round(run['age']))} ago"
    return {
        "run": one_line(run["run"]),
        "state": run["state"],
        "step": format_number("step", "{:,}"),
        "of": format_number("total_steps", "{:,}"),
        "loss": format_number("loss", "{:.4f}"),
        "tokens/s": format_number("tps", "{:,.0f}"),
        "last update": age,
        "exit reason": shorten(one_line(run["exit_reason"])),
    }
