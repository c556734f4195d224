"""Loss over tokens of Muon beside tuned AdamW: the same models, rows and seeds.

    python benchmarks/optimizers.py [--models debug 20m] [--seeds 0 1 2] [--factor 1] [--out DIR]

AdamW's rate is the best of 3e-3 times powers of two, for the first seed: the search ends when both neighbours of the
best one are worse. Muon takes that rate, its matrices a multiple of it, and is not tuned. Each run is a `titanlite
train`, whose metrics.jsonl stays in DIR; a run that is there is not repeated.
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

FIRST_RATE, PARTS = 3e-3, 4
TOKENS = {"training.seq_len": 128, "training.local_batch_size": 16}  # 2,048 tokens a step


GROUPS = """
[[optimizer.groups]]
params = ["layers.*.w?.weight"]
lr_factor = {}

[[optimizer.groups]]
params = ["tok_embeddings.weight", "layers.*norm.weight", "norm.weight", "output.weight"]
"""


class Model(NamedTuple):
    """The debug model with other keys, and how long it trains."""

    steps: int
    keys: dict[str, int]


MODELS = {
    "debug": Model(120, {}),
    "20m": Model(24, {"dim": 448, "n_layers": 7, "n_heads": 7, "n_kv_heads": 7, "ffn_dim": 1152}),
}


def losses(folder: Path, name: str, optimizer: str, rate: float, seed: int, factor: float = 1.0) -> list[float]:
    """The training loss of each step. `factor` is that of the rate of the matrices of blocks."""
    model, out = MODELS[name], folder / f"{name}-{optimizer}-{rate:g}{f'x{factor:g}' * (factor != 1)}-{seed}"
    metrics, job = out / "metrics.jsonl", out.with_suffix(f"{out.suffix}.toml")
    if not metrics.exists() or len(metrics.read_text().splitlines()) < model.steps:
        keys = {f"model.{key}": value for key, value in model.keys.items()} | TOKENS
        keys |= {"training.steps": model.steps, "training.seed": seed, "lr_scheduler.warmup_steps": model.steps // 10}
        keys |= {"optimizer.name": optimizer, "optimizer.lr": rate, "job.dump_folder": out, "metrics.log_freq": 1}
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        folder.mkdir(parents=True, exist_ok=True)
        job.write_text(
            (ROOT / "train_configs" / "debug_model.toml").read_text() + GROUPS.format(factor) * (factor != 1)
        )
        words += ["--job.config_file", str(job), "--checkpoint.no-enable"]
        subprocess.run([sys.executable, "-m", "titanlite", "train", *words], cwd=ROOT, check=True, capture_output=True)
    found = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    print(f"{out.name}: {last(found):.3f}", file=sys.stderr, flush=True)
    return found


def last(found: list[float]) -> float:
    """The mean of the last tenth of the steps."""
    return statistics.mean(found[-max(1, len(found) // 10) :])


def tuned(folder: Path, name: str, seed: int) -> float:
    """AdamW's best rate."""
    tried = {rate: last(losses(folder, name, "AdamW", rate, seed)) for rate in (FIRST_RATE,)}
    while True:
        best = min(tried, key=tried.__getitem__)
        missing = [rate for rate in (best / 2, best * 2) if rate not in tried]
        if not missing:
            return best
        tried[missing[0]] = last(losses(folder, name, "AdamW", missing[0], seed))


def compare(folder: Path, name: str, seeds: list[int], factor: float) -> list[list[str]]:
    """A row for each seed and optimizer: the mean loss of each quarter's last tenth, and of the whole's."""
    rate, rows, gains = tuned(folder, name, seeds[0]), [], []
    for seed in seeds:
        curves = {"AdamW": losses(folder, name, "AdamW", rate, seed)}
        curves[f"Muon x {factor:g}"] = muon = losses(folder, name, "Muon", rate, seed, factor)
        for optimizer, curve in curves.items():
            ends = [len(curve) * part // PARTS for part in range(1, PARTS + 1)]
            rows.append([name, f"{rate:g}", str(seed), optimizer, *(f"{last(curve[:end]):.3f}" for end in ends)])
        gains.append(last(curves["AdamW"]) - last(muon))
    spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
    rows.append([name, "", "", "AdamW - Muon", *[""] * (PARTS - 1), f"{statistics.mean(gains):+.3f} ± {spread:.3f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--factor", type=float, default=1.0, help="of the rate of Muon's matrices")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "optimizers")
    options = parser.parse_args()
    rows = [row for name in options.models for row in compare(options.out, name, options.seeds, options.factor)]
    parts = [f"loss at {part / PARTS:.0%}" for part in range(1, PARTS + 1)]
    print("\n".join(table(["model", "rate", "seed", "optimizer", *parts], rows)))


if __name__ == "__main__":
    main()
