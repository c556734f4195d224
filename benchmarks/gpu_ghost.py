"""Compare a step of titanlite and torchtitan 0.3.0 on the ghost GPU: memory, launches and waits.

    python benchmarks/gpu_ghost.py [--only TEXT ...] [--sides titanlite torchtitan]
    python benchmarks/gpu_ghost.py --only compiled --sides titanlite --keys optimizer.name=Muon

Rank 0 of 8 H100 runs alone, because NCCL on the ghost GPU never waits, and CPU collectives are
fake. Install torchtitan for .venv-ghost with `pip install --no-deps --target DIR torchtitan==0.3.0
torchdata==0.11.0 torch_checkpointing==0.1.1 spmd_types==0.2.3 einops==0.8.2`, and add DIR to
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_works import Work, titanlite_options
from runs import ROOT, table, write_text

RANKS, GIB, WARM_STEPS = 8, 2**30, 3
IN_GIB = ("allocated", "reserved", "handed over")


@dataclass(frozen=True)
class Row:
    """A job of Llama in fp32 on 8 GPUs, with options that both frameworks have."""

    work: Work
    layout: dict[str, int]


def _work(**changes: Any) -> Work:
    defaults = {"dtype": "float32", "rows": 2, "activation_checkpoint": "selective", "steps": 1000}
    return Work(**{**defaults, **changes})


TIED = ("1b",)  # flavors with tied embeddings in torchtitan
ROWS = {
    "compiled": Row(_work(), {}),
    "eager": Row(_work(compile=False), {}),
    "full recomputation": Row(_work(activation_checkpoint="full"), {}),
    "1b, eager": Row(_work(flavor="1b", compile=False), {}),
    "HSDP 2 x 4": Row(_work(), {"data_parallel_replicate_degree": 2}),
    "TP 8": Row(_work(), {"tensor_parallel_degree": 8}),
    "32,768 tokens, full recomputation": Row(
        _work(rows=1, seq_len=32768, activation_checkpoint="full"), {}
    ),
    "4,096 tokens, 4 sequences": Row(_work(rows=4, seq_len=4096), {}),
}


def mark(text: str) -> None:
    """Write a line to the log of the ghost GPU."""
    ctypes.CDLL("libcuda.so.1").ghost_mark(text.encode())


def run_titanlite(row: Row, folder: Path, text: Path, keys: Sequence[str]) -> None:
    """Train in this process until the measured step is done."""
    from titanlite.load_run import load_run
    from titanlite.train.trainer import Trainer

    words = [*titanlite_options(row.work, folder, text, own=False), "--metrics.log_freq", "1"]
    words += [
        word for name, value in row.layout.items() for word in (f"--parallelism.{name}", str(value))
    ]
    if row.work.flavor in TIED:
        words.remove("--model.no-tied_embeddings")
    words += [f"--{key}" for key in keys]
    with Trainer(load_run(words, world_size=RANKS)) as trainer:
        for _ in range(WARM_STEPS):
            trainer.step()
        measured(trainer.step)()


def torchtitan_config(row: Row, folder: Path, text: Path) -> Any:
    """Return the same job for torchtitan, which has Python configs.

    The job uses the defaults of torchtitan, except for CUDA graphs: the ghost GPU cannot capture
    several streams.
    """
    from torchtitan.distributed.activation_checkpoint import (  # pyright: ignore[reportMissingImports]
        FullAC,
        SelectiveAC,
    )
    from torchtitan.models.llama3 import model_registry  # pyright: ignore[reportMissingImports]
    from torchtitan.models.llama3.config_registry import llama3_8b  # pyright: ignore[reportMissingImports]

    work = row.work
    config = llama3_8b()
    config.model_spec = model_registry(work.flavor.upper())
    config.dump_folder = str(folder)
    config.hf_assets_path = str(ROOT / "assets/tokenizer")
    config.profiler.enable_profiling = False
    config.metrics.enable_tensorboard = False
    config.metrics.log_freq = 1
    config.debug.enable_structured_logging = False
    config.lr_scheduler.warmup_steps = 1
    config.dataloader.dataset = "c4_test"  # the name of a loader of local files
    config.dataloader.dataset_path = str(text)

    config.training.local_batch_size = work.rows
    config.training.seq_len = work.seq_len
    config.training.steps = WARM_STEPS + 1
    config.training.disable_cuda_graphs = True
    for name, value in row.layout.items():
        setattr(config.parallelism, name, value)

    config.compile.enable = work.compile
    checkpointing = {"none": None, "selective": SelectiveAC.Config, "full": FullAC.Config}
    policy = checkpointing[work.activation_checkpoint]
    config.activation_checkpoint = policy and policy(preserve_rng_state=False)
    return config


def run_torchtitan(row: Row, folder: Path, text: Path, _keys: Sequence[str]) -> None:
    """Train the same job with the trainer of torchtitan."""
    import torch
    from torch import Tensor

    def keep_weights(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    # torch draws again while values are out of range. Comparisons on the ghost GPU ignore values,
    # so this would never end.
    torch.nn.init.trunc_normal_ = keep_weights

    torch.distributed.set_timeout = lambda *_: None  # pyright: ignore  # fake groups have none

    import torchtitan.trainer as torchtitan  # pyright: ignore[reportMissingImports]

    torchtitan.math.isfinite = lambda _: True  # losses on the ghost GPU are meaningless
    step = torchtitan.Trainer.train_step

    def train_step(trainer: Any, data: Any) -> None:
        (measured(step) if trainer.step > WARM_STEPS else step)(trainer, data)

    torchtitan.Trainer.train_step = train_step
    torchtitan_config(row, folder, text).build().train()


def measured(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `step` so that it marks the log and records the peak memory since the start."""
    import torch

    def run(*arguments: Any) -> None:
        mark("step")
        step(*arguments)
        mark("end")
        peaks = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        mark(f"found {json.dumps(peaks)}")

    return run


def be_rank_0_alone() -> None:
    """Replace the other ranks by fake collectives. Peak memory is measured over all steps."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # pyright: ignore[reportMissingImports]  # noqa: F401

    torch.cuda.reset_peak_memory_stats = lambda *_: (
        None
    )  # torchtitan calls it with each line of its log
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": f"{RANKS}",
        "LOCAL_WORLD_SIZE": f"{RANKS}",
    }
    os.environ["TITANLITE_STORE"] = tempfile.mktemp()
    begin, group = dist.init_process_group, dist.new_group

    def init_process_group(*_: Any, **__: Any) -> None:
        begin("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=RANKS)  # pyright: ignore

    def new_group(*ranks: Any, backend: str | None = None, **how: Any) -> Any:
        return group(*ranks, backend="fake" if backend == "gloo" else backend, **how)

    dist.init_process_group, dist.new_group = init_process_group, new_group
    dist.ProcessGroup.set_timeout = lambda *_: None  # pyright: ignore  # fake ones have none


def count(log: str) -> dict[str, float]:
    """Return the measurements of a step from the log."""
    step, found = re.search(
        r"^mark step\n(.*?)^mark end\nmark found (.*?)$", log, re.MULTILINE | re.DOTALL
    ).groups()  # pyright: ignore
    peaks = {name: value / GIB for name, value in json.loads(found).items()}
    kinds = [line.split()[0] for line in step.splitlines()]
    launches = sum(kind in ("kernel", "triton", "matmul", "cudnn", "memset") for kind in kinds)
    waits = sum(bool(re.match("wait|copy .*pageable", line)) for line in step.splitlines())
    handed = (
        sum(int(size) for size in re.findall(r"^nccl (?!recv)\w+ (\d+)", step, re.MULTILINE)) / GIB
    )
    return {**peaks, "handed over": handed, "launches": launches, "waits": waits}


def start(
    side: str, name: str, text: Path, keep: Path | None, keys: Sequence[str]
) -> dict[str, float]:
    """Run one framework in a new process, and return the result of `count`."""
    with tempfile.TemporaryDirectory(prefix="ghost-") as folder:
        command = [
            ROOT / "scripts/ghost.sh",
            "python",
            __file__,
            "--run",
            side,
            "--only",
            name,
            "--folder",
            folder,
        ]
        path = f"{ROOT}:{ROOT}/benchmarks:{os.environ.get('PYTHONPATH', '')}"
        own = {
            "GHOST_GPUS": RANKS,
            "GHOST_GIB": 190,
            "GHOST_LOG": f"{folder}/log",
            "PYTHONPATH": path,
        }
        own |= {
            "HF_HUB_OFFLINE": 1,
            "HF_DATASETS_OFFLINE": 1,
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        }
        environment = os.environ | {key: str(value) for key, value in own.items()}
        words = [*map(str, command), "--text", str(text), "--keys", *keys]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        logs = [path.read_text() for path in Path(folder).glob("log.*")]
        if done.returncode:
            raise SystemExit(f"{side}, {name}: {(done.stdout + done.stderr)[-6000:]}")
        log = next(log for log in logs if "mark found" in log)
        if keep:
            keep.mkdir(exist_ok=True)
            (keep / f"{name}.{side}".replace(" ", "-")).write_text(log)
        return count(log)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="rows with this in their name")
    parser.add_argument("--sides", nargs="+", default=["titanlite", "torchtitan"])
    parser.add_argument("--keep", type=Path, help="folder for the ghost's logs")
    parser.add_argument(
        "--keys",
        nargs="*",
        default=[],
        help="more keys of the titanlite job, such as optimizer.lr=1e-3",
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        be_rank_0_alone()
        sides = {"titanlite": run_titanlite, "torchtitan": run_torchtitan}
        return sides[options.run](ROWS[options.only[0]], options.folder, options.text, options.keys)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ghost-") as folder:
        text = write_text(Path(folder)).parent
        for name in (name for name in ROWS if any(only in name for only in options.only)):
            found = [start(side, name, text, options.keep, options.keys) for side in options.sides]
            rows.append(
                [
                    name,
                    *(
                        f"{side[key]:,.{2 * (key in IN_GIB)}f}"
                        for key in found[0]
                        for side in found
                    ),
                ]
            )
            rows[-1][7:7] = (
                [f"{found[0]['reserved'] / found[1]['reserved']:.2f}"] if len(found) == 2 else []
            )
            print(*rows[-1], sep=" | ", flush=True)
    heads = [f"GiB {what}, {side}" for what in IN_GIB for side in options.sides]
    heads += ["ratio"] * (len(options.sides) == 2)
    heads += [f"{what}, {side}" for what in ("launches", "waits") for side in options.sides]
    print("\n".join(table(["8 GPUs, rank 0", *heads], rows)))


if __name__ == "__main__":
    main()
