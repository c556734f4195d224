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

from runs import about, describe_measurement, table

from titanlite.load_run import load_run
from titanlite.runtime.world import process_group
from titanlite.train.trainer import Trainer

JOB = ["--job.config_file", "debug_model", "--checkpoint.no-enable", "--training.steps", "100000"]
# With these options, only the first step is logged.
ALMOST_NO_METRICS = ["--metrics.log_freq", "1000000", "--metrics.no-enable_tensorboard"]
MAX_OVERHEAD = 0.01


def time_step(trainer: Trainer) -> float:
    """Train one step and return its seconds."""
    start = time.perf_counter()
    trainer.step()
    return time.perf_counter() - start


def measure(num_pairs: int, log_freq: int, folder: Path) -> list[tuple[float, float]]:
    """Return the mean seconds of a step for each pair: with default metrics, and almost none."""
    runs = []
    for index, options in enumerate((["--metrics.log_freq", str(log_freq)], ALMOST_NO_METRICS)):
        output_folder = str(folder / str(index))
        runs.append(load_run([*JOB, "--job.dump_folder", output_folder, *options], 1))

    step_times = []
    with process_group(runs[0].job) as device:
        trainers = [Trainer(run, device) for run in runs]
        for pair in range(num_pairs + 1):
            seconds = [0.0, 0.0]
            for step in range(log_freq):
                order = (0, 1) if step % 2 else (1, 0)
                for side in order:
                    seconds[side] += time_step(trainers[side])
            # The first pair is warmup.
            if pair > 0:
                step_times.append((seconds[0] / log_freq, seconds[1] / log_freq))
        for trainer in trainers:
            trainer.close()
    return step_times


def main() -> int:
    """Print the overhead of metrics, and return 1 if it exceeds the target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--log_freq", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        step_times = measure(options.pairs, options.log_freq, Path(folder))

    overheads = [with_metrics / without - 1 for with_metrics, without in step_times]
    low, median, high = statistics.quantiles(overheads, n=4)
    step_seconds = statistics.median(without for _, without in step_times)
    header = ["pairs", "steps of a pair", "seconds of a step", "difference: median", "middle half"]
    row = [
        str(options.pairs),
        f"2 x {options.log_freq}",
        f"{step_seconds:.3f}",
        f"{median:+.2%}",
        f"{low:+.2%} to {high:+.2%}",
    ]
    print("\n".join(table(header, [row])))
    print(describe_measurement(about()))
    return 1 if median >= MAX_OVERHEAD else 0


if __name__ == "__main__":
    sys.exit(main())
