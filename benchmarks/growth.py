"""How the time and memory of a step grow with one size at a time, each beside its law.

    python benchmarks/growth.py [--only NAME ...] [--repeats 3] [--out benchmarks/results]

The law is a formula with one or two unknowns. They are fitted to all rows but the last, which the law then predicts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from runs import MIB, RESULTS, Work, prepare_tokens, read_parts, run_titanlite, table, write_part

BASE = Work(dim=256, n_layers=2, rows=8, steps=10)
Law = Callable[[float], tuple[float, ...]]  # x -> what the unknowns are multiplied by


@dataclass(frozen=True)
class Series:
    """Runs that differ in one thing, x."""

    points: dict[int, Work]
    time: Law
    memory: Law
    words: str


CONSTANT: Law = lambda x: (1.0,)  # noqa: E731
LINEAR: Law = lambda x: (1.0, x)  # noqa: E731
SERIES = {
    "sequence length": Series(
        {n: replace(BASE, seq_len=n, rows=8192 // n) for n in (512, 1024, 2048, 4096)},
        LINEAR,
        CONSTANT,
        "8,192 tokens a step in rows of n. Attention costs n for each token, and all else costs the same. Memory stays",
    ),
    "layers": Series({n: replace(BASE, n_layers=n) for n in (2, 4, 8, 16)}, LINEAR, LINEAR, "both a + b n"),
    "vocabulary": Series(
        {n: replace(BASE, vocab_size=n, steps=7) for n in (8192, 16384, 65536, 131072)},
        LINEAR,
        LINEAR,
        "both a + b n, because embedding and output matrix grow, and the logits of a chunk do not",
    ),
    "accumulation": Series(
        {n: replace(BASE, rows=8 * n, accumulate=n) for n in (2, 4, 8, 16)},
        LINEAR,
        CONSTANT,
        "n microbatches of 2,048 tokens. The time is a + b n, where a is that of the optimizer. Memory stays",
    ),
    "ranks": Series(
        {n: replace(BASE, n_layers=6, ranks=n, threads=1, rows=8 * n) for n in (1, 2)},
        CONSTANT,
        CONSTANT,
        "2,048 tokens and one thread for each rank. An ideal network costs no time, and memory of a rank stays. "
        "The time above that is FSDP2 over gloo, on the cores that compute. A plain loop on two ranks takes as long",
    ),
}
INTRO = """\
Each table changes one thing of a small model (dim 256, 2 layers; 6 layers for the ranks). It computes in fp32, with
2,048 tokens a step unless the table says otherwise. Time is the median step. Memory is the largest resident set of a
training process, of {repeats} run(s). Expected is what the law says. It is fitted to all rows except the last one,
which it then predicts. **Bold**: more than 15% above it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SERIES, help="may be given several times")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--points", type=int, help="measure only the first so many")
    parser.add_argument("--steps", type=int, help="instead of what each series has")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of growth.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        shards = prepare_tokens(Path(name))
        for title in options.only or SERIES:
            points = dict(list(SERIES[title].points.items())[: options.points])
            if options.steps:
                points = {x: replace(work, steps=options.steps) for x, work in points.items()}
            runs = [
                [run_titanlite(work, shards, Path(name)) for work in points.values()] for _ in range(options.repeats)
            ]
            rows = []
            for (x, work), measured in zip(points.items(), zip(*runs, strict=True), strict=True):
                rate = statistics.median(run.tokens_per_second for run in measured)
                peak = statistics.median(run.peak_rss for run in measured)
                rows.append({"x": x, "work": asdict(work), "seconds": work.rows * work.seq_len / rate, "bytes": peak})
            write_part(options.out, "growth", title, {"repeats": options.repeats, "points": rows})
    print("\n".join(tables(read_parts(options.out, "growth"))))


def expected(law: Law, xs: list[int], measured: list[float]) -> list[float]:
    """What the law says, its unknowns fitted by least squares of the relative errors of all points but the last."""
    design, values = np.array([law(x) for x in xs]), np.array(measured)
    fitted = slice(0, max(1, len(xs) - 1))
    unknowns = np.linalg.lstsq(design[fitted] / values[fitted, None], np.ones(len(xs[fitted])), rcond=None)[0]
    return list(design @ unknowns)


def tables(parts: dict[str, Any]) -> list[str]:
    """Markdown: each series beside its laws."""
    lines = [INTRO.format(repeats=next(iter(parts.values()))["repeats"])]
    for title, part in parts.items():
        series, points = SERIES[title], part["points"]
        rows = [[f"{point['x']:,}"] for point in points]
        for key, law, unit, digits in (("seconds", series.time, 1e-3, 1), ("bytes", series.memory, MIB, 0)):
            values = [point[key] for point in points]
            for row, value, says in zip(rows, values, expected(law, [p["x"] for p in points], values), strict=True):
                ratio = f"**{value / says:.2f}**" if value > 1.15 * says else f"{value / says:.2f}"
                row += [f"{value / unit:,.{digits}f}", f"{says / unit:,.{digits}f}", ratio]
        header = [title, "ms/step", "expected", "ratio", "memory, MiB", "expected", "ratio"]
        lines += [*table(header, rows), f"Law: {series.words}.", ""]
    return lines


if __name__ == "__main__":
    main()
