"""`titanlite runs`: the runs in a folder."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import tyro

from titanlite.config.errors import UserError, one_line
from titanlite.config.options import OptionPath, Options, parse
from titanlite.observe.live import COLORS
from titanlite.report.run_files import RunFiles, is_run
from titanlite.runtime.logging import is_live_terminal, terminal_console

_DEPTH = 3  # of folders in folders that are searched
_HEAD = ("run", "state", "step", "of", "loss", "tokens/s", "last word")


class Runs(Options):
    """List the runs in a folder and the folders in it, the latest first: state, step, loss, speed, age."""

    dir: Annotated[OptionPath, tyro.conf.Positional] = Path("outputs")
    """Where to look, three folders deep."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: there is no such folder, or no run in it."""
    options = parse(Runs, argv, "runs")
    rows = list_runs(Path(os.path.expanduser(options.dir)))
    if options.as_json:
        print(json.dumps({"runs": rows}, indent=2))
    elif is_live_terminal():
        _print_table(rows)
    else:
        table = [_HEAD, *map(_cells, rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for cells in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    for row in rows if not options.as_json else ():
        for problem in row["problems"]:
            print(f"{one_line(row['run'])}: {one_line(problem)}")


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs in a folder, the one that wrote last first.

    Returns:
        A JSON value for each: {"run": path, "state", "reason", "step", "total_steps", "loss", "tps", "last_word": Unix
        time, "age": seconds, "problems": [lines]}. What is not known is null.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder. Name a folder with the output folders of runs.")
    rows, now = [], time.time()
    for path in _find(folder, _DEPTH):
        status = RunFiles(path).read(curve=False)
        loss, tps = (status.numbers.get(name) for name in ("loss", "tps"))
        rows.append({
            "run": str(path),
            "state": status.state,
            "reason": status.reason,
            "step": status.step,
            "total_steps": status.total_steps,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "tps": tps,
            "last_word": status.last_word,
            "age": None if status.last_word is None else max(0.0, now - status.last_word),
            "problems": status.problems,
        })  # fmt: skip
    if not rows:
        raise UserError(f"{folder}: no run here, nor in the folders in it. Name a folder with output folders of runs.")
    return sorted(rows, key=lambda row: -(row["last_word"] or 0.0))


def _find(folder: Path, depth: int, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The runs in a folder. A link to one of the folders `above` leads nowhere new."""
    real = folder.resolve()
    if real in above:
        return
    if is_run(folder):
        yield folder
    elif depth:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith(".") and os.access(path, os.R_OK | os.X_OK):
                yield from _find(path, depth - 1, (*above, real))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(value: Any, form: str) -> str:
        return "-" if value is None else form.format(value)

    age = None if row["age"] is None else timedelta(seconds=round(row["age"]))
    ago = shown(age, "{} ago")
    numbers = shown(row["total_steps"], "{:,}"), shown(row["loss"], "{:.4f}"), shown(row["tps"], "{:,.0f}")
    return one_line(row["run"]), row["state"], f"{row['step']:,}", *numbers, ago


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _HEAD:
        numeric = name not in ("run", "state")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in rows:
        cells = [Text(cell) for cell in _cells(row)]
        cells[1].stylize(COLORS[row["state"]])
        table.add_row(*cells)
    terminal_console().print(table)
