"""Compare titanlite with a plain PyTorch loop or torchtitan: tokens/s, memory and first step.

    benchmarks/cpu.sh [--beside torchtitan] [--pairs 5] [--only NAME ...] [--steps N] [--out FOLDER]

Each pair is one run of titanlite and one run of the other program, so other load on the machine
slows both. The order alternates from pair to pair. For compiled cases, one additional pair fills
the compiler caches first, and its times are reported as a cold start. torchtitan 0.2.2 and triton
must be installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from runs import (
    MIB,
    RESULTS,
    ROOT,
    Measured,
    Workload,
    environment,
    prepare_tokens,
    read_parts,
    run_command,
    run_plain,
    run_titanlite,
    run_torchtitan,
    table,
    write_part,
    write_text,
)

LARGE_VOCABULARY = Workload(n_layers=2, vocab_size=128256, compile=True, steps=5)
# In such a small model, the overhead of the framework dominates the time of a step.
TINY = Workload(
    dim=64,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    ffn_dim=128,
    seq_len=64,
    batch_size=4,
    steps=200,
    window=20,
    threads=1,
    dtype="bf16",
)
TWO_RANKS = Workload(ranks=2, threads=1)
CASES = {
    "fp32": Workload(),
    "bf16": Workload(dtype="bf16"),
    # Short compiled runs need more steps: medians over 3 seconds vary by 5%.
    "bf16 compiled": Workload(dtype="bf16", compile=True, steps=64),
    "fp32, 2 ranks": TWO_RANKS,
    "bf16, 2 ranks": replace(TWO_RANKS, dtype="bf16"),
    "bf16 compiled, 2 ranks": replace(TWO_RANKS, dtype="bf16", compile=True),
    "vocabulary 128,256, fp32 compiled": LARGE_VOCABULARY,
    "vocabulary 128,256, bf16 compiled": replace(LARGE_VOCABULARY, dtype="bf16"),
    "tiny model": TINY,
    "tiny model, 2 ranks": replace(TINY, ranks=2),
}
# The tiny model is only for the comparison with a program that has hardly any overhead.
TORCHTITAN_CASES = {name: work for name, work in CASES.items() if "tiny" not in name}
TORCHTITAN_CASES["232 million parameters, bf16 compiled"] = Workload(
    dim=640,
    n_layers=16,
    n_heads=10,
    n_kv_heads=2,
    ffn_dim=1728,
    vocab_size=128256,
    seq_len=1024,
    batch_size=1,
    dtype="bf16",
    compile=True,
    steps=8,
)
# Command -> target in seconds.
START_UP = {
    "titanlite --help": 0.1,
    "./run_train.sh (debug model, all defaults) to the end of step 1": 6.0,
}
INTRO = """\
The tables compare the speed of titanlite with a plain PyTorch loop, `benchmarks/plain.py`, which
contains the model and the training loop in fewer than 150 lines. The loop uses fused AdamW,
gradient clipping and the same dtypes as titanlite. Unlike titanlite, it keeps all logits in memory.

- **Models.** The debug model has dim 256 and 6 layers, or 2 layers with the large vocabulary, and
  trains on 8 sequences of 256 tokens per step. The tiny model has dim 64 and 2 layers, and trains
  on 4 sequences of 64 tokens per step.
- **Data.** Both programs read the same file of token ids. titanlite uses its complete data
  pipeline.
- **Settings.** titanlite runs with its defaults, including its
  [memory settings](../guides/memory_and_speed.md#why-a-step-is-slow). It writes metrics in each
  step of the debug model, and every 20 steps of the tiny model. Checkpoints, TensorBoard and
  activation checkpointing are off, because the plain loop does not support them.
- **Threads.** A run with one process uses 2 threads for the debug model and 1 thread for the tiny
  model. In a run with 2 gloo ranks, each rank uses 1 thread.

A ratio is the result of titanlite divided by the result of the plain loop. We run the two programs
alternately, {pairs} times each, and show the median of the {pairs} ratios. It is **bold** if it
misses its target.
"""
INTRO_TORCHTITAN = """\
The tables compare titanlite with torchtitan 0.2.2 on a CPU. The program
`benchmarks/cpu_torchtitan.py` runs the trainer of torchtitan.

- **Model and data.** Both programs train the debug model on the same batches as in the comparison
  with a plain PyTorch loop. They read the same file of JSON lines and tokenize the text during
  training.
- **Settings.** Activation checkpointing, checkpoints and TensorBoard are off. Otherwise, both
  programs keep their defaults. In cases with "compiled" in their name, they compile the blocks and
  the loss.
- **Precision.** In bf16 on one process, torchtitan uses autocast, which keeps the residual stream
  in fp32. On two ranks, FSDP2 casts the weights of both programs.

A ratio is the result of titanlite divided by the result of torchtitan. We run the two programs
alternately, {pairs} times each, and show the median of the {pairs} ratios. It is **bold** if
torchtitan is better.
"""
NOTES = """\
The following table explains the columns of all tables in this section.

| column | meaning |
|---|---|
| tokens/s | median speed of all steps after the first 3 |
| memory | largest resident set of a training process |
| all processes | memory of training, launcher and data processes; shared pages count once |
| first step | seconds from the command to the end of step 1, with a warm compiler cache |
| cold | the same with an empty compiler cache |
"""


@dataclass(frozen=True)
class Baseline:
    """The program that titanlite is compared with.

    Attributes:
        name: Name in the tables.
        results: Name of the results file, without its suffix.
        intro: Text above the tables. It contains the placeholder {pairs}.
        cases: Name -> workload.
        prepare: Creates the data for both programs in a folder, and returns its path.
        run: Runs and measures a workload, given the data and the folder for compiled code.
        speed_target: Returns the smallest allowed ratio of tokens/s for a workload.
        first_step_target: Largest allowed ratio of the time to the first step.
        extra_cases: Names of further measurements that need no baseline.
    """

    name: str
    results: str
    intro: str
    cases: dict[str, Workload]
    prepare: Callable[[Path], Path]
    run: Callable[[Workload, Path, Path], Measured]
    speed_target: Callable[[dict[str, Any]], float]
    first_step_target: float
    extra_cases: tuple[str, ...] = ()

    @property
    def all_cases(self) -> list[str]:
        """Return the names of all measurements."""
        return [*self.cases, *self.extra_cases]


def plain_speed_target(work: dict[str, Any]) -> float:
    """Return the smallest allowed ratio of tokens/s to the plain loop."""
    if work["dim"] == TINY.dim:
        return 1 / 1.1
    if work["vocab_size"] > 100_000:
        return 1.0
    return 0.98


PLAIN = Baseline(
    name="plain",
    results="cpu",
    intro=INTRO,
    cases=CASES,
    prepare=prepare_tokens,
    run=run_plain,
    speed_target=plain_speed_target,
    first_step_target=1.3,
    extra_cases=("start-up",),
)
TORCHTITAN = Baseline(
    name="torchtitan",
    results="cpu_torchtitan",
    intro=INTRO_TORCHTITAN,
    cases=TORCHTITAN_CASES,
    prepare=write_text,
    run=run_torchtitan,
    speed_target=lambda _: 1.0,
    first_step_target=1.0,
)


def parse() -> tuple[argparse.Namespace, Baseline]:
    """Parse the command line, and return the options and the chosen baseline."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", choices=("plain", "torchtitan"), default="plain")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="number of steps of each case")
    parser.add_argument("--only", action="append", help="this case; may be given several times")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of cpu.json or cpu_torchtitan.json"
    )
    options = parser.parse_args()

    baseline = {"plain": PLAIN, "torchtitan": TORCHTITAN}[options.beside]
    unknown = set(options.only or ()) - set(baseline.all_cases)
    if unknown:
        cases = "; ".join(baseline.all_cases)
        parser.error(f"no such case: {'; '.join(unknown)}. There are: {cases}")
    return options, baseline


def main() -> None:
    """Measure the chosen cases, store each result at once, and print the tables of all results."""
    options, baseline = parse()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        data = baseline.prepare(folder)
        for case in options.only or baseline.all_cases:
            if case == "start-up":
                result = measure_start_up(folder, options.pairs)
            else:
                work = baseline.cases[case]
                if options.steps:
                    work = replace(work, steps=options.steps, window=1)
                result = compare(case, work, baseline, data, folder, options.pairs)
            write_part(options.out, baseline.results, case, result)
    print("\n".join(tables(baseline, read_parts(options.out, baseline.results))))


def compare(
    case: str, work: Workload, baseline: Baseline, data: Path, folder: Path, num_pairs: int
) -> dict[str, Any]:
    """Measure one case in pairs of runs.

    Args:
        case: Name of the case.
        work: Workload of the case.
        baseline: The program to compare with.
        data: Training data.
        folder: Folder for compiled code.
        num_pairs: Number of pairs.
    """
    sides = {"titanlite": run_titanlite, baseline.name: baseline.run}
    number = list(baseline.cases).index(case)
    # inductor does not quote paths, so folder names must not contain spaces.
    caches = {side: folder / f"{side}-{number}" for side in sides}

    cold = None
    if work.compile:
        short_work = replace(work, steps=4)
        cold = {}
        for side, run in sides.items():
            cold[side] = run(short_work, data, caches[side]).first_step

    runs: dict[str, list[Measured]] = {side: [] for side in sides}
    for pair in range(num_pairs):
        order = list(sides) if pair % 2 == 0 else list(reversed(sides))
        for side in order:
            runs[side].append(sides[side](work, data, caches[side]))
        speeds = " / ".join(f"{runs[side][-1].tokens_per_second:,.0f}" for side in sides)
        print(f"{case}, pair {pair + 1} of {num_pairs}: {speeds} tokens/s", file=sys.stderr)

    measurements = group_by_measurement(runs)
    return {
        "work": asdict(work),
        "pairs": num_pairs,
        "ratios": {name: median_ratio(*by_side.values()) for name, by_side in measurements.items()},
        "cold_first_step": cold,
        "runs": measurements,
    }


def group_by_measurement(
    runs: dict[str, list[Measured]],
) -> dict[str, dict[str, list[float]]]:
    """Turn {side: runs} into {measurement: {side: value of each run}}."""
    measurements = {}
    for field in fields(Measured):
        by_side = {}
        for side, side_runs in runs.items():
            by_side[side] = [getattr(run, field.name) for run in side_runs]
        measurements[field.name] = by_side
    return measurements


def median_ratio(values: list[float], baseline_values: list[float]) -> float:
    """Return the median ratio of pairs of runs."""
    pairs = zip(values, baseline_values, strict=True)
    return statistics.median(value / baseline for value, baseline in pairs)


def measure_start_up(folder: Path, num_repeats: int) -> dict[str, Any]:
    """Return the median seconds of the two commands in START_UP."""
    help_seconds: list[float] = []
    first_step_seconds: list[float] = []
    for repeat in range(num_repeats):
        help_command = [sys.executable, "-P", "-m", "titanlite", "--help"]
        timed_command = [sys.executable, "-c", TIMER, *help_command]
        timer = run_command(timed_command, {}, folder, measure=False)
        help_seconds.append(float(timer.output))

        run_folder = folder / f"start-{repeat}"
        train_command = [ROOT / "run_train.sh", "--job.dump_folder", run_folder]
        train_command += ["--training.steps", 1, "--checkpoint.no-enable"]
        variables = environment(Workload(), folder)
        process = run_command(train_command, variables, folder, measure=False)
        first_step_end = (run_folder / "metrics.jsonl").stat().st_mtime
        first_step_seconds.append(first_step_end - process.launched)

    medians = [statistics.median(help_seconds), statistics.median(first_step_seconds)]
    return {"seconds": dict(zip(START_UP, medians, strict=True))}


# This process times another one without polling, which would round the time to the poll interval.
TIMER = """
import subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(time.perf_counter() - start)
"""


def tables(baseline: Baseline, parts: dict[str, Any]) -> list[str]:
    """Return Markdown tables of all cases and their targets."""
    cases = {name: parts[name] for name in baseline.cases if name in parts}
    pair_counts = sorted({str(part["pairs"]) for part in cases.values()})
    lines = [baseline.intro.format(pairs=" or ".join(pair_counts))]
    lines += speed_table(baseline, cases)
    lines += memory_table(baseline, cases)
    lines += first_step_table(baseline, cases)
    lines.append(NOTES)
    if "start-up" in parts:
        lines += start_up_table(parts["start-up"]["seconds"])
    missing = [name for name in baseline.all_cases if name not in parts]
    if missing:
        lines += [f"Not measured yet: {'; '.join(missing)}.", ""]
    return lines


def speed_table(baseline: Baseline, cases: dict[str, Any]) -> list[str]:
    """Compare tokens/s."""
    rows = []
    for name, part in cases.items():
        target = baseline.speed_target(part["work"])
        medians = format_medians(part, "tokens_per_second", 1, ",.0f")
        rows.append([name, *medians, *format_ratio(part, "tokens_per_second", at_least=target)])
    header = ["tokens/s", "titanlite", baseline.name, "ratio", "target"]
    return ["The first table compares the speed.", "", *table(header, rows)]


def memory_table(baseline: Baseline, cases: dict[str, Any]) -> list[str]:
    """Compare the memory of a training process and of all processes."""
    rows = []
    for name, part in cases.items():
        medians = format_medians(part, "peak_rss", MIB, ",.0f")
        ratio = format_ratio(part, "peak_rss", at_most=1.0)
        rows.append([name, *medians, *ratio, *format_medians(part, "total_pss", MIB, ",.0f")])
    header = ["memory, MiB", "titanlite", baseline.name, "ratio", "target"]
    header += ["all processes: titanlite", baseline.name]
    return ["The next table compares the memory.", "", *table(header, rows)]


def first_step_table(baseline: Baseline, cases: dict[str, Any]) -> list[str]:
    """Compare the time to the first step, with a warm and a cold compiler cache."""
    rows = []
    for name, part in cases.items():
        medians = format_medians(part, "first_step", 1, ".1f")
        ratio = format_ratio(part, "first_step", at_most=baseline.first_step_target)
        cold = ["", ""]
        if part["cold_first_step"]:
            cold = [f"{seconds:.1f}" for seconds in part["cold_first_step"].values()]
        rows.append([name, *medians, *ratio, *cold])
    header = ["first step, s", "titanlite", baseline.name, "ratio", "target"]
    header += ["cold: titanlite", baseline.name]
    return ["The next table compares the time to the first step.", "", *table(header, rows)]


def start_up_table(seconds: dict[str, float]) -> list[str]:
    """Show the time of the commands in START_UP."""
    rows = []
    for name, target in START_UP.items():
        text = f"{seconds[name]:.2f}"
        if seconds[name] >= target:
            text = f"**{text}**"
        rows.append([f"`{name}`", text, f"under {target}"])
    header = ["start-up", "seconds", "target"]
    return ["The last table shows how fast two commands start.", "", *table(header, rows)]


def format_medians(part: dict[str, Any], name: str, unit: float, form: str) -> list[str]:
    """Return the median of a measurement for titanlite and for the baseline."""
    by_side = part["runs"][name]
    return [format(statistics.median(values) / unit, form) for values in by_side.values()]


def format_ratio(
    part: dict[str, Any], name: str, at_least: float = 0.0, at_most: float = float("inf")
) -> list[str]:
    """Return the ratio of a measurement, in bold if it misses its target, and the target."""
    ratio = part["ratios"][name]
    text = f"{ratio:.3f}"
    if not at_least <= ratio <= at_most:
        text = f"**{text}**"
    target = f"at least {at_least:.2f}" if at_least else f"at most {at_most:.2f}"
    return [text, target]


if __name__ == "__main__":
    main()
