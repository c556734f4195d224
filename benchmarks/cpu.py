"""Compare titanlite with a plain PyTorch loop or torchtitan: tokens/s, memory and first step.

    benchmarks/cpu.sh [--beside torchtitan] [--pairs 5] [--only NAME ...] [--steps N] [--out FOLDER]

Each pair is one run of titanlite followed by one run of the other program, so other load on the
machine slows both. The order alternates. For compiled cases, one additional pair fills the compiler
caches first, and its times are reported as a cold start. torchtitan 0.2.2 and triton must be
installed.
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
    Work,
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

LARGE_VOCABULARY = Work(n_layers=2, vocab_size=128256, compile=True, steps=5)
# In such a small model, the overhead of the framework dominates the time of a step.
TINY = Work(64, 2, 2, 1, 128, seq_len=64, batch_size=4, steps=200, window=20, threads=1, fsdp=True)
TWO_RANKS = Work(ranks=2, threads=1)
CASES = {
    "fp32": Work(),
    "bf16": Work(dtype="bf16"),
    # Short compiled runs need more steps: medians over 3 seconds vary by 5%.
    "bf16 compiled": Work(dtype="bf16", compile=True, steps=64),
    "fp32, 2 ranks": TWO_RANKS,
    "bf16, 2 ranks": replace(TWO_RANKS, dtype="bf16"),
    "bf16 compiled, 2 ranks": replace(TWO_RANKS, dtype="bf16", compile=True),
    "vocabulary 128,256, fp32 compiled": LARGE_VOCABULARY,
    "vocabulary 128,256, bf16 compiled": replace(LARGE_VOCABULARY, dtype="bf16"),
    "tiny model, FSDP2": TINY,
    "tiny model, FSDP2, 2 ranks": replace(TINY, ranks=2),
}
# The tiny model measures FSDP2, which torchtitan does not use on one rank.
BESIDE_TORCHTITAN = {name: work for name, work in CASES.items() if not work.fsdp} | {
    "232 million parameters, bf16 compiled": Work(
        640,
        16,
        10,
        2,
        1728,
        128256,
        seq_len=1024,
        batch_size=1,
        dtype="bf16",
        compile=True,
        steps=8,
    ),
}
START_UP = {
    "titanlite --help": 0.5,
    "./run_train.sh (debug model, all defaults) to the end of step 1": 6.0,
}
INTRO = """\
The tables compare the speed of titanlite with a plain PyTorch loop, `benchmarks/plain.py`, which contains the model and
the training loop in fewer than 150 lines. The loop uses fused AdamW, gradient clipping and the same dtypes as
titanlite. Unlike titanlite, it keeps all logits in memory.

- **Models.** The debug model has dim 256 and 6 layers, or 2 layers with the large vocabulary, and trains on 8 sequences
  of 256 tokens per step. The tiny model has dim 64 and 2 layers, and trains on 4 sequences of 64 tokens per step.
- **Data.** Both programs read the same file of token ids. titanlite uses its complete data pipeline.
- **Settings.** titanlite runs with its defaults, including its
  [memory settings](../guides/memory_and_speed.md#why-a-step-is-slow). It writes metrics in each step of the debug
  model, and every 20 steps of the tiny model. Checkpoints, TensorBoard and activation checkpointing are off, because
  the plain loop does not support them.
- **Threads.** A run with one process uses 2 threads for the debug model and 1 thread for the tiny model. In a run with 2
  gloo ranks, each rank uses 1 thread.

The tables compare titanlite with the plain PyTorch loop. They show the speed, the memory, and the time to the first
step. A ratio is the value of titanlite divided by the value of the plain loop. The tables show the median ratio of
{pairs} pairs of runs, in **bold** if it misses its target.
"""
INTRO_TORCHTITAN = """\
The tables compare titanlite with torchtitan 0.2.2 on a CPU. The program `benchmarks/cpu_torchtitan.py` runs the trainer
of torchtitan.

- **Work and data.** Both programs train the debug model or the tiny model on the same batches as in the comparison with
  a plain PyTorch loop. They read the same file of JSON lines and tokenize the text during training.
- **Settings.** Activation checkpointing, checkpoints and TensorBoard are off. All other settings are the defaults of
  each program. In cases with "compiled" in their name, both programs compile blocks and loss.
- **Precision.** In bf16 on one process, torchtitan uses autocast, which keeps the residual stream in fp32. On two ranks,
  FSDP2 casts the weights of both programs.

The tables compare titanlite with torchtitan. They show the speed, the memory, and the time to the first step. A ratio
is the value of titanlite divided by the value of torchtitan. The tables show the median ratio of {pairs} pairs of runs, in
**bold** if torchtitan is better.
"""
NOTES = """\
The following table explains the columns of all tables in this section.

| column | meaning |
|---|---|
| tokens/s | median speed of all steps after the first 3 |
| memory | largest resident set of a training process |
| all processes | memory of the training processes, the launcher and the data worker, with shared pages counted once |
| first step | seconds from the start of the command to the end of step 1, with a warm compiler cache |
| cold | the same with an empty compiler cache |
"""


@dataclass(frozen=True)
class Other:
    """The program that titanlite is compared with."""

    name: str
    results: str
    """Name of the results file."""
    intro: str
    cases: dict[str, Work]
    prepare: Callable[[Path], Path]
    """Creates the data for both programs."""
    run: Callable[[Work, Path, Path], Measured]
    least: Callable[[dict[str, Any]], float]
    """Target ratio of tokens/s for a case."""
    first_step: float
    """Largest allowed ratio of the time to the first step."""
    beside_cases: tuple[str, ...] = ()
    """Additional measurements."""


def least_of_plain(work: dict[str, Any]) -> float:
    """Return the target ratio of tokens/s compared with the plain loop."""
    return {64: 1 / 1.1}.get(work["dim"], 1.0 if work["vocab_size"] > 100_000 else 0.98)


PLAIN = Other(
    "plain", "cpu", INTRO, CASES, prepare_tokens, run_plain, least_of_plain, 1.3, ("start-up",)
)
TORCHTITAN = Other(
    "torchtitan",
    "cpu_torchtitan",
    INTRO_TORCHTITAN,
    BESIDE_TORCHTITAN,
    write_text,
    run_torchtitan,
    lambda _: 1.0,
    1.0,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", choices=("plain", "torchtitan"), default="plain")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="instead of what each case has")
    parser.add_argument("--only", action="append", help="this case; may be given several times")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of cpu.json or cpu_torchtitan.json"
    )
    options = parser.parse_args()
    other = {"plain": PLAIN, "torchtitan": TORCHTITAN}[options.beside]
    every = [*other.cases, *other.beside_cases]
    if unknown := {*(options.only or ())} - {*every}:
        parser.error(f"no such case: {'; '.join(unknown)}. There are: {'; '.join(every)}")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        data = other.prepare(Path(name))
        for case in options.only or every:
            if case == "start-up":
                result = start_up(Path(name), options.pairs)
            else:
                work = replace(
                    other.cases[case],
                    **({"steps": options.steps, "window": 1} if options.steps else {}),
                )
                result = compare(case, work, other, data, Path(name), options.pairs)
            write_part(options.out, other.results, case, result)
    print("\n".join(tables(other, read_parts(options.out, other.results))))


def compare(
    case: str, work: Work, other: Other, data: Path, folder: Path, pairs: int
) -> dict[str, Any]:
    """Measure one case."""
    sides = {"titanlite": run_titanlite, other.name: other.run}
    number = list(other.cases).index(case)
    # inductor does not quote paths, so folder names must not contain spaces.
    caches = {side: folder / f"{side}-{number}" for side in sides}
    cold = None
    if work.compile:
        brief = replace(work, steps=4)
        cold = {side: run(brief, data, caches[side]).first_step for side, run in sides.items()}
    runs: dict[str, list[Measured]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in list(sides)[:: -1 if pair % 2 else 1]:
            runs[side].append(sides[side](work, data, caches[side]))
        rates = [runs[side][-1].tokens_per_second for side in sides]
        print(
            f"{case}, pair {pair + 1} of {pairs}: {rates[0]:,.0f} / {rates[1]:,.0f} tokens/s",
            file=sys.stderr,
        )
    values = {
        field.name: {side: [getattr(run, field.name) for run in runs[side]] for side in sides}
        for field in fields(Measured)
    }
    ratios = {
        name: statistics.median(ours / theirs for ours, theirs in zip(*both.values(), strict=True))
        for name, both in values.items()
    }
    return {
        "work": asdict(work),
        "pairs": pairs,
        "ratios": ratios,
        "cold_first_step": cold,
        "runs": values,
    }


def start_up(folder: Path, repeats: int) -> dict[str, Any]:
    """Return the median seconds of the two commands in START_UP."""
    seconds: list[list[float]] = [[], []]
    for i in range(repeats):
        timed = [sys.executable, "-c", TIMED, sys.executable, "-P", "-m", "titanlite", "--help"]
        seconds[0].append(float(run_command(timed, {}, folder, measure=False).output))
        dump = folder / f"start-{i}"
        command = [
            ROOT / "run_train.sh",
            "--job.dump_folder",
            dump,
            "--training.steps",
            1,
            "--checkpoint.no-enable",
        ]
        process = run_command(command, environment(Work(), folder), folder, measure=False)
        seconds[1].append((dump / "metrics.jsonl").stat().st_mtime - process.launched)
    return {
        "seconds": {
            name: statistics.median(both) for name, both in zip(START_UP, seconds, strict=True)
        }
    }


# This process times another one without polling, which would round the time to the poll interval.
TIMED = """
import subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(time.perf_counter() - start)
"""


def tables(other: Other, parts: dict[str, Any]) -> list[str]:
    """Return Markdown tables of all cases and their targets."""
    cases = {name: parts[name] for name in other.cases if name in parts}
    lines = [
        other.intro.format(
            pairs=" or ".join(sorted({str(part["pairs"]) for part in cases.values()}))
        )
    ]
    header = ["titanlite", other.name, "ratio", "target"]
    rows = [
        [name, *_row(part, "tokens_per_second", 1, ",.0f", at_least=other.least(part["work"]))]
        for name, part in cases.items()
    ]
    lines += table(["tokens/s", *header], rows)
    rows = [
        [
            name,
            *_row(part, "peak_rss", MIB, ",.0f", at_most=1.0),
            *_row(part, "total_pss", MIB, ",.0f")[:2],
        ]
        for name, part in cases.items()
    ]
    lines += table(["memory, MiB", *header, "all processes: titanlite", other.name], rows)
    rows = [
        [name, *_row(part, "first_step", 1, ".1f", at_most=other.first_step)]
        + ([f"{cold:.1f}" for cold in (part["cold_first_step"] or {}).values()] or ["", ""])
        for name, part in cases.items()
    ]
    lines += [*table(["first step, s", *header, "cold: titanlite", other.name], rows), NOTES]
    if "start-up" in parts:
        rows = []
        for name, target in START_UP.items():
            value = parts["start-up"]["seconds"][name]
            rows.append(
                [
                    f"`{name}`",
                    f"{value:.2f}" if value < target else f"**{value:.2f}**",
                    f"under {target}",
                ]
            )
        lines += table(["start-up", "seconds", "target"], rows)
    missing = [name for name in (*other.cases, *other.beside_cases) if name not in parts]
    return [*lines, f"Not measured yet: {'; '.join(missing)}.", ""] if missing else lines


def _row(
    part: dict[str, Any],
    name: str,
    unit: float,
    form: str,
    at_least: float = 0.0,
    at_most: float = float("inf"),
) -> list[str]:
    """Return both medians, their ratio and its target."""
    ratio = part["ratios"][name]
    medians = [
        format(statistics.median(values) / unit, form) for values in part["runs"][name].values()
    ]
    target = f"at least {at_least:.2f}" if at_least else f"at most {at_most:.2f}"
    return [
        *medians,
        f"{ratio:.3f}" if at_least <= ratio <= at_most else f"**{ratio:.3f}**",
        target,
    ]


if __name__ == "__main__":
    main()
