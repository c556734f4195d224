"""The page docs/performance.md, made from the JSON files that the benchmarks leave in benchmarks/results/.

python benchmarks/report.py [--results benchmarks/results] [--out docs/performance.md]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cpu
import growth
import loss
from runs import RESULTS, ROOT, read_parts

PAGE = ROOT / "docs" / "performance.md"
INTRO = """\
# Performance

`python benchmarks/report.py` makes this page from the figures that the benchmarks leave in `benchmarks/results/`;
nothing in it is written by hand. To measure anew, on a machine that does nothing else, run the command above each
section; [benchmarks/README.md](../benchmarks/README.md) lists all benchmarks.
"""
SECTIONS = (
    ("A step beside a plain PyTorch loop", "benchmarks/cpu.sh", "cpu", cpu.tables),
    ("Output projection and loss", "python benchmarks/loss.py", "loss", loss.tables),
    ("How cost grows", "python benchmarks/growth.py", "growth", growth.tables),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    options.out.write_text(page(options.results))


def page(results: Path) -> str:
    """All of docs/performance.md."""
    lines = [INTRO]
    for title, command, benchmark, tables in SECTIONS:
        parts = read_parts(results, benchmark)
        lines += [f"## {title}", "", f"`{command}`", ""]
        if parts:
            places = dict.fromkeys(part["about"] for part in parts.values())
            lines += [*tables(parts), *(f"Measured {place}." for place in places), ""]
        else:
            lines += ["Not measured yet.", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
