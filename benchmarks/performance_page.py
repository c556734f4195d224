"""The page docs/performance.md, made from the JSON files that the benchmarks leave in benchmarks/results/.

python benchmarks/performance_page.py [--results benchmarks/results] [--out docs/performance.md]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import cpu
import growth
import loss
from runs import RESULTS, ROOT, read_parts, table

PAGE = ROOT / "docs" / "performance.md"
INTRO = """\
# Performance

`python benchmarks/performance_page.py` makes this page from the files that the benchmarks write into
`benchmarks/results/`. Nothing in it is written by hand. To measure again, run the command at the head of a section, on
a machine that does nothing else. [benchmarks/README.md](../benchmarks/README.md) lists all benchmarks.
"""


WORK = {
    "activation_checkpoint": "activation checkpointing",
    "dtype": "parameters, gradients and moments",
    "rows": "rows",
    "seq_len": "tokens of a row",
}
MEASURED = ("rates", "attention, ms")


def gpu_tables(cases: dict[str, Any]) -> list[str]:
    """The numbers of each case of benchmarks/gpu.sh. A profile also has the parts of a step and the kernels."""
    lines: list[str] = []
    for case, result in cases.items():
        rows = [[label, f"{result['work'][name]}"] for name, label in WORK.items() if "work" in result]
        values = [(name, value) for name, value in result.items() if isinstance(value, int | float)]
        values += [(f"{group}: {name}", value) for group in MEASURED for name, value in result.get(group, {}).items()]
        rows += [[name, value if isinstance(value, str) else f"{value:,.4g}"] for name, value in values]
        for part, times in result.get("parts", {}).items():
            rows += [[f"{part}: {name}", f"{value:,.3f}"] for name, value in times.items()]
        rows += [[f"kernel `{each['name']}`", f"{each['share']:.1%}"] for each in result.get("kernels", ())]
        lines += table([case, ""], rows)
        lines += [f"Not finished: {result['error'].strip().splitlines()[-1]}", ""] if "error" in result else []
    return lines


SECTIONS = (
    ("A step beside a plain PyTorch loop", "benchmarks/cpu.sh", "cpu", partial(cpu.tables, cpu.PLAIN)),
    (
        "A step beside torchtitan",
        "benchmarks/cpu.sh --beside torchtitan",
        "cpu_torchtitan",
        partial(cpu.tables, cpu.TORCHTITAN),
    ),
    ("Output projection and loss", "python benchmarks/loss.py", "loss", loss.tables),
    ("How cost grows", "python benchmarks/growth.py", "growth", growth.tables),
    ("On one GPU", "benchmarks/gpu.sh titanlite", "gpu_titanlite", gpu_tables),
    ("On one GPU beside torchtitan", "benchmarks/gpu.sh torchtitan", "gpu_torchtitan", gpu_tables),
    ("Where a step on a GPU spends its time", "benchmarks/gpu.sh profile", "gpu_profile", gpu_tables),
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
