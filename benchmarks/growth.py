"""Measure how step time and memory grow with one size, and compare them with a model.

    python benchmarks/growth.py [--only NAME ...] [--repeats 3] [--out benchmarks/results]

The model is a formula with one or two coefficients, fitted to all rows except the last one.
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
    """Runs that differ only in x."""

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
        "each step has 8,192 tokens in sequences of n tokens. The attention time per token grows with n, but all other "
        "time and the memory are constant",
    ),
    "layers": Series(
        {n: replace(BASE, n_layers=n) for n in (2, 4, 8, 16)},
        LINEAR,
        LINEAR,
        "time and memory are a + b n for n layers",
    ),
    "vocabulary": Series(
        {n: replace(BASE, vocab_size=n, steps=7) for n in (8192, 16384, 65536, 131072)},
        LINEAR,
        LINEAR,
        "time and memory are a + b n for a vocabulary of n tokens, because the embedding and the output matrix grow with "
        "n",
    ),
    "accumulation": Series(
        {n: replace(BASE, rows=8 * n, accumulate=n) for n in (2, 4, 8, 16)},
        LINEAR,
        CONSTANT,
        "each step has n microbatches of 2,048 tokens. Time is a + b n, where a is the time of the optimizer step. "
        "Memory is constant",
    ),
    "ranks": Series(
        {n: replace(BASE, n_layers=6, ranks=n, threads=1, rows=8 * n) for n in (1, 2)},
        CONSTANT,
        CONSTANT,
        "each rank has 2,048 tokens and one thread, so time and memory would be constant with an ideal network. In "
        "fact, FSDP2 communicates over gloo on the same cores that compute. A plain PyTorch loop on two ranks takes as "
        "long",
    ),
}
INTRO = """\
The tables show how the step time and the memory of a run grow with one of its sizes, such as the sequence length. Below
each table, you find how they are expected to grow.

The model has dim 256 and 2 layers (6 layers in the table of ranks), and trains in fp32 on 2,048 tokens per step, unless
the text below a table states a different number. "ms/step" is the median step time, and "memory" the largest resident set
of a training process, from {repeats} run(s).

The columns "expected" show the expected growth, fitted to all rows except the last one. The last row therefore shows
whether the expectation is right. Ratios of more than 1.15 are **bold**.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=SERIES, help="may be given several times"
    )
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
                [run_titanlite(work, shards, Path(name)) for work in points.values()]
                for _ in range(options.repeats)
            ]
            rows = []
            for (x, work), measured in zip(points.items(), zip(*runs, strict=True), strict=True):
                rate = statistics.median(run.tokens_per_second for run in measured)
                peak = statistics.median(run.peak_rss for run in measured)
                rows.append(
                    {
                        "x": x,
                        "work": asdict(work),
                        "seconds": work.rows * work.seq_len / rate,
                        "bytes": peak,
                    }
                )
            write_part(options.out, "growth", title, {"repeats": options.repeats, "points": rows})
    print("\n".join(tables(read_parts(options.out, "growth"))))


def expected(law: Law, xs: list[int], measured: list[float]) -> list[float]:
    """Fit the formula to all points but the last, and return its predictions."""
    design, values = np.array([law(x) for x in xs]), np.array(measured)
    fitted = slice(0, max(1, len(xs) - 1))
    unknowns = np.linalg.lstsq(
        design[fitted] / values[fitted, None], np.ones(len(xs[fitted])), rcond=None
    )[0]
    return list(design @ unknowns)


def tables(parts: dict[str, Any]) -> list[str]:
    """Return Markdown tables of all series and their predictions."""
    lines = [INTRO.format(repeats=next(iter(parts.values()))["repeats"])]
    for title, part in parts.items():
        series, points = SERIES[title], part["points"]
        rows = [[f"{point['x']:,}"] for point in points]
        for key, law, unit, digits in (
            ("seconds", series.time, 1e-3, 1),
            ("bytes", series.memory, MIB, 0),
        ):
            values = [point[key] for point in points]
            for row, value, says in zip(
                rows, values, expected(law, [p["x"] for p in points], values), strict=True
            ):
                ratio = f"**{value / says:.2f}**" if value > 1.15 * says else f"{value / says:.2f}"
                row += [f"{value / unit:,.{digits}f}", f"{says / unit:,.{digits}f}", ratio]
        header = [title, "ms/step", "expected", "ratio", "memory, MiB", "expected", "ratio"]
        lines += [*table(header, rows), f"Expected growth: {series.words}.", ""]
    return lines


if __name__ == "__main__":
    main()
