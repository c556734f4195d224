"""Train ten steps with every layout and on a single process, and compare the results.

    benchmarks/equivalence.sh [--write FILE]

Train all rows of tests/equivalence_rows.py, print the tables, and exit with 1 if a row misses its
tolerance. With --write, also replace the tables in FILE between their markers.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from equivalence_rows import (
    COMBINED,
    FEATURES,
    REJECTED,
    Difference,
    Row,
    all_rows,
    compare,
    run,
)


def markdown(cells: list[list[str]]) -> str:
    """Format a Markdown table with aligned columns. The first row is the header."""
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(padded) + " |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def layout_table(rows: Sequence[Row], differences: Mapping[str, Difference]) -> str:
    """Return the table of all rows and their differences from the reference."""
    cells = [["layout", "ranks", "loss", "gradient norm", "mean weight", "largest weight"]]
    for row in rows:
        if row.name in differences:
            numbers = [f"{number:.1e}" for number in differences[row.name].numbers]
            cells.append([row.name, str(row.ranks), *numbers])
    return markdown(cells)


def combination_table(differences: Mapping[str, Difference]) -> str:
    """Return the table of the loss difference for each layout and feature."""
    cells = [["", *FEATURES]]
    for layout in COMBINED:
        row = [layout]
        for feature in FEATURES:
            if (layout, feature) in REJECTED:
                row.append("rejected")
            else:
                row.append(f"{differences[f'{layout}, {feature}'].numbers.loss:.0e}")
        cells.append(row)
    return markdown(cells)


def replace_table(file: Path, name: str, table: str) -> None:
    """Replace the table between its two markers in a Markdown file."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"

    def insert_table(match: re.Match[str]) -> str:
        return match[1] + table + "\n" + match[2]

    file.write_text(re.sub(pattern, insert_table, file.read_text(), flags=re.S))


def main() -> None:
    """Compare all rows with their references."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, metavar="FILE")
    file = parser.parse_args().write

    rows = all_rows()
    results = run(all_rows())
    differences = {}
    misses = []
    for row in rows:
        if row.name == row.reference:
            continue
        difference = compare(results[row.name], results[row.reference])
        differences[row.name] = difference
        if not difference.within(row.tolerance):
            misses.append(f"{row.name}: {difference} exceeds {row.tolerance}")

    tables = {
        "equivalence": layout_table(rows, differences),
        "combinations": combination_table(differences),
    }
    for name, table in tables.items():
        print(table, end="\n\n")
        if file:
            replace_table(file, name, table)
    summary = f"{len(differences)} rows, {len(misses)} beyond their tolerance"
    print(summary, *misses, sep="\n")
    sys.exit(1 if misses else 0)


if __name__ == "__main__":
    main()
