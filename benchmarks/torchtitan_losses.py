"""Compare losses of titanlite and torchtitan 0.2.2 from the same weights and data, in fp32."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.utils import clip_grad_norm_
from torchtitan.components.loss import cross_entropy_loss  # pyright: ignore[reportMissingImports]
from torchtitan.components.lr_scheduler import build_lr_schedulers  # pyright: ignore[reportMissingImports]
from torchtitan.components.optimizer import OptimizersContainer  # pyright: ignore[reportMissingImports]
from torchtitan.config import job_config  # pyright: ignore[reportMissingImports]
from torchtitan.models.llama3 import Transformer, TransformerModelArgs  # pyright: ignore[reportMissingImports]

import titanlite
from titanlite.cli import main as command

SHAPE = {
    "dim": 256,
    "n_layers": 6,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 4096,
    "rope_theta": 500000.0,
}
ADAMW = {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "fused": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    theirs = Transformer(TransformerModelArgs(**SHAPE, multiple_of=640, ffn_dim_multiplier=0.1))
    with torch.no_grad():
        theirs.init_weights()
    with tempfile.TemporaryDirectory(prefix="losses-") as name:
        ours, rows = train_titanlite(theirs, Path(name), steps)
    pairs = list(zip(ours, train_torchtitan(theirs, rows, steps), strict=True))
    for step, (mine, other) in enumerate(pairs, 1):
        print(
            f"step {step:3}: titanlite {mine:.7f}, torchtitan {other:.7f}, relative difference {mine / other - 1:+.1e}"
        )
    print(f"largest relative difference: {max(abs(mine / other - 1) for mine, other in pairs):.1e}")


def train_titanlite(
    theirs: torch.nn.Module, folder: Path, steps: int
) -> tuple[list[float], list[Any]]:
    """Train, and return the loss and the microbatch of each step."""
    save(theirs.state_dict(), checkpoint_id=str(folder / "theirs"))
    sizes = SHAPE | {"ffn_dim": 640, "max_seq_len": 131072, "rope_scaling_factor": 8}
    model = [word for key, value in sizes.items() for word in (f"--model.{key}", str(value))]
    import_options = [
        "import",
        "--torchtitan",
        str(folder / "theirs"),
        "--out",
        str(folder / "imported"),
    ]
    assert command([*import_options, *model]) == 0
    settings = {
        "job.dump_folder": folder / "run",
        "checkpoint.initial_load_path": folder / "imported",
        "training.steps": steps,
        "training.seq_len": 2048,
        "training.local_batch_size": 8,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 2,
        "optimizer.lr": ADAMW["lr"],
        "optimizer.weight_decay": ADAMW["weight_decay"],
        "metrics.log_freq": 1,
    }
    losses = []
    rows = []
    options = []
    for key, value in settings.items():
        options += [f"--{key}", str(value)]
    with titanlite.Trainer(titanlite.load_job([*model, *options])) as trainer:
        read = trainer.loader.next_global_batch

        def keep() -> Any:
            batch = read()
            rows.extend(batch.microbatches)
            return batch

        trainer.loader.next_global_batch = keep
        for _ in range(steps):
            numbers = trainer.step()
            assert numbers is not None
            losses.append(numbers.loss)
    return losses, rows


def train_torchtitan(model: Any, rows: list[Any], steps: int) -> list[float]:
    """Train like the torchtitan train_step, and return the loss of each step."""
    optimizers = OptimizersContainer([model], torch.optim.AdamW, ADAMW)
    schedulers = build_lr_schedulers(optimizers, job_config.LRScheduler(warmup_steps=2), steps)
    losses = []
    for batch in rows[:steps]:
        optimizers.zero_grad()
        loss = (
            cross_entropy_loss(model(batch.input_ids), batch.labels)
            / (batch.labels != -100).sum().float()
        )
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizers.step()
        schedulers.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
