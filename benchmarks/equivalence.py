"""Compare ten steps of every layout with one process: `benchmarks/equivalence.sh [--write FILE]`.

This trains all rows of tests/equivalence_rows.py, prints the tables, and exits with 1 if a row
misses its tolerance. With --write it also replaces the tables in FILE between their markers.
"""

from __future__ import annotations

import argparse
import re
import sys
from itertools import zip_longest
from pathlib import Path

from equivalence_rows import COMBINED, FEATURES, REFUSED, all_rows, compare, run


def markdown(cells: list[list[str]]) -> str:
    """Format a Markdown table. The first row is the header."""
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def main() -> None:
    """Compare all rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    rows = all_rows()
    results = run(all_rows())
    file = parser.parse_args().write
    table = [["layout", "ranks", "loss", "gradient norm", "mean weight", "largest weight"]]
    misses = []
    found = {}
    for row in rows:
        if row.name == row.reference:
            continue
        difference = compare(results[row.name], results[row.reference])
        found[row.name] = difference
        if not difference.within(row.tolerance):
            misses.append(f"{row.name}: {difference} beyond {row.tolerance}")
        table.append(
            [row.name, str(row.ranks), *(f"{number:.1e}" for number in difference.numbers)]
        )
    grid = [["", *FEATURES]]
    for name in COMBINED:
        cells = [
            f"{found[f'{name}, {f}'].numbers.loss:.0e}" if (name, f) not in REFUSED else "refused"
            for f in FEATURES
        ]
        grid.append([name, *cells])
    texts = {"equivalence": markdown(table), "combinations": markdown(grid)}
    for name, text in texts.items():
        print(text, end="\n\n")
        if file:
            pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
            page = re.sub(
                pattern,
                lambda match, text=text: match[1] + text + "\n" + match[2],
                file.read_text(),
                flags=re.S,
            )
            file.write_text(page)
    print(f"{len(table) - 1} rows, {len(misses)} beyond their tolerance", *misses, sep="\n")
    sys.exit(1 if misses else 0)


if __name__ == "__main__":
    main()
