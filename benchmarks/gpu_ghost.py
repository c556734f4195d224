"""Compare a step of titanlite and torchtitan 0.3.0 on the ghost GPU: memory, launches and waits.

    python benchmarks/gpu_ghost.py [--only TEXT ...] [--results FILE]
    python benchmarks/gpu_ghost.py --only compiled --sides titanlite --keys optimizer.name=Muon

All jobs take half an hour. With `--results`, an interrupted benchmark continues with the first job
that the file does not have. The side "all" is titanlite with `parallelism.memory_savers = "all"`.
The side "torchtitan-always", which runs only if `--sides` lists it, is torchtitan with
`parallelism.fsdp_reshard_after_forward = "always"`.

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
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_workloads import GpuWorkload, titanlite_options
from runs import ROOT, commit, table, write_text

RANKS = 8
WARM_STEPS = 3
GIB = 2**30
SIDES = ("titanlite", "all", "torchtitan", "torchtitan-always")
DEFAULT_SIDES = SIDES[:3]


@dataclass(frozen=True)
class Row:
    """A job of Llama in fp32 on 8 GPUs, with options that both frameworks have.

    Attributes:
        layout: Options of the section `parallelism`.
        microbatches: Microbatches of each data-parallel rank per step.
        checkpoint_interval: If positive, activation checkpointing recomputes every n-th block in
            full, instead of what `work` says.
    """

    work: GpuWorkload
    layout: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    checkpoint_interval: int = 0

    @property
    def pipeline_degree(self) -> int:
        return self.layout.get("pipeline_parallel_degree", 1)

    @property
    def global_batch_size(self) -> int:
        """Return the sequences per step."""
        ranks_of_a_batch = self.pipeline_degree
        for name in ("tensor_parallel_degree", "context_parallel_degree"):
            ranks_of_a_batch *= self.layout.get(name, 1)
        return self.work.local_batch_size * self.microbatches * RANKS // ranks_of_a_batch


def _work(**changes: Any) -> GpuWorkload:
    defaults = {
        "dtype": "float32",
        "local_batch_size": 2,
        "activation_checkpoint": "selective",
        "steps": 1000,
    }
    return GpuWorkload(**{**defaults, **changes})


# torchtitan ties the embeddings of these flavors.
TIED = ("1b", "3b")
ROWS = {
    "compiled": Row(_work()),
    "eager": Row(_work(compile=False)),
    "full activation checkpointing": Row(_work(activation_checkpoint="full")),
    "activation checkpointing of every 2nd block": Row(_work(), checkpoint_interval=2),
    "no activation checkpointing, 1 sequence": Row(
        _work(local_batch_size=1, activation_checkpoint="none")
    ),
    "4,096 tokens, 4 sequences": Row(_work(local_batch_size=4, seq_len=4096)),
    "32,768 tokens, full activation checkpointing": Row(
        _work(local_batch_size=1, seq_len=32768, activation_checkpoint="full")
    ),
    "4 microbatches": Row(_work(), microbatches=4),
    "FP8 rowwise": Row(_work(precision="float8")),
    "1b, eager": Row(_work(flavor="1b", compile=False)),
    "1b, 4 sequences": Row(_work(flavor="1b", local_batch_size=4)),
    "3b": Row(_work(flavor="3b")),
    "HSDP 2 x 4": Row(_work(), {"data_parallel_replicate_degree": 2}),
    "TP 2": Row(_work(), {"tensor_parallel_degree": 2}),
    "TP 8": Row(_work(), {"tensor_parallel_degree": 8}),
    "CP 2, 16,384 tokens": Row(_work(seq_len=16384), {"context_parallel_degree": 2}),
    "PP 2, 8 microbatches": Row(_work(local_batch_size=1), {"pipeline_parallel_degree": 2}, 8),
    "PP 4, 8 microbatches": Row(_work(local_batch_size=1), {"pipeline_parallel_degree": 4}, 8),
}


def mark(text: str) -> None:
    """Write a line to the log of the ghost GPU."""
    ctypes.CDLL("libcuda.so.1").ghost_mark(text.encode())


def run_titanlite(row: Row, folder: Path, text: Path, keys: Sequence[str]) -> None:
    """Train in this process until the measured step is done."""
    from titanlite.load_run import load_run
    from titanlite.train.trainer import Trainer

    options = [
        *titanlite_options(row.work, folder, text, extra_features=False),
        "--metrics.log_freq",
        "1",
    ]
    options += [f"--training.global_batch_size={row.global_batch_size}"]
    options += [f"--parallelism.{name}={value}" for name, value in row.layout.items()]
    if row.checkpoint_interval:
        options += ["--activation_checkpoint.selective_ac_option", str(row.checkpoint_interval)]
    if row.work.precision == "float8":
        options += ["--float8.recipe_name", "rowwise"]  # the recipe of torchtitan
    if row.work.flavor in TIED:
        options.remove("--model.no-tied_embeddings")
    options += [f"--{key}" for key in keys]
    with Trainer(load_run(options, world_size=RANKS)) as trainer:
        for _ in range(WARM_STEPS):
            trainer.step()
        measured(trainer.step)()


def torchtitan_config(row: Row, folder: Path, text: Path) -> Any:
    """Return the same job for torchtitan, which has Python configs.

    The job uses the defaults of torchtitan, except for CUDA graphs: the ghost GPU cannot capture
    several streams.
    """
    from torchtitan.components.quantization import (  # pyright: ignore[reportMissingImports]
        Float8LinearConverter,
    )
    from torchtitan.models.llama3 import model_registry  # pyright: ignore[reportMissingImports]
    from torchtitan.models.llama3.config_registry import llama3_8b  # pyright: ignore[reportMissingImports]

    work = row.work
    config = llama3_8b()
    float8 = Float8LinearConverter.Config(
        model_compile_enabled=work.compile, filter_fqns=["lm_head"]
    )
    converters = [float8] if work.precision == "float8" else None
    config.model_spec = model_registry(work.flavor.upper(), converters=converters)
    config.dump_folder = str(folder)
    config.hf_assets_path = str(ROOT / "assets/tokenizer")
    config.profiler.enable_profiling = False
    config.metrics.enable_tensorboard = False
    config.metrics.log_freq = 1
    config.debug.enable_structured_logging = False
    config.lr_scheduler.warmup_steps = 1
    # With this name, torchtitan loads local files.
    config.dataloader.dataset = "c4_test"
    config.dataloader.dataset_path = str(text)

    # With a pipeline, local_batch_size contains all microbatches.
    is_pipeline = row.pipeline_degree > 1
    config.training.local_batch_size = work.local_batch_size * (
        row.microbatches if is_pipeline else 1
    )
    config.training.global_batch_size = row.global_batch_size
    config.parallelism.pipeline_parallel_microbatch_size = work.local_batch_size
    config.training.seq_len = work.seq_len
    config.training.steps = WARM_STEPS + 1
    config.training.disable_cuda_graphs = True
    for name, value in row.layout.items():
        setattr(config.parallelism, name, value)

    config.compile.enable = work.compile
    config.activation_checkpoint = torchtitan_checkpointing(row)
    return config


def torchtitan_checkpointing(row: Row) -> Any:
    """Return the config of activation checkpointing for torchtitan, or None for none."""
    from torchtitan.distributed.activation_checkpoint import (  # pyright: ignore[reportMissingImports]
        FullAC,
        SelectiveAC,
    )

    class EveryNthBlockAC(FullAC):
        """Full activation checkpointing of every n-th block, which torchtitan 0.3.0 lacks."""

        @dataclass(kw_only=True, slots=True)
        class Config(FullAC.Config):
            """The options of `FullAC`."""

        def _wrap_block(self, module: Any, *, base_fqn: str = "") -> Any:
            index = int(base_fqn.removeprefix("layers."))
            if (index + 1) % row.checkpoint_interval != 0:
                return module
            return super()._wrap_block(module, base_fqn=base_fqn)

    if row.checkpoint_interval:
        return EveryNthBlockAC.Config(preserve_rng_state=False)
    if row.work.activation_checkpoint == "none":
        return None
    policies = {"selective": SelectiveAC, "full": FullAC}
    return policies[row.work.activation_checkpoint].Config(preserve_rng_state=False)


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

    # Losses on the ghost GPU are meaningless, so they must not stop the run.
    torchtitan.math.isfinite = lambda _: True
    declare_stage_shapes(row.work)
    step = torchtitan.Trainer.train_step

    def train_step(trainer: Any, data: Any) -> None:
        (measured(step) if trainer.step > WARM_STEPS else step)(trainer, data)

    torchtitan.Trainer.train_step = train_step
    torchtitan_config(row, folder, text).build().train()


def declare_stage_shapes(work: GpuWorkload) -> None:
    """Declare the inputs and outputs of the first pipeline stage of torchtitan.

    Otherwise torch would infer them with a trial run, which exchanges messages with other ranks.
    """
    import torch
    import torchtitan.distributed.pipeline_parallel as pipeline  # pyright: ignore[reportMissingImports]
    from torch.distributed.pipelining import PipelineStage

    def build_stage(module: Any, *args: Any, **kwargs: Any) -> PipelineStage:
        tokens = torch.empty(work.local_batch_size, work.seq_len, dtype=torch.int64, device="meta")
        hidden = torch.empty(*tokens.shape, module.config.dim, dtype=torch.bfloat16, device="meta")
        hidden.requires_grad_()
        return PipelineStage(module, *args, **kwargs, input_args=tokens, output_args=hidden)

    pipeline.PipelineStage = build_stage


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

    # torchtitan calls this function at each log step.
    torch.cuda.reset_peak_memory_stats = lambda *_: None
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": f"{RANKS}",
        "LOCAL_WORLD_SIZE": f"{RANKS}",
    }
    os.environ["TITANLITE_STORE"] = tempfile.mktemp()
    real_init = dist.init_process_group
    real_new_group = dist.new_group

    def init_process_group(*_: Any, **__: Any) -> None:
        real_init("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=RANKS)  # pyright: ignore

    def new_group(*ranks: Any, backend: str | None = None, **options: Any) -> Any:
        return real_new_group(*ranks, backend="fake" if backend == "gloo" else backend, **options)

    def recv(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        """Receive the vote of the other pipeline stages for the declared shapes."""
        tensor.fill_(1)

    dist.init_process_group = init_process_group
    dist.new_group = new_group
    dist.recv = recv
    dist.ProcessGroup.set_timeout = lambda *_: None  # pyright: ignore  # fake ones have none


def count(log: str) -> dict[str, float]:
    """Return the measurements of a step from the log. Memory and NCCL traffic are in GiB."""
    match = re.search(r"^mark step\n(.*?)^mark end\nmark found (.*?)$", log, re.M | re.S)
    assert match is not None
    step, peaks = match.groups()
    lines = step.splitlines()
    kinds = [line.split()[0] for line in lines]
    sent = re.findall(r"^nccl (?!recv)\w+ (\d+)", step, re.MULTILINE)
    return {
        **{name: value / GIB for name, value in json.loads(peaks).items()},
        "nccl": sum(int(size) for size in sent) / GIB,
        "launches": sum(
            kind in ("kernel", "triton", "matmul", "cudnn", "memset") for kind in kinds
        ),
        "waits": sum(bool(re.match("wait|copy .*pageable", line)) for line in lines),
    }


def start(
    side: str, name: str, text: Path, keep: Path | None, keys: Sequence[str]
) -> dict[str, float]:
    """Run one framework in a new process, and return the result of `count`."""
    with tempfile.TemporaryDirectory(prefix="ghost-") as folder:
        command = [
            str(ROOT / "scripts/ghost.sh"),
            "python",
            __file__,
            "--run",
            side,
            "--only",
            name,
        ]
        command += ["--folder", folder, "--text", str(text), "--keys", *keys]
        variables = {
            "GHOST_GPUS": str(RANKS),
            "GHOST_GIB": "190",
            "GHOST_LOG": f"{folder}/log",
            "PYTHONPATH": f"{ROOT}:{ROOT}/benchmarks:{os.environ.get('PYTHONPATH', '')}",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        }
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        logs = [path.read_text() for path in Path(folder).glob("log.*")]
        if done.returncode:
            raise SystemExit(f"{side}, {name}: {(done.stdout + done.stderr)[-6000:]}")
        log = next(log for log in logs if "mark found" in log)
        if keep:
            keep.mkdir(exist_ok=True)
            (keep / f"{name}.{side}".replace(" ", "-")).write_text(log)
        return count(log)


def measure(
    names: Sequence[str], sides: Sequence[str], options: argparse.Namespace
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure jobs, and return {job: {side: measurements}}.

    With `--results`, read the measurements of this commit from the file, and add the missing ones.
    """
    results: dict[str, Any] = {"commit": commit(), "keys": options.keys, "jobs": {}}
    if options.results and options.results.exists():
        stored = json.loads(options.results.read_text())
        if stored | {"jobs": {}} == results:
            results = stored

    with tempfile.TemporaryDirectory(prefix="ghost-") as folder:
        text = write_text(Path(folder)).parent
        for name in names:
            job = results["jobs"].setdefault(name, {})
            for side in sides:
                if side not in job:
                    job[side] = start(side, name, text, options.keep, options.keys)
                    print(f"{name}, {side}: {job[side]}", flush=True)
                    if options.results:
                        options.results.write_text(json.dumps(results, indent=1))
    return {name: results["jobs"][name] for name in names}


def format_table(
    jobs: dict[str, dict[str, dict[str, float]]], sides: Sequence[str], keys: dict[str, str]
) -> str:
    """Return a table with some measurements of each job, and their ratios to torchtitan.

    Args:
        keys: {measurement: its name in the header of the table}.
    """
    rivals = [side for side in sides if side != "torchtitan"] if "torchtitan" in sides else []
    header = ["8 GPUs, rank 0"]
    for name in keys.values():
        header += [f"{name}, {side}" for side in sides] + [f"ratio, {side}" for side in rivals]

    rows = []
    columns: dict[tuple[str, str], list[float]] = {}
    for job_name, job in jobs.items():
        row = [job_name]
        for key in keys:
            decimals = 0 if key in ("launches", "waits") else 2
            row += [f"{job[side][key]:,.{decimals}f}" for side in sides]
            for side in rivals:
                ratio = job[side][key] / job["torchtitan"][key]
                columns.setdefault((key, side), []).append(ratio)
                row.append(f"{ratio:.2f}")
        rows.append(row)

    if rivals:
        medians = ["median"]
        for key in keys:
            medians += [""] * len(sides)
            medians += [f"{statistics.median(columns[key, side]):.2f}" for side in rivals]
        rows.append(medians)
    return "\n".join(table(header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="rows with this in their name")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=DEFAULT_SIDES)
    parser.add_argument("--results", type=Path, help="JSON file with the measurements so far")
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
        run = run_torchtitan if options.run.startswith("torchtitan") else run_titanlite
        savers = ["parallelism.memory_savers=all"] if options.run == "all" else []
        row = ROWS[options.only[0]]
        if options.run == "torchtitan-always":
            row = replace(row, layout={**row.layout, "fsdp_reshard_after_forward": "always"})
        return run(row, options.folder, options.text, [*savers, *options.keys])

    names = [name for name in ROWS if any(only in name for only in options.only)]
    jobs = measure(names, options.sides, options)
    memory = {"allocated": "GiB allocated", "reserved": "GiB reserved"}
    events = {"launches": "launches", "nccl": "GiB NCCL", "waits": "waits"}
    print(format_table(jobs, options.sides, memory))
    print(format_table(jobs, options.sides, events))
    print(f"{commit()}, `python benchmarks/gpu_ghost.py {' '.join(sys.argv[1:])}`")


if __name__ == "__main__":
    main()
