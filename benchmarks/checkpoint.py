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
from runs import commit, paragraph, table
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

NUM_SAVES = 5
STEPS_WITHOUT_SAVE = 8
VOCAB_SIZE = 2048
BYTES_PER_PARAMETER = 12  # an fp32 weight and two moments
PARAMETERS_PER_BLOCK = 3_150_000
OTHER_PARAMETERS = 2_100_000


@dataclass(frozen=True)
class SaveTimes:
    """Median seconds of saves in one async mode.

    Attributes:
        mode: Value of checkpoint.async_mode.
        blocked: Time for which a save blocks the step loop.
        published: Time from the start of a save until the checkpoint is complete.
        step_without_save: Time of a training step while no save is running.
        step_during_save: Time of a training step during a save.
    """

    mode: str
    blocked: float
    published: float
    step_without_save: float
    step_during_save: float


@dataclass(frozen=True)
class LoadTimes:
    """Size of a checkpoint, and median seconds of reading it.

    Attributes:
        num_bytes: Size of all files.
        copy: Time of one copy in memory, which is a lower bound for a load.
        load: Time of a load, including its verification.
        verify: Time to verify the checksums.
    """

    num_bytes: int
    copy: float
    load: float
    verify: float


class TrainedModel:
    """A model and its optimizer.

    Args:
        gigabytes: Approximate size of weights and optimizer state.
        device: "cuda" or "cpu".
    """

    def __init__(self, gigabytes: float, device: str) -> None:
        num_parameters = gigabytes * 1e9 / BYTES_PER_PARAMETER
        num_layers = round((num_parameters - OTHER_PARAMETERS) / PARAMETERS_PER_BLOCK)
        arch = Architecture(512, max(1, num_layers), 8, 8, 1408, vocab_size=VOCAB_SIZE)
        self.model = Llama(arch)
        self.model.init_weights()
        self.model.to(device)
        for block in self.model.layers.values():
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(VOCAB_SIZE, (1, 129), device=device)

    def step(self) -> float:
        """Train one step and return its seconds."""
        start = time.perf_counter()
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start


def median_seconds(function: Callable[[], object]) -> float:
    """Return the median seconds of several calls."""
    seconds = []
    for _ in range(NUM_SAVES):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure_saves(trained: TrainedModel, mode: str, folder: Path) -> SaveTimes:
    """Save several times in one mode, and train until each save is published."""
    config = schema.Checkpoint(async_mode=mode, keep_latest_k=1)  # type: ignore[arg-type]
    live_state = LiveState(trained.model, trained.optimizer)
    ranks = RankGroup(config.timeout_seconds)
    context = CheckpointContext(config, folder, live_state, ranks, lambda line: None)
    context.prepare_folder()
    saver = Saver(context)

    step_without_save = statistics.median(trained.step() for _ in range(STEPS_WITHOUT_SAVE))
    blocked = []
    published = []
    steps_during_save = []
    for save in range(NUM_SAVES + 1):
        start = time.perf_counter()
        saver.save(save, lambda step=save: {"step": step, "tokens": 0})
        blocked_seconds = time.perf_counter() - start
        step_seconds = []
        while not (folder / step_folder_name(save)).exists():
            step_seconds.append(trained.step())
        # The folder can appear before the writer has notified all ranks.
        saver.wait_until_saved()
        # The first save allocates memory.
        if save > 0:
            blocked.append(blocked_seconds)
            published.append(time.perf_counter() - start)
            steps_during_save += step_seconds

    saver.close()
    context.ranks.close()
    assert saver.stats()["failed_saves"] == 0
    return SaveTimes(
        mode,
        statistics.median(blocked),
        statistics.median(published),
        step_without_save,
        # A synchronous save leaves no time for steps.
        statistics.median(steps_during_save or [step_without_save]),
    )


def measure_loads(trained: TrainedModel, folder: Path) -> LoadTimes:
    """Load the latest checkpoint several times, with all files in the page cache."""
    path = list_checkpoints(folder)[-1]
    live_state = LiveState(trained.model, trained.optimizer)
    context = CheckpointContext(
        schema.Checkpoint(), folder, live_state, RankGroup(60), lambda line: None
    )
    resumer = Resumer(context)
    resumer.load()
    load = median_seconds(resumer.load)
    verify = median_seconds(lambda: check_checkpoint(path))
    context.ranks.close()

    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    source = torch.ones(num_bytes // 4)
    target = torch.ones(num_bytes // 4)
    copy = median_seconds(lambda: target.copy_(source))
    return LoadTimes(num_bytes, copy, load, verify)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    return parser.parse_args()


def start_process_group() -> str:
    """Create a process group of one rank, and return the type of its device."""
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29577",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    if torch.cuda.is_available():
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return "cuda"
    dist.init_process_group("gloo")
    return "cpu"


def main() -> None:
    """Measure saves and loads of each size, and write the page."""
    options = parse()
    device = start_process_group()
    modes = ["disabled", "async"]
    if device == "cuda":
        modes.append("async_with_pinned_mem")
    # The introduction contains the load average at the start, so create it before measuring.
    introduction = introduce_page(device)

    save_rows = []
    load_rows = []
    for gigabytes in options.gigabytes:
        trained = TrainedModel(gigabytes, device)
        trained.step()
        saves = []
        for mode in modes:
            folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
            saves.append(measure_saves(trained, mode, folder))
            if mode == "disabled":
                load_rows.append(load_row(gigabytes, measure_loads(trained, folder)))
            shutil.rmtree(folder)
        new_rows = [save_row(gigabytes, times, saves[0]) for times in saves]
        for row in [*new_rows, load_rows[-1]]:
            print("  ".join(row), flush=True)
        save_rows += new_rows
    options.out.write_text(format_page(introduction, save_rows, load_rows))
    dist.destroy_process_group()


def save_row(gigabytes: float, times: SaveTimes, synchronous: SaveTimes) -> list[str]:
    """Return the cells of an async mode, compared with synchronous saves."""
    return [
        f"{gigabytes:g} GB",
        times.mode,
        f"{times.blocked:.3f} s",
        f"{times.blocked / synchronous.blocked:.0%}",
        f"{times.published:.2f} s",
        f"{times.step_without_save:.3f} s",
        f"{times.step_during_save:.3f} s",
    ]


def load_row(gigabytes: float, times: LoadTimes) -> list[str]:
    """Return the cells of a size of the state."""
    return [
        f"{gigabytes:g} GB",
        f"{times.num_bytes / 1e9:.3f} GB",
        f"{times.copy:.3f} s",
        f"{times.load:.2f} s",
        f"{times.verify:.3f} s",
        f"{times.verify / times.load:.0%}",
    ]


def introduce_page(device: str) -> list[str]:
    """Return the heading, the command and the first paragraph of the page."""
    rank = "GPU rank" if device == "cuda" else "CPU rank"
    text = (
        "This page shows how long it takes to save and load a checkpoint. All times are medians of "
        f"{NUM_SAVES} saves after one warmup save, with files in the page cache. They were "
        f"measured on one {rank} with {os.cpu_count()} cores and a load average of "
        f"{os.getloadavg()[0]:.1f} before the start, with torch {torch.__version__}, Python "
        f"{platform.python_version()} and {commit()}."
    )
    return ["# Cost of checkpoints", "", "    python benchmarks/checkpoint.py", "", paragraph(text)]


def format_page(
    introduction: list[str], save_rows: list[list[str]], load_rows: list[list[str]]
) -> str:
    """Return the page as Markdown."""
    save_header = ["state", "async_mode", "blocked", "share", "published"]
    save_header += ["step", "step during a save"]
    load_header = ["state", "bytes on disk", "copy in memory", "load", "verification", "share"]
    load_introduction = paragraph(
        "The next table shows how long it takes to load a checkpoint, and how much of this time is "
        'spent on verifying checksums. For comparison, "copy in memory" is the time to copy a '
        "tensor of the same size to another tensor."
    )
    lines = [
        *introduction,
        "",
        "How much does saving a checkpoint delay training? The columns have these meanings:",
        "",
        "| column | meaning |",
        "|---|---|",
        "| blocked | time for which a save blocks training |",
        "| share | this time relative to a synchronous save |",
        "| published | time until the checkpoint is complete |",
        "| step, step during a save | time of a training step without a save and during a save |",
        "",
        "This table shows the results:",
        "",
        *table(save_header, save_rows),
        load_introduction,
        "",
        *table(load_header, load_rows),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
