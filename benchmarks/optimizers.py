"""Compare Muon with tuned AdamW on the same models, sequences and seeds.

    python benchmarks/optimizers.py [--models debug 20m] [--seeds 0 1 2] [--factor 1] [--out DIR]

The learning rate of AdamW is the best of 3e-3 times powers of two, for the first seed. The search
ends when both neighbors of the best value are worse. Muon uses this learning rate, scaled for its
matrices, and is not tuned. Each run is a `titanlite train` command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from runs import ROOT, table

FIRST_RATE = 3e-3
PARTS = 4
TOKENS = {"training.seq_len": 128, "training.local_batch_size": 16}  # 2,048 tokens a step


GROUPS = """
[[optimizer.groups]]
params = ["layers.*.w?.weight"]
lr_factor = {}

[[optimizer.groups]]
params = ["tok_embeddings.weight", "layers.*norm.weight", "norm.weight", "output.weight"]
"""


class Model(NamedTuple):
    """The debug model with other sizes, and its number of steps."""

    steps: int
    keys: dict[str, int]


MODELS = {
    "debug": Model(120, {}),
    "20m": Model(24, {"dim": 448, "n_layers": 7, "n_heads": 7, "n_kv_heads": 7, "ffn_dim": 1152}),
}


def losses(
    folder: Path, name: str, optimizer: str, rate: float, seed: int, factor: float = 1.0
) -> list[float]:
    """Train, and return the loss of each step.

    `factor` scales the learning rate of block matrices.
    """
    model = MODELS[name]
    out = folder / f"{name}-{optimizer}-{rate:g}{f'x{factor:g}' * (factor != 1)}-{seed}"
    metrics = out / "metrics.jsonl"
    job = out.with_suffix(f"{out.suffix}.toml")
    if not metrics.exists() or len(metrics.read_text().splitlines()) < model.steps:
        keys = {f"model.{key}": value for key, value in model.keys.items()} | TOKENS
        keys |= {
            "training.steps": model.steps,
            "training.seed": seed,
            "lr_scheduler.warmup_steps": model.steps // 10,
        }
        keys |= {
            "optimizer.name": optimizer,
            "optimizer.lr": rate,
            "job.dump_folder": out,
            "metrics.log_freq": 1,
        }
        options = []
        for key, value in keys.items():
            options += [f"--{key}", str(value)]
        folder.mkdir(parents=True, exist_ok=True)
        job.write_text(
            (ROOT / "train_configs" / "debug_model.toml").read_text()
            + GROUPS.format(factor) * (factor != 1)
        )
        options += ["--job.config_file", str(job), "--checkpoint.no-enable"]
        subprocess.run(
            [sys.executable, "-m", "titanlite", "train", *options],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    found = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    print(f"{out.name}: {last(found):.3f}", file=sys.stderr, flush=True)
    return found


def last(found: list[float]) -> float:
    """Return the mean of the last tenth of the steps."""
    return statistics.mean(found[-max(1, len(found) // 10) :])


def tuned(folder: Path, name: str, seed: int) -> float:
    """Return the best learning rate of AdamW."""
    tried = {rate: last(losses(folder, name, "AdamW", rate, seed)) for rate in (FIRST_RATE,)}
    while True:
        best = min(tried, key=tried.__getitem__)
        missing = [rate for rate in (best / 2, best * 2) if rate not in tried]
        if not missing:
            return best
        tried[missing[0]] = last(losses(folder, name, "AdamW", missing[0], seed))


def compare(folder: Path, name: str, seeds: list[int], factor: float) -> list[list[str]]:
    """Return table rows: mean losses at the end of each quarter and of the run."""
    rate = tuned(folder, name, seeds[0])
    rows = []
    gains = []
    for seed in seeds:
        curves = {"AdamW": losses(folder, name, "AdamW", rate, seed)}
        curves[f"Muon x {factor:g}"] = muon = losses(folder, name, "Muon", rate, seed, factor)
        for optimizer, curve in curves.items():
            ends = [len(curve) * part // PARTS for part in range(1, PARTS + 1)]
            rows.append(
                [
                    name,
                    f"{rate:g}",
                    str(seed),
                    optimizer,
                    *(f"{last(curve[:end]):.3f}" for end in ends),
                ]
            )
        gains.append(last(curves["AdamW"]) - last(muon))
    spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
    rows.append(
        [
            name,
            "",
            "",
            "AdamW - Muon",
            *[""] * (PARTS - 1),
            f"{statistics.mean(gains):+.3f} ± {spread:.3f}",
        ]
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--factor", type=float, default=1.0, help="of the rate of Muon's matrices")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "optimizers")
    options = parser.parse_args()
    rows = [
        row
        for name in options.models
        for row in compare(options.out, name, options.seeds, options.factor)
    ]
    parts = [f"loss at {part / PARTS:.0%}" for part in range(1, PARTS + 1)]
    print("\n".join(table(["model", "rate", "seed", "optimizer", *parts], rows)))


if __name__ == "__main__":
    main()
