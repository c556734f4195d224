"""Generate docs/internals/performance.md from the JSON files in benchmarks/results/.

python benchmarks/performance_page.py [--results FOLDER] [--out FILE]
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

PAGE = ROOT / "docs" / "internals" / "performance.md"
INTRO = """\
# Performance results

This page compares the speed and memory of titanlite on CPUs with a plain PyTorch loop and with torchtitan. To repeat a
measurement, run the command below its heading on an idle machine. Then run `python benchmarks/performance_page.py` to
generate this page again from the files in `benchmarks/results/`. [benchmarks/README.md](../../benchmarks/README.md)
describes all benchmarks.

## Changes since the measurements

The CPU results on this page were measured on 2026-11-21 and 2026-11-22, on one machine. On
2026-11-24, training on a single CPU rank became slower: by 3% to 6% in the fp32 benchmark, and by
about 21% in steps with very few tokens. The reason is that titanlite no longer avoids the copies of
weights that FSDP2 makes on a single rank; see
[Experiments](experiments.md#memory-and-speed-on-a-cpu).
"""


WORK = {
    "activation_checkpoint": "activation checkpointing",
    "dtype": "parameters, gradients and moments",
    "rows": "sequences",
    "seq_len": "tokens per sequence",
}
MEASURED = ("rates", "attention, ms")


def gpu_tables(cases: dict[str, Any]) -> list[str]:
    """Format the results of benchmarks/gpu.sh, including profiles."""
    lines: list[str] = []
    for case, result in cases.items():
        rows = [
            [label, f"{result['work'][name]}"] for name, label in WORK.items() if "work" in result
        ]
        values = [(name, value) for name, value in result.items() if isinstance(value, int | float)]
        values += [
            (f"{group}: {name}", value)
            for group in MEASURED
            for name, value in result.get(group, {}).items()
        ]
        rows += [
            [name, value if isinstance(value, str) else f"{value:,.4g}"] for name, value in values
        ]
        for part, times in result.get("parts", {}).items():
            rows += [[f"{part}: {name}", f"{value:,.3f}"] for name, value in times.items()]
        for kernel in result.get("kernels", ()):
            rows.append([f"kernel `{kernel['name']}`", f"{kernel['share']:.1%}"])
        lines += table([case, ""], rows)
        lines += (
            [f"Not finished: {result['error'].strip().splitlines()[-1]}", ""]
            if "error" in result
            else []
        )
    return lines


SECTIONS = (
    (
        "Compared with a plain PyTorch loop",
        "benchmarks/cpu.sh",
        "cpu",
        partial(cpu.tables, cpu.PLAIN),
    ),
    (
        "Compared with torchtitan",
        "benchmarks/cpu.sh --beside torchtitan",
        "cpu_torchtitan",
        partial(cpu.tables, cpu.TORCHTITAN),
    ),
    ("Output projection and loss", "python benchmarks/loss.py", "loss", loss.tables),
    ("Scaling of time and memory", "python benchmarks/growth.py", "growth", growth.tables),
    ("On one GPU", "benchmarks/gpu.sh titanlite", "gpu_titanlite", gpu_tables),
    (
        "On one GPU, compared with torchtitan",
        "benchmarks/gpu.sh torchtitan",
        "gpu_torchtitan",
        gpu_tables,
    ),
    ("Profile of a step on one GPU", "benchmarks/gpu.sh profile", "gpu_profile", gpu_tables),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    options.out.write_text(page(options.results))


def page(results: Path) -> str:
    """Return the text of docs/internals/performance.md."""
    lines = [INTRO]
    for title, command, benchmark, tables in SECTIONS:
        parts = read_parts(results, benchmark)
        lines += [f"## {title}", "", f"Run `{command}`.", ""]
        if parts:
            places = dict.fromkeys(part["about"] for part in parts.values())
            lines += [*tables(parts), *(f"Measured {place}." for place in places), ""]
        else:
            lines += ["Not measured yet.", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
