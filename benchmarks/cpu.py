"""titanlite against a plain PyTorch loop on the same work, in turns: tokens/s, memory, time to the first step.

    benchmarks/cpu.sh [--pairs 5] [--only NAME ...] [--steps N] [--out benchmarks/results]

Each pair is one run of titanlite and one of plain.py, one right after the other, so that what else the machine does
meets both; every other pair begins with plain.py. Where something is compiled, one more pair goes first: it fills each
side's cache, and its times are kept as those of a cold start.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict, fields, replace
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
    table,
    write_part,
)

LARGE_VOCABULARY = Work(n_layers=2, vocab_size=128256, compile=True, steps=5)
# So small a model that a step is latency: what the framework adds to it shows here.
TINY = Work(64, 2, 2, 1, 128, seq_len=64, rows=4, steps=200, window=20, threads=1, fsdp=True)
TWO_RANKS = Work(ranks=2, threads=1)
CASES = {
    "fp32": Work(),
    "bf16": Work(dtype="bf16"),
    "bf16 compiled": Work(dtype="bf16", compile=True, steps=64),  # medians of 3 seconds vary by 5%
    "fp32, 2 ranks": TWO_RANKS,
    "bf16, 2 ranks": replace(TWO_RANKS, dtype="bf16"),
    "bf16 compiled, 2 ranks": replace(TWO_RANKS, dtype="bf16", compile=True),
    "vocabulary 128,256, fp32 compiled": LARGE_VOCABULARY,
    "vocabulary 128,256, bf16 compiled": replace(LARGE_VOCABULARY, dtype="bf16"),
    "tiny model, FSDP2": TINY,
    "tiny model, FSDP2, 2 ranks": replace(TINY, ranks=2),
}
START_UP = {"titanlite --help": 0.5, "./run_train.sh (debug model, all defaults) to the end of step 1": 6.0}
INTRO = """\
`benchmarks/plain.py` is the yardstick: model and loop in under 150 lines of plain PyTorch, with fused AdamW, clipping
and the same dtypes; its logits are materialised. Both train the debug model (dim 256, 6 layers; 2 layers with the large
vocabulary) on 8 rows of 256 tokens a step, the tiny one (dim 64, 2 layers) on 4 rows of 64, from the same file of token
ids, which titanlite reads through its whole data pipeline. titanlite runs as any user's run does, with metrics written
each step (the tiny model: each 20 steps); checkpoints, TensorBoard and activation checkpointing, which the loop has
not, are off; what makes it faster, such as its use of the heap ([training](training.md)), is on. One process has 2
threads (the tiny model 1), each of 2 ranks (gloo) has 1. Ratio: titanlite over plain, the median of the ratios of
{pairs} pairs. **Bold** misses its target.
"""
NOTES = """\
Tokens/s: median of the steps after the first 3. Memory: largest resident set of a training process; all processes:
together with launcher and the process that reads the data ahead, shared pages counted once. First step: seconds from
the command to the end of step 1, where something is compiled with a warm cache; cold: the first start of all.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="instead of what each case has")
    parser.add_argument("--only", action="append", choices=(*CASES, "start-up"), help="may be given several times")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of cpu.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        shards = prepare_tokens(Path(name))
        for case in options.only or [*CASES, "start-up"]:
            if case == "start-up":
                result = start_up(Path(name), options.pairs)
            else:
                work = replace(CASES[case], **({"steps": options.steps, "window": 1} if options.steps else {}))
                result = compare(case, work, shards, Path(name), options.pairs)
            write_part(options.out, "cpu", case, result)
    print("\n".join(tables(read_parts(options.out, "cpu"))))


def compare(case: str, work: Work, shards: Path, folder: Path, pairs: int) -> dict[str, Any]:
    """Measure one case."""
    sides = {"titanlite": run_titanlite, "plain": run_plain}
    caches = {
        side: folder / f"{side}-{list(CASES).index(case)}" for side in sides
    }  # no blanks: inductor does not quote
    cold = None
    if work.compile:
        brief = replace(work, steps=4)
        cold = {side: run(brief, shards, caches[side]).first_step for side, run in sides.items()}
    runs: dict[str, list[Measured]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in list(sides)[:: -1 if pair % 2 else 1]:
            runs[side].append(sides[side](work, shards, caches[side]))
        rates = [runs[side][-1].tokens_per_second for side in sides]
        print(f"{case}, pair {pair + 1} of {pairs}: {rates[0]:,.0f} / {rates[1]:,.0f} tokens/s", file=sys.stderr)
    values = {
        field.name: {side: [getattr(run, field.name) for run in runs[side]] for side in sides}
        for field in fields(Measured)
    }
    ratios = {
        name: statistics.median(ours / theirs for ours, theirs in zip(*both.values(), strict=True))
        for name, both in values.items()
    }
    return {"work": asdict(work), "pairs": pairs, "ratios": ratios, "cold_first_step": cold, "runs": values}


def start_up(folder: Path, repeats: int) -> dict[str, Any]:
    """Median seconds of START_UP's two commands."""
    seconds: list[list[float]] = [[], []]
    for i in range(repeats):
        timed = [sys.executable, "-c", TIMED, sys.executable, "-P", "-m", "titanlite.cli", "--help"]
        seconds[0].append(float(run_command(timed, {}, folder, measure=False)[3]))
        dump = folder / f"start-{i}"
        command = [ROOT / "run_train.sh", "--job.dump_folder", dump, "--training.steps", 1, "--checkpoint.no-enable"]
        launched = run_command(command, environment(Work(), folder), folder, measure=False)[0]
        seconds[1].append((dump / "metrics.jsonl").stat().st_mtime - launched)
    return {"seconds": {name: statistics.median(both) for name, both in zip(START_UP, seconds, strict=True)}}


# A process that times another one, so that waiting for it is not measured in steps of the sleep.
TIMED = """
import subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(time.perf_counter() - start)
"""


def tables(parts: dict[str, Any]) -> list[str]:
    """Markdown: every case beside its targets."""
    cases = {name: parts[name] for name in CASES if name in parts}
    lines = [INTRO.format(pairs=" or ".join(sorted({str(part["pairs"]) for part in cases.values()})))]
    header = ["titanlite", "plain", "ratio", "target"]
    rows = [[name, *_row(part, "tokens_per_second", 1, ",.0f", at_least=_least(part))] for name, part in cases.items()]
    lines += table(["tokens/s", *header], rows)
    rows = [
        [name, *_row(part, "peak_rss", MIB, ",.0f", at_most=1.0), *_row(part, "total_pss", MIB, ",.0f")[:2]]
        for name, part in cases.items()
    ]
    lines += table(["memory, MiB", *header, "all processes: titanlite", "plain"], rows)
    rows = [
        [name, *_row(part, "first_step", 1, ".1f", at_most=1.3)]
        + [f"{part['cold_first_step'][side]:.1f}" if part["cold_first_step"] else "" for side in ("titanlite", "plain")]
        for name, part in cases.items()
    ]
    lines += [*table(["first step, s", *header, "cold: titanlite", "plain"], rows), NOTES]
    if "start-up" in parts:
        rows = []
        for name, target in START_UP.items():
            value = parts["start-up"]["seconds"][name]
            rows.append([f"`{name}`", f"{value:.2f}" if value < target else f"**{value:.2f}**", f"under {target}"])
        lines += table(["start-up", "seconds", "target"], rows)
    missing = [name for name in (*CASES, "start-up") if name not in parts]
    return [*lines, f"Not measured yet: {'; '.join(missing)}.", ""] if missing else lines


def _least(part: dict[str, Any]) -> float:
    """What tokens/s must reach of plain's. The tiny model: 10% more time a step."""
    return {64: 1 / 1.1}.get(part["work"]["dim"], 1.0 if part["work"]["vocab_size"] > 100_000 else 0.98)


def _row(
    part: dict[str, Any], name: str, unit: float, form: str, at_least: float = 0.0, at_most: float = float("inf")
) -> list[str]:
    """Both medians, their ratio and its target."""
    ratio = part["ratios"][name]
    medians = [format(statistics.median(part["runs"][name][side]) / unit, form) for side in ("titanlite", "plain")]
    target = f"at least {at_least:.2f}" if at_least else f"at most {at_most:.2f}"
    return [*medians, f"{ratio:.3f}" if at_least <= ratio <= at_most else f"**{ratio:.3f}**", target]


if __name__ == "__main__":
    main()
