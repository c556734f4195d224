"""Functions that several commands use to print results and to start ranks.

Invariant: With --json, standard output contains one JSON object and nothing else, printed by the
first rank only.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def is_first_rank() -> bool:
    """Return whether this process is rank 0, the only one that prints results.

    Without a launcher such as torchrun, the process is rank 0.
    """
    return os.environ.get("RANK", "0") == "0"


def print_result(value: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Print the result of a command on rank 0, as text or as one line of JSON.

    Infinite and NaN values are printed as strings, because JSON has no such numbers.

    Args:
        value: The result, printed if `as_json` is set.
        text: The result as readable text, printed otherwise.
        as_json: Whether to print JSON.
    """
    if not is_first_rank():
        return
    if not as_json:
        print(text)
        return

    json_value = {}
    for key, item in value.items():
        is_special_number = isinstance(item, float) and not math.isfinite(item)
        json_value[key] = str(item) if is_special_number else item
    print(json.dumps(json_value, allow_nan=False))


def format_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows of cells as a plain text table with aligned columns.

    On a terminal, cells are cropped to its width.

    Args:
        names: Column names.
        rows: Cells of each row.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(*names, box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        table.add_row(*row)

    width = None if sys.stdout.isatty() else 10_000
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def run_on_ngpu_ranks(command: str, argv: Sequence[str]) -> None:
    """Run a command in NGPU processes, and exit with their exit code when they end.

    Do nothing if NGPU is 1 or unset, or if a launcher has already started this process as a rank.

    Args:
        command: Name of the command, such as "eval".
        argv: Arguments of the command.
    """
    is_rank = "WORLD_SIZE" in os.environ
    if os.environ.get("NGPU", "1") != "1" and not is_rank:
        from titanlite.launch.launcher import launch_command

        raise SystemExit(launch_command([command, *argv]))
