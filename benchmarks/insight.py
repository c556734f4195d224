"""Measure the cost of metrics: the debug model with default metrics and with almost none.

    python benchmarks/insight.py [--pairs 25] [--log_freq 10]

Both trainers run in one process and alternate step by step, so other load on the machine slows
both. A pair is one logging interval of each. Prints a table, and exits with 1 if the median
overhead exceeds the target.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from runs import about

from titanlite.load_run import load_run
from titanlite.runtime.world import process_group
from titanlite.train.trainer import Trainer

JOB = ["--job.config_file", "debug_model", "--checkpoint.no-enable", "--training.steps", "100000"]
# Only the first step is logged.
OFF = [
    "--metrics.log_freq",
    "1000000",
    "--metrics.no-enable_tensorboard",
]


def seconds_of(trainer: Trainer) -> float:
    """Return the seconds of one step."""
    began = time.perf_counter()
    trainer.step()
    return time.perf_counter() - began


def measure(pairs: int, log_freq: int, folder: Path) -> list[tuple[float, float]]:
    """Return mean step seconds for each pair: with default metrics, and without."""
    sides = [["--metrics.log_freq", str(log_freq)], OFF]
    runs = [
        load_run([*JOB, "--job.dump_folder", str(folder / str(i)), *side], 1)
        for i, side in enumerate(sides)
    ]
    found = []
    with process_group(runs[0].job) as device:
        trainers = [Trainer(run, device) for run in runs]
        for pair in range(pairs + 1):
            spent = [0.0, 0.0]
            for step in range(log_freq):
                for side in (0, 1) if step % 2 else (1, 0):
                    spent[side] += seconds_of(trainers[side])
            if pair:  # the first one warms up
                found.append((spent[0] / log_freq, spent[1] / log_freq))
        for trainer in trainers:
            trainer.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--log_freq", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.pairs, options.log_freq, Path(folder))
    differences = sorted(on / off - 1 for on, off in found)
    low, middle, high = statistics.quantiles(differences, n=4)
    print("| pairs | steps of a pair | seconds of a step | difference: median | middle half |")
    print("|---:|---:|---:|---:|---:|")
    step = statistics.median(off for _, off in found)
    print(
        f"| {options.pairs} | 2 x {options.log_freq} | {step:.3f} | {middle:+.2%} | {low:+.2%} to {high:+.2%} |"
    )
    print(f"\nMeasured {about()}.")
    return int(middle >= 0.01)


if __name__ == "__main__":
    sys.exit(main())
