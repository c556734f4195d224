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

from runs import ROOT, table, to_options

FIRST_LR = 3e-3
# The tables show the loss at the end of each of these equal parts of a run.
NUM_PARTS = 4
BATCH = {"training.seq_len": 128, "training.local_batch_size": 16}  # 2,048 tokens per step

# Optimizer groups that scale the learning rate of block matrices.
GROUPS = """
[[optimizer.groups]]
params = ["layers.*.w?.weight"]
lr_factor = {}

[[optimizer.groups]]
params = ["tok_embeddings.weight", "layers.*norm.weight", "norm.weight", "output.weight"]
"""


class ModelVariant(NamedTuple):
    """The debug model with other sizes.

    Attributes:
        num_steps: Number of training steps.
        sizes: Keys of the section [model].
    """

    num_steps: int
    sizes: dict[str, int]


MODELS = {
    "debug": ModelVariant(120, {}),
    "20m": ModelVariant(
        24, {"dim": 448, "n_layers": 7, "n_heads": 7, "n_kv_heads": 7, "ffn_dim": 1152}
    ),
}


def measure_losses(
    folder: Path, model_name: str, optimizer: str, lr: float, seed: int, factor: float = 1.0
) -> list[float]:
    """Return the training loss of each step. Train only if the results do not exist yet.

    Args:
        folder: Folder of all runs.
        model_name: Key of MODELS.
        optimizer: AdamW or Muon.
        lr: Peak learning rate.
        seed: Seed of weights and data.
        factor: Factor for the learning rate of block matrices.
    """
    model = MODELS[model_name]
    lr_name = f"{lr:g}" if factor == 1 else f"{lr:g}x{factor:g}"
    run_folder = folder / f"{model_name}-{optimizer}-{lr_name}-{seed}"
    losses = read_losses(run_folder)
    if len(losses) < model.num_steps:
        train(model, run_folder, optimizer, lr, seed, factor)
        losses = read_losses(run_folder)
    print(f"{run_folder.name}: {final_loss(losses):.3f}", file=sys.stderr, flush=True)
    return losses


def read_losses(run_folder: Path) -> list[float]:
    """Return the loss of each step that a run has logged."""
    metrics = run_folder / "metrics.jsonl"
    if not metrics.exists():
        return []
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def train(
    model: ModelVariant, run_folder: Path, optimizer: str, lr: float, seed: int, factor: float
) -> None:
    """Train in a new process. The arguments are the same as in `measure_losses`."""
    config = (ROOT / "train_configs" / "debug_model.toml").read_text()
    if factor != 1:
        config += GROUPS.format(factor)
    run_folder.parent.mkdir(parents=True, exist_ok=True)
    config_file = run_folder.with_suffix(f"{run_folder.suffix}.toml")
    config_file.write_text(config)

    settings: dict[str, object] = {f"model.{key}": value for key, value in model.sizes.items()}
    settings |= BATCH
    settings |= {
        "training.steps": model.num_steps,
        "training.seed": seed,
        "lr_scheduler.warmup_steps": model.num_steps // 10,
        "optimizer.name": optimizer,
        "optimizer.lr": lr,
        "job.dump_folder": run_folder,
        "metrics.log_freq": 1,
        "job.config_file": config_file,
    }
    options = [str(option) for option in to_options(settings)]
    command = [sys.executable, "-m", "titanlite", "train", *options, "--checkpoint.no-enable"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def final_loss(losses: list[float]) -> float:
    """Return the mean loss of the last tenth of the steps."""
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def find_best_lr(folder: Path, model_name: str, seed: int) -> float:
    """Return the best learning rate of AdamW."""

    def measure(lr: float) -> float:
        return final_loss(measure_losses(folder, model_name, "AdamW", lr, seed))

    results = {FIRST_LR: measure(FIRST_LR)}
    while True:
        best = min(results, key=results.__getitem__)
        untried = [lr for lr in (best / 2, best * 2) if lr not in results]
        if not untried:
            return best
        results[untried[0]] = measure(untried[0])


def compare(folder: Path, model_name: str, seeds: list[int], factor: float) -> list[list[str]]:
    """Return table rows: the loss at the end of each part of a run, and the mean difference."""
    lr = find_best_lr(folder, model_name, seeds[0])
    rows = []
    differences = []
    for seed in seeds:
        adamw = measure_losses(folder, model_name, "AdamW", lr, seed)
        muon = measure_losses(folder, model_name, "Muon", lr, seed, factor)
        differences.append(final_loss(adamw) - final_loss(muon))
        for optimizer, losses in (("AdamW", adamw), (f"Muon x {factor:g}", muon)):
            ends = [len(losses) * part // NUM_PARTS for part in range(1, NUM_PARTS + 1)]
            cells = [f"{final_loss(losses[:end]):.3f}" for end in ends]
            rows.append([model_name, f"{lr:g}", str(seed), optimizer, *cells])

    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    difference = f"{statistics.mean(differences):+.3f} ± {spread:.3f}"
    empty_cells = [""] * (NUM_PARTS - 1)
    rows.append([model_name, "", "", "AdamW - Muon", *empty_cells, difference])
    return rows


def main() -> None:
    """Compare both optimizers on each model and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--factor",
        type=float,
        default=1.0,
        help="factor for the learning rate of the matrices that Muon trains",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "optimizers")
    options = parser.parse_args()

    rows = []
    for model_name in options.models:
        rows += compare(options.out, model_name, options.seeds, options.factor)
    parts = [f"loss at {part / NUM_PARTS:.0%}" for part in range(1, NUM_PARTS + 1)]
    print("\n".join(table(["model", "learning rate", "seed", "optimizer", *parts], rows)))


if __name__ == "__main__":
    main()
