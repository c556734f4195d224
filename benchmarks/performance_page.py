"""Generate docs/internals/performance.md from the JSON files in benchmarks/results/.

python benchmarks/performance_page.py [--results FOLDER] [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cpu
import growth
import loss
from runs import RESULTS, ROOT, describe_measurement, read_parts, table

PAGE = ROOT / "docs" / "internals" / "performance.md"
INTRO = """\
# Performance results

This page shows how fast titanlite trains on CPUs and how much memory it needs, compared with a
plain PyTorch loop and with torchtitan. Each section names the command that produced its results. To
repeat a measurement, run this command on an idle machine, and then
`python benchmarks/performance_page.py`, which generates this page from `benchmarks/results/`.
[benchmarks/README.md](../../benchmarks/README.md) describes the benchmarks.

Some rows of the comparison with torchtitan are from 2026-11-22: those for 2 ranks, and "vocabulary
128,256, bf16 compiled". Their results may be outdated, because titanlite has changed since then.
For example, jobs on a single CPU rank now train [without
FSDP2](experiments.md#memory-and-speed-on-a-cpu).
"""

# Field of a GPU workload -> its label.
WORKLOAD_LABELS = {
    "activation_checkpoint": "activation checkpointing",
    "dtype": "parameters, gradients and moments",
    "local_batch_size": "sequences",
    "rows": "sequences",  # the name of this field in older results
    "seq_len": "tokens per sequence",
}
# Results that contain several measurements each.
GROUPS = ("rates", "attention, ms")


def gpu_tables(cases: dict[str, Any]) -> list[str]:
    """Format the results of benchmarks/gpu.sh, including profiles."""
    lines: list[str] = []
    for case, result in cases.items():
        lines += table([case, ""], gpu_rows(result))
        if "error" in result:
            last_error = result["error"].strip().splitlines()[-1]
            lines += [f"Not finished: {last_error}", ""]
    return lines


def gpu_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the table rows of one case: its workload, its measurements and its profile."""
    rows: list[list[str]] = []
    work = result.get("work", {})
    for name, label in WORKLOAD_LABELS.items():
        if name in work:
            rows.append([label, f"{work[name]}"])

    for name, value in result.items():
        if isinstance(value, int | float):
            rows.append([name, format_number(value)])
    for group in GROUPS:
        for name, value in result.get(group, {}).items():
            rows.append([f"{group}: {name}", format_number(value)])
    for part, times in result.get("parts", {}).items():
        for name, milliseconds in times.items():
            rows.append([f"{part}: {name}", f"{milliseconds:,.3f}"])
    for kernel in result.get("kernels", ()):
        rows.append([f"kernel `{kernel['name']}`", f"{kernel['share']:.1%}"])
    return rows


def format_number(value: float | str) -> str:
    """Format a measurement with four digits. An error message stays as it is."""
    return value if isinstance(value, str) else f"{value:,.4g}"


class PageSection(NamedTuple):
    """A section of the page.

    Attributes:
        title: Heading.
        command: Command that measures its results.
        benchmark: Name of the results file, without its suffix.
        tables: Formats the results as Markdown.
    """

    title: str
    command: str
    benchmark: str
    tables: Callable[[dict[str, Any]], list[str]]


SECTIONS = (
    PageSection(
        "Compared with a plain PyTorch loop",
        "benchmarks/cpu.sh",
        "cpu",
        partial(cpu.tables, cpu.PLAIN),
    ),
    PageSection(
        "Compared with torchtitan",
        "benchmarks/cpu.sh --beside torchtitan",
        "cpu_torchtitan",
        partial(cpu.tables, cpu.TORCHTITAN),
    ),
    PageSection("Output projection and loss", "python benchmarks/loss.py", "loss", loss.tables),
    PageSection(
        "Scaling of time and memory", "python benchmarks/growth.py", "growth", growth.tables
    ),
    PageSection("On one GPU", "benchmarks/gpu.sh titanlite", "gpu_titanlite", gpu_tables),
    PageSection(
        "On one GPU, compared with torchtitan",
        "benchmarks/gpu.sh torchtitan",
        "gpu_torchtitan",
        gpu_tables,
    ),
    PageSection(
        "Profile of a step on one GPU", "benchmarks/gpu.sh profile", "gpu_profile", gpu_tables
    ),
)


def main() -> None:
    """Generate the page."""
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
    for section in SECTIONS:
        lines += [f"## {section.title}", "", f"Run `{section.command}`.", ""]
        parts = read_parts(results, section.benchmark)
        if parts:
            lines += section.tables(parts)
            descriptions = dict.fromkeys(part["about"] for part in parts.values())
            for description in descriptions:
                lines += [describe_measurement(description), ""]
        else:
            lines += ["Not measured yet.", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
