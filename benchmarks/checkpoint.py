"""Measure how long a save blocks training, and the time to load and verify a checkpoint.

    python benchmarks/checkpoint.py [--gigabytes 0.1 1] [--folder DIR] [--out FILE]

One rank trains a Llama whose weights and AdamW state have the given size. For each async mode the
benchmark reports how long `save` blocks the step loop (without the first save, which allocates),
the time until the checkpoint is published, and the slowdown of training steps during a save.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from runs import commit
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from titanlite.checkpoint.live_state import LiveState
from titanlite.checkpoint.load import Resumer
from titanlite.checkpoint.manifest import (
    CheckpointContext,
    check_checkpoint,
    list_checkpoints,
    step_folder_name,
)
from titanlite.checkpoint.save import Saver
from titanlite.config import schema
from titanlite.config.flavors import Architecture
from titanlite.model.llama import Llama
from titanlite.runtime.rank_group import RankGroup

SAVES = 5


@dataclass(frozen=True)
class Row:
    """Median seconds of one async mode."""

    mode: str
    blocked: float
    published: float
    step_alone: float
    step_meanwhile: float


class Training:
    """A model with about `gigabytes` of weights and optimizer state, and its training step."""

    def __init__(self, gigabytes: float, device: str) -> None:
        layers = max(
            1, round((gigabytes * 1e9 / 12 - 2_100_000) / 3_150_000)
        )  # 12 bytes a parameter
        arch = Architecture(512, layers, 8, 8, 1408, vocab_size=2048)
        self.model = Llama(arch)
        self.model.init_weights()
        self.model.to(device)
        for block in self.model.layers.values():
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(2048, (1, 129), device=device)

    def step(self) -> float:
        started = time.perf_counter()
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure(training: Training, mode: str, folder: Path) -> Row:
    """Save several times in one mode, and train until each save is published."""
    config = schema.Checkpoint(async_mode=mode, keep_latest_k=1)  # type: ignore[arg-type]
    context = CheckpointContext(
        config,
        folder,
        LiveState(training.model, training.optimizer),
        RankGroup(config.timeout_seconds),
        lambda line: None,
    )
    context.prepare_folder()
    saver = Saver(context)
    alone = statistics.median(training.step() for _ in range(8))
    blocked = []
    published = []
    meanwhile = []
    for save in range(SAVES + 1):
        started = time.perf_counter()
        saver.save(save, lambda step=save: {"step": step, "tokens": 0})
        stopped = time.perf_counter() - started
        steps = []
        target = folder / step_folder_name(save)
        while not target.exists():
            steps.append(training.step())
        # the file system may show the folder before the writer has told all ranks
        saver.wait_until_saved()
        if save > 0:
            blocked.append(stopped)
            published.append(time.perf_counter() - started)
            meanwhile += steps
    saver.close()
    context.ranks.close()
    assert saver.stats()["failed_saves"] == 0
    step_meanwhile = statistics.median(meanwhile) if meanwhile else alone
    return Row(
        mode, statistics.median(blocked), statistics.median(published), alone, step_meanwhile
    )


def measure_load(training: Training, folder: Path) -> tuple[int, float, float, float]:
    """Measure a load with all files in the page cache.

    Returns:
        Bytes of the checkpoint, and the seconds of one copy in memory (a lower bound for staging),
        of the whole load, and of its verification.
    """
    path = list_checkpoints(folder)[-1]
    live = LiveState(training.model, training.optimizer)
    context = CheckpointContext(schema.Checkpoint(), folder, live, RankGroup(60), lambda line: None)
    resumer = Resumer(context)
    resumer.load()
    load = statistics.median(seconds(resumer.load) for _ in range(SAVES))
    verify = statistics.median(seconds(lambda: check_checkpoint(path)) for _ in range(SAVES))
    context.ranks.close()
    size = sum(file.stat().st_size for file in path.iterdir())
    source = torch.ones(size // 4)
    target = torch.ones(size // 4)
    copy = statistics.median(seconds(lambda: target.copy_(source)) for _ in range(SAVES))
    return size, copy, load, verify


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: a temporary folder"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29577",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    modes = ["disabled", "async", *(["async_with_pinned_mem"] if device == "cuda" else [])]
    lines = [
        "# Cost of checkpoints",
        "",
        "    python benchmarks/checkpoint.py",
        "",
        "This page shows how long it takes to save and load a checkpoint. All times are medians of "
        f"{SAVES} saves after one warmup save, with files in the page cache. They were measured on one "
        f"{'GPU' if device == 'cuda' else 'CPU'} rank with {os.cpu_count()} cores and a load average of "
        f"{os.getloadavg()[0]:.1f} before the start, with torch "
        f"{torch.__version__}, Python {platform.python_version()} and {commit()}.",
        "",
        "How much does saving a checkpoint delay training? The columns of the table have these meanings:",
        "",
        "| column | meaning |",
        "|---|---|",
        "| blocked | time for which a save blocks training |",
        "| share | this time relative to a synchronous save |",
        "| published | time until the checkpoint is complete |",
        "| step, step during a save | time of a training step without a save and during a save |",
        "",
        "| state | async_mode | blocked | share | published | step | step during a save |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    loads = []
    for size in options.gigabytes:
        training = Training(size, device)
        training.step()
        rows = []
        for mode in modes:
            folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
            rows.append(measure(training, mode, folder))
            if mode == "disabled":
                loads.append((size, *measure_load(training, folder)))
            shutil.rmtree(folder)
        for row in rows:
            lines.append(
                f"| {size:g} GB | {row.mode} | {row.blocked:.3f} s | {row.blocked / rows[0].blocked:.0%} "
                f"| {row.published:.2f} s | {row.step_alone:.3f} s | {row.step_meanwhile:.3f} s |"
            )
            print(lines[-1], flush=True)
    lines += [
        "",
        "The next table shows how long it takes to load a checkpoint, and how much of this time is spent on verifying "
        'checksums. For comparison, "copy in memory" is the time to copy a tensor of the same size to another tensor.',
        "",
    ]
    lines += ["| state | bytes on disk | copy in memory | load | verification | share |"]
    lines += ["|---:|---:|---:|---:|---:|---:|"]
    for size, total, copy, load, verify in loads:
        bytes_and_copy = f"| {size:g} GB | {total / 1e9:.3f} GB | {copy:.3f} s"
        lines.append(f"{bytes_and_copy} | {load:.2f} s | {verify:.3f} s | {verify / load:.0%} |")
        print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
