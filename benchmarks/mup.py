"""Check that muP keeps activations and the best learning rate the same in wider models.

    python benchmarks/mup.py [--steps 60]

The model has two blocks with four heads, and reads the bytes of Python's standard library. The base
of muP is the smallest width. The script prints two tables, and exits with 1 if muP fails:

- The coordinate check of Tensor Programs V (https://arxiv.org/abs/2203.03466, appendix D.1): the
  RMS change of activations after a few steps must not depend on the width.
- The final training loss for several learning rates and widths: the best learning rate of a model
  that is four times wider must be at most one factor of 2 away.

Each table also has the values without muP.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from runs import table
from torch import Tensor
from torch.nn import functional as F

from titanlite.config.flavors import Architecture
from titanlite.config.schema import Optimizer
from titanlite.model.attention import attention
from titanlite.model.llama import Llama, TransformerBlock
from titanlite.optim.build import build_optimizer, set_learning_rate

if TYPE_CHECKING:
    from titanlite.model.attention import Mask

BASE = 64
HEADS = 4
SEQ_LEN = 64
BATCH_SIZE = 16
COORDINATE_WIDTHS = (64, 128, 256, 512)
COORDINATE_STEPS = 4
COORDINATE_LR = 2**-7
LR_WIDTHS = (64, 128, 256)
EXPONENTS = range(-9, -3)
MAX_DRIFT = 2.0
"""Largest allowed ratio between the RMS changes of an activation at two widths, with muP. Without
muP, the changes grow with the width."""


def build_arch(width: int, mup: bool) -> Architecture:
    """Return an architecture of two blocks with four heads of dimension `width` / 4."""
    arch = Architecture(width, 2, HEADS, HEADS, 2 * width, 256, SEQ_LEN)
    if not mup:
        return arch
    return replace(arch, mup_base_dim=BASE, mup_base_head_dim=BASE // HEADS)


@cache
def read_bytes() -> Tensor:
    """Return the first two million bytes of Python's standard library as token ids."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:2_000_000], dtype=torch.uint8).long()


def sample_batch(step: int) -> Tensor:
    """Return the batch of a step, shape (B, T + 1). All models see the same batches."""
    data = read_bytes()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - SEQ_LEN, (BATCH_SIZE,), generator=generator)
    return data[starts[:, None] + torch.arange(SEQ_LEN + 1)]


def train(model: Llama, lr: float, steps: int, warmup: int) -> Iterator[float]:
    """Train a model, and yield the loss of each step.

    Args:
        model: Model with initial weights.
        lr: Peak learning rate. It decays linearly to 0 after the warmup, if there is one.
        steps: Number of steps.
        warmup: Number of warmup steps. 0 means a constant learning rate.
    """
    optimizer = build_optimizer(model, Optimizer(lr=lr), arch=model.arch)
    for step in range(steps):
        factor = 1.0
        if warmup:
            factor = min((step + 1) / warmup, (steps - step) / (steps - warmup))
        set_learning_rate(optimizer, lr * factor)
        batch = sample_batch(step)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@torch.no_grad()
def record_activations(model: Llama) -> dict[str, Tensor]:
    """Return activations on a fixed batch: attention scores, residual stream and logits."""
    activations: dict[str, Tensor] = {}
    last_block = model.layers["1"]
    assert isinstance(last_block, TransformerBlock)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        activations["attention scores"] = q @ k.mT / math.sqrt(q.shape[-1])
        return attention(q, k, v, mask)

    def keep_output(_module: object, _inputs: object, output: Tensor) -> None:
        activations["residual stream"] = output

    last_block.attention.attend = attend
    hook = last_block.register_forward_hook(keep_output)
    activations["logits"] = model(sample_batch(-1)[:, :-1])
    hook.remove()
    last_block.attention.attend = attention
    return activations


def measure_coordinates(width: int, mup: bool) -> dict[str, float]:
    """Return the RMS change of each activation after a few steps."""
    model = Llama(build_arch(width, mup))
    before = record_activations(model)
    for _ in train(model, COORDINATE_LR, COORDINATE_STEPS, warmup=0):
        pass
    after = record_activations(model)
    return {
        name: (after[name] - before[name]).square().mean().sqrt().item() for name in sorted(before)
    }


def measure_loss(width: int, mup: bool, exponent: int, steps: int) -> float:
    """Return the mean training loss of the last tenth of the steps."""
    model = Llama(build_arch(width, mup))
    losses = list(train(model, 2.0**exponent, steps, warmup=steps // 10))
    return statistics.mean(losses[-max(1, steps // 10) :])


def check_coordinates() -> bool:
    """Print the coordinate check, and return whether muP keeps the coordinates the same."""
    rows = []
    drifts = []
    for mup in (True, False):
        by_width = [measure_coordinates(width, mup) for width in COORDINATE_WIDTHS]
        for name in by_width[0]:
            changes = [coordinates[name] for coordinates in by_width]
            drift = max(changes) / min(changes)
            if mup:
                drifts.append(drift)
            label = "with muP" if mup else "without"
            cells = [f"{change:.3f}" for change in changes]
            rows.append([f"{name}, {label}", *cells, f"{drift:.1f}"])
    header = ["change of", *(f"width {width}" for width in COORDINATE_WIDTHS), "largest / smallest"]
    print("\n".join(table(header, rows)), flush=True)
    return max(drifts) <= MAX_DRIFT


def check_learning_rates(steps: int) -> bool:
    """Print the losses, and return whether muP keeps the best learning rate the same."""
    rows = []
    best_with_mup = []
    for mup in (True, False):
        for width in LR_WIDTHS:
            losses = {exponent: measure_loss(width, mup, exponent, steps) for exponent in EXPONENTS}
            best = min(losses, key=losses.__getitem__)
            if mup:
                best_with_mup.append(best)
            cells = [f"{loss:.3f}" for loss in losses.values()]
            best_index = EXPONENTS.index(best)
            cells[best_index] = f"**{cells[best_index]}**"
            label = "with muP" if mup else "without"
            rows.append([f"width {width}, {label}", *cells])
    header = ["loss at learning rate", *(f"2^{exponent}" for exponent in EXPONENTS)]
    print("\n".join(table(header, rows)), flush=True)
    return max(best_with_mup) - min(best_with_mup) <= 1


def main() -> None:
    """Print both tables, and exit with 1 if muP fails a check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of each training run")
    steps = parser.parse_args().steps
    checks = [check_coordinates(), check_learning_rates(steps)]
    sys.exit(0 if all(checks) else 1)


if __name__ == "__main__":
    main()
