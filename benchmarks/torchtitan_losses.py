"""Compare losses of titanlite and torchtitan 0.2.2 from the same weights and data, in fp32.

    python benchmarks/torchtitan_losses.py [--steps 10]

Each step trains on one batch of 8 sequences. Prints both losses and their relative difference.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from runs import to_options
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.utils import clip_grad_norm_
from torchtitan.components.loss import cross_entropy_loss  # pyright: ignore[reportMissingImports]
from torchtitan.components.lr_scheduler import (  # pyright: ignore[reportMissingImports]
    build_lr_schedulers,
)
from torchtitan.components.optimizer import (  # pyright: ignore[reportMissingImports]
    OptimizersContainer,
)
from torchtitan.config import job_config  # pyright: ignore[reportMissingImports]
from torchtitan.models.llama3 import (  # pyright: ignore[reportMissingImports]
    Transformer,
    TransformerModelArgs,
)

import titanlite
from titanlite.cli import main as run_titanlite_command
from titanlite.data.batch import Microbatch, RankBatch

SHAPE = {
    "dim": 256,
    "n_layers": 6,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 4096,
    "rope_theta": 500000.0,
}
FFN_DIM = 640
# Settings of titanlite that describe the defaults of torchtitan.
ROPE = {"max_seq_len": 131072, "rope_scaling_factor": 8}
ADAMW = {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "fused": True}
WARMUP_STEPS = 2
MAX_NORM = 1.0


def main() -> None:
    """Train with both frameworks and print the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    num_steps = parser.parse_args().steps

    torch.manual_seed(0)
    # The small multiplier makes torchtitan round the feed-forward width up to `multiple_of`.
    args = TransformerModelArgs(**SHAPE, multiple_of=FFN_DIM, ffn_dim_multiplier=0.1)
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights()

    with tempfile.TemporaryDirectory(prefix="losses-") as name:
        titanlite_losses, microbatches = train_titanlite(model, Path(name), num_steps)
    torchtitan_losses = train_torchtitan(model, microbatches, num_steps)

    differences = []
    losses = zip(titanlite_losses, torchtitan_losses, strict=True)
    for step, (titanlite_loss, torchtitan_loss) in enumerate(losses, 1):
        difference = titanlite_loss / torchtitan_loss - 1
        differences.append(abs(difference))
        print(
            f"step {step:3}: titanlite {titanlite_loss:.7f}, torchtitan {torchtitan_loss:.7f}, "
            f"relative difference {difference:+.1e}"
        )
    print(f"largest relative difference: {max(differences):.1e}")


def train_titanlite(
    model: torch.nn.Module, folder: Path, num_steps: int
) -> tuple[list[float], list[Microbatch]]:
    """Train titanlite, and return the loss and the microbatch of each step.

    Args:
        model: torchtitan model with the initial weights.
        folder: Folder for checkpoints and output.
        num_steps: Number of steps. Each step has one microbatch.
    """
    sizes = {f"model.{key}": value for key, value in SHAPE.items()}
    sizes |= {"model.ffn_dim": FFN_DIM}
    sizes |= {f"model.{key}": value for key, value in ROPE.items()}
    model_options = [str(option) for option in to_options(sizes)]
    import_weights(model, folder, model_options)

    settings: dict[str, object] = {
        "job.dump_folder": folder / "run",
        "checkpoint.initial_load_path": folder / "imported",
        "training.steps": num_steps,
        "training.seq_len": 2048,
        "training.local_batch_size": 8,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": WARMUP_STEPS,
        "optimizer.lr": ADAMW["lr"],
        "optimizer.weight_decay": ADAMW["weight_decay"],
        "metrics.log_freq": 1,
    }
    options = [*model_options, *(str(option) for option in to_options(settings))]

    losses = []
    microbatches = []
    with titanlite.Trainer(titanlite.load_job(options)) as trainer:
        next_global_batch = trainer.loader.next_global_batch

        def record_batch() -> RankBatch:
            batch = next_global_batch()
            microbatches.extend(batch.microbatches)
            return batch

        trainer.loader.next_global_batch = record_batch
        for _ in range(num_steps):
            numbers = trainer.step()
            assert numbers is not None
            losses.append(numbers.loss)
    return losses, microbatches


def import_weights(model: torch.nn.Module, folder: Path, model_options: list[str]) -> None:
    """Import the weights of a torchtitan model into FOLDER/imported."""
    source = folder / "torchtitan"
    save(model.state_dict(), checkpoint_id=str(source))
    command = ["import", "--torchtitan", str(source), "--out", str(folder / "imported")]
    exit_code = run_titanlite_command([*command, *model_options])
    assert exit_code == 0


def train_torchtitan(model: Any, microbatches: list[Microbatch], num_steps: int) -> list[float]:
    """Train like the torchtitan train_step, and return the loss of each step."""
    optimizers = OptimizersContainer([model], torch.optim.AdamW, ADAMW)
    scheduler_config = job_config.LRScheduler(warmup_steps=WARMUP_STEPS)
    schedulers = build_lr_schedulers(optimizers, scheduler_config, num_steps)
    losses = []
    for microbatch in microbatches[:num_steps]:
        optimizers.zero_grad()
        num_tokens = (microbatch.labels != -100).sum().float()
        loss_sum = cross_entropy_loss(model(microbatch.input_ids), microbatch.labels)
        loss = loss_sum / num_tokens
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizers.step()
        schedulers.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
