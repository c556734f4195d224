"""Measure how step time and memory grow with one size, and compare the growth with a formula.

    python benchmarks/growth.py [--only NAME ...] [--repeats 3] [--out benchmarks/results]

The formula has one or two coefficients, fitted to all sizes except the last one.
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
from runs import (
    MIB,
    RESULTS,
    Workload,
    prepare_tokens,
    read_parts,
    run_titanlite,
    table,
    write_part,
)

BASE = Workload(dim=256, n_layers=2, batch_size=8, steps=10)
# Maps a size x to the factors of the coefficients.
Formula = Callable[[float], tuple[float, ...]]


@dataclass(frozen=True)
class Series:
    """Runs that differ only in one size x.

    Attributes:
        points: x -> run.
        time: Formula of the step time.
        memory: Formula of the memory.
        description: Text below the table, in full sentences, which describes the expected growth.
    """

    points: dict[int, Workload]
    time: Formula
    memory: Formula
    description: str


def constant(x: float) -> tuple[float, ...]:
    """Return the factors of y = a."""
    return (1.0,)


def linear(x: float) -> tuple[float, ...]:
    """Return the factors of y = a + b x."""
    return (1.0, x)


SERIES = {
    "sequence length": Series(
        {n: replace(BASE, seq_len=n, batch_size=8192 // n) for n in (512, 1024, 2048, 4096)},
        linear,
        constant,
        """\
Each step processes 8,192 tokens, so we expect longer sequences to slow down only attention, whose
time per token grows with the sequence length n. Everything else, including the memory, should stay
constant.""",
    ),
    "layers": Series(
        {n: replace(BASE, n_layers=n) for n in (2, 4, 8, 16)},
        linear,
        linear,
        """\
We expect the step time and the memory to grow linearly with the number of layers n, as a + b n.""",
    ),
    "vocabulary": Series(
        {n: replace(BASE, vocab_size=n, steps=7) for n in (8192, 16384, 65536, 131072)},
        linear,
        linear,
        """\
The embedding and the output matrix grow with the size n of the vocabulary. We therefore expect the
step time and the memory to grow linearly with n: both should be a + b n, with different constants a
and b.""",
    ),
    "accumulation": Series(
        {n: replace(BASE, batch_size=8 * n, num_microbatches=n) for n in (2, 4, 8, 16)},
        linear,
        constant,
        """\
In this table, each step accumulates gradients over n microbatches of 2,048 tokens. We expect the
step time to be a + b n, where a is the time of the optimizer step, and b the time of a microbatch.
The memory should stay constant.""",
    ),
    "ranks": Series(
        {n: replace(BASE, n_layers=6, ranks=n, threads=1, batch_size=8 * n) for n in (1, 2)},
        constant,
        constant,
        """\
Each rank trains on 2,048 tokens with one thread, so with an ideal network, more ranks would not
change the step time or the memory per rank. In this benchmark, however, the ranks communicate over
gloo, which takes time on the cores that also compute. For comparison, a plain PyTorch training loop
with FSDP2 on two ranks takes as long as titanlite.""",
    ),
}
INTRO = """\
The tables show how the step time and the memory of a training run depend on its settings. Each
table varies one setting, for example the sequence length. The text below each table describes how
we expect time and memory to grow.

To measure how time and memory grow, we train a small fp32 model with dim 256. The model has 6
layers in the table that varies the number of ranks, and 2 layers in the others. A step processes
2,048 tokens, unless the text below a table gives another number. In the tables, "ms/step" is the
median step time, and "memory" is the peak memory of a training process (its largest resident set).

To check whether time and memory grow as expected, we compare each measurement with a formula, such
as a + b n for the step time of a model with n layers. We fit the constants a and b to all sizes
except the last one, and predict the last size with them. The columns "expected" show the values of
the formula. The ratio of the measured to the expected value is **bold** if it exceeds 1.15.
"""


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=SERIES, help="may be given several times"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--points", type=int, help="number of sizes to measure, from the first one")
    parser.add_argument("--steps", type=int, help="number of steps of each run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of growth.json")
    return parser.parse_args()


def main() -> None:
    """Measure the chosen series, store the results, and print the tables of all series."""
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        shards = prepare_tokens(folder)
        for title in options.only or SERIES:
            points = list(SERIES[title].points.items())[: options.points]
            if options.steps:
                points = [(x, replace(work, steps=options.steps)) for x, work in points]
            measured = measure_points(points, shards, folder, options.repeats)
            part = {"repeats": options.repeats, "points": measured}
            write_part(options.out, "growth", title, part)
    print("\n".join(tables(read_parts(options.out, "growth"))))


def measure_points(
    points: list[tuple[int, Workload]], shards: Path, folder: Path, num_repeats: int
) -> list[dict[str, Any]]:
    """Run all points in turn, several times, and return the median time and memory of each."""
    repeats = []
    for _ in range(num_repeats):
        repeats.append([run_titanlite(work, shards, folder) for _, work in points])

    results = []
    for index, (x, work) in enumerate(points):
        runs = [repeat[index] for repeat in repeats]
        tokens_per_second = statistics.median(run.tokens_per_second for run in runs)
        results.append(
            {
                "x": x,
                "work": asdict(work),
                "seconds": work.batch_size * work.seq_len / tokens_per_second,
                "bytes": statistics.median(run.peak_rss for run in runs),
            }
        )
    return results


def fit(formula: Formula, xs: list[int], measured: list[float]) -> list[float]:
    """Fit a formula to all points but the last, and return its values at all points.

    The fit minimizes the sum of the squared relative errors.
    """
    factors = np.array([formula(x) for x in xs])
    values = np.array(measured)
    num_fitted = max(1, len(xs) - 1)
    relative_factors = factors[:num_fitted] / values[:num_fitted, None]
    coefficients = np.linalg.lstsq(relative_factors, np.ones(num_fitted), rcond=None)[0]
    return list(factors @ coefficients)


def tables(parts: dict[str, Any]) -> list[str]:
    """Return Markdown tables of all series and their fitted values."""
    lines = [INTRO]
    for title, part in parts.items():
        series = SERIES[title]
        points = part["points"]
        xs = [point["x"] for point in points]
        seconds = [point["seconds"] for point in points]
        sizes = [point["bytes"] for point in points]
        fitted_seconds = fit(series.time, xs, seconds)
        fitted_sizes = fit(series.memory, xs, sizes)

        rows = [
            [
                f"{xs[i]:,}",
                f"{1e3 * seconds[i]:,.1f}",
                f"{1e3 * fitted_seconds[i]:,.1f}",
                format_ratio(seconds[i] / fitted_seconds[i]),
                f"{sizes[i] / MIB:,.0f}",
                f"{fitted_sizes[i] / MIB:,.0f}",
                format_ratio(sizes[i] / fitted_sizes[i]),
            ]
            for i in range(len(points))
        ]
        header = [title, "ms/step", "expected", "ratio", "memory, MiB", "expected", "ratio"]
        lines += [*table(header, rows), series.description, ""]
    return lines


def format_ratio(ratio: float) -> str:
    """Format the ratio of a measured to an expected value, bold if it exceeds 1.15."""
    return f"**{ratio:.2f}**" if ratio > 1.15 else f"{ratio:.2f}"


if __name__ == "__main__":
    main()
