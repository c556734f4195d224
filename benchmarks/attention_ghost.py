"""Compare flex attention with variable-length attention on the ghost GPU, for packed documents.

`python benchmarks/attention_ghost.py` needs the ghost GPU (docs/internals/ghost.md). It prints a
Markdown table with the kernel launches, the peak of allocated memory and the host syncs of a
training step.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
JOB = (
    "--model.flavor 1b --model.n_layers 4 --model.vocab_size 4096 --training.local_batch_size 1 "
    "--dataset.document_mask --dataset.packing best_fit --checkpoint.no-enable "
    "--metrics.log_freq 50 --guards.max_skipped 1000000 --guards.compare_every 1000000"
)
LENGTHS = (8192, 32768)
BACKENDS = ("flex", "varlen")
MODES = {"eager": "", "compiled": "--compile.enable"}
NUM_STEPS = 2  # number of steps that tests/ghost/steps.py measures
LAUNCHES = ("kernel", "triton", "matmul", "cudnn", "memset")


def measure(folder: Path) -> dict[str, dict[str, Any]]:
    """Train all jobs on the ghost GPU, and return the measurements of tests/ghost/steps.py.

    The measurement `events` contains the log of the ghost GPU.
    """
    jobs = {}
    for mode, mode_options in MODES.items():
        for length in LENGTHS:
            for backend in BACKENDS:
                options = f"--training.seq_len {length} --model.attention_backend {backend}"
                jobs[f"{mode} {length} {backend}"] = f"{JOB} {options} {mode_options}".split()
    (folder / "jobs.json").write_text(json.dumps(jobs))

    command = [str(ROOT / "scripts/ghost.sh"), "torchrun", "--standalone"]
    command += [str(ROOT / "tests/ghost/steps.py"), str(folder / "jobs.json"), str(folder / "out")]
    ghost = {"GHOST_LOG": str(folder / "log"), "GHOST_RACE": str(folder / "race")}
    environment = os.environ | ghost | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, stdout=sys.stderr, check=True)

    results = json.loads((folder / "out.0").read_text())
    for log in folder.glob("log.*"):
        sections = r"^mark job (.*)\n((?:.*\n)*?)mark end$"
        for name, lines in re.findall(sections, log.read_text(), re.MULTILINE):
            results[name]["events"] = lines.splitlines()
    return results


def make_row(mode: str, length: int, results: dict[str, dict[str, Any]]) -> str:
    """Return the table row of one sequence length. Exit with 1 if a job failed.

    Args:
        mode: Key of MODES.
        length: Tokens per sequence.
        results: Result of `measure`.
    """
    jobs = [results[f"{mode} {length} {backend}"] for backend in BACKENDS]
    for job in jobs:
        if "error" in job:
            sys.exit(job["error"])
        if job["recompilations"] or job["alarms"]:
            sys.exit(f"{mode}, {length} tokens: a recompilation or a race")

    cells = [mode, f"{length:,}"]
    for job in jobs:
        launches = [event for event in job["events"] if event.split()[0] in LAUNCHES]
        cells.append(f"{len(launches) / NUM_STEPS:,.0f}")
    for job in jobs:
        cells.append(f"{job['allocated'] / 2**20:,.0f}")
    for job in jobs:
        waits = [event for event in job["events"] if re.match("wait|copy .*pageable", event)]
        cells.append(f"{len(waits) / NUM_STEPS:.0f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure all jobs and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder))
    columns = ["blocks", "tokens", "launches, flex", "varlen", "MiB, flex", "varlen"]
    columns += ["host syncs, flex", "varlen"]
    print(f"| {' | '.join(columns)} |")
    print("|---" + "|---:" * 7 + "|")
    for mode in MODES:
        for length in LENGTHS:
            print(make_row(mode, length, results))


if __name__ == "__main__":
    main()
