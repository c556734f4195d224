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
        "each step trains on 8,192 tokens, in sequences of n tokens. Longer sequences take more time only in attention, "
        "whose time per token grows with n. All other time and the memory stay constant",
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
        "each step accumulates gradients over n microbatches of 2,048 tokens, so its time is a + b n. Here, a is the time "
        "of the optimizer step, and b the time of a microbatch. The memory stays constant",
    ),
    "ranks": Series(
        {n: replace(BASE, n_layers=6, ranks=n, threads=1, rows=8 * n) for n in (1, 2)},
        CONSTANT,
        CONSTANT,
        "each rank trains on 2,048 tokens with one thread. With an ideal network, time and memory would stay constant. "
        "In this measurement, FSDP2 communicates over gloo, on the same cores that compute. A plain PyTorch loop takes "
        "as long on two ranks",
    ),
}
INTRO = """\
Each table shows how the step time and the memory of a training run grow with one of its sizes, for example the sequence
length. The text below a table describes the growth that we expect.

All runs of this section train a model with dim 256 and 2 layers (6 layers in the table of ranks) in fp32, on 2,048
tokens per step unless the text below a table states otherwise. "ms/step" is the median step time, and "memory" the
largest resident set of a training process, over {repeats} run(s).

To test our expectations, we fit the expected growth to all rows of a table except the last one, and predict the last
row. The columns "expected" show the fitted values. The ratio of measured to expected is **bold** if it exceeds 1.15.
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
